"""Encoders: transformers' own numbers, and the same bits whatever is read beside a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.backends import Format
from tailrace.backends.cpu import available_kernels
from tailrace.backends.cpu.encoder import CpuEncoder
from tailrace.backends.encoding import EncoderBackend, TextBatch
from tailrace.backends.pooled import PooledDecoder
from tailrace.backends.reference import ReferenceBackend
from tailrace.backends.reference.encoder import ReferenceEncoder
from tailrace.models.bert import EncoderModel
from tailrace.models.checkpoint import open_checkpoint
from tailrace.models.hidden import HiddenModel
from tailrace.models.load import load_encoder, load_model
from tests.models import random_bert, random_llama

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "encoders.json").read_text())
KERNELS = [name for name in ("amx", "avx512", "avx2", "portable") if name in available_kernels()]


def batch(texts: list[list[int]], second: list[int] | None = None) -> TextBatch:
    kinds = [[int(second is not None and at >= second[t]) for at in range(len(ids))] for t, ids in enumerate(texts)]
    return TextBatch(
        np.array([token for ids in texts for token in ids], np.int32),
        np.array([kind for row in kinds for kind in row], np.int32),
        np.cumsum([0, *map(len, texts)]).astype(np.int32),
    )


def model(folder: Path, kind: str = "bert", **options: Any) -> EncoderModel:
    return load_encoder(open_checkpoint(random_bert.write(folder / "model", kind, **options)))


def close(kernels: str) -> float:
    """The least cosine: with AMX products are of bf16, else of integers of 12 and 13 bits."""
    return 0.9999 if kernels == "amx" else 0.99999


def cosines(a: Any, b: Any) -> Any:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("labels", [0, 1])
def test_numbers_are_those_of_transformers(tmp_path: Path, kind: str, labels: int) -> None:
    made = model(tmp_path, kind, labels=labels, **({} if labels else {"pooling": "mean_tokens", "unit": False}))
    golden = np.array(GOLDEN["models"][f"{kind}-{labels}"])
    texts = batch(GOLDEN["texts"], GOLDEN["segments"] if labels and kind == "bert" else None)
    exact = ReferenceEncoder(made, dtype=np.float64).encode(texts)
    assert np.abs(exact - golden).max() < 2e-5
    for kernels in KERNELS:
        found = CpuEncoder(made, threads=2, kernels=kernels).encode(texts)
        assert np.abs(found - golden).max() < (2e-2 if kernels == "amx" else 4e-3) * np.abs(golden).max()
        assert labels or cosines(found, golden).min() > close(kernels)


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
def test_pooling_and_length_are_as_the_folder_says(tmp_path: Path, pooling: str) -> None:
    made = model(tmp_path, pooling=pooling)
    bare = model(tmp_path / "bare", pooling=pooling, unit=False)
    texts = batch(GOLDEN["texts"])
    scaled, plain = ReferenceEncoder(made).encode(texts), ReferenceEncoder(bare).encode(texts)
    assert np.abs(np.linalg.norm(scaled, axis=1) - 1).max() < 1e-6
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).min() > 0.1
    assert cosines(scaled, plain).min() > 0.999999
    for kernels in KERNELS:
        assert cosines(CpuEncoder(made, kernels=kernels).encode(texts), plain).min() > close(kernels)


def test_minilm_is_what_sentence_transformers_makes_of_it(minilm: Path) -> None:
    made = load_encoder(open_checkpoint(minilm))
    texts = batch(GOLDEN["minilm_ids"])
    assert np.abs(ReferenceEncoder(made).encode(texts) - np.array(GOLDEN["minilm"])).max() < 1e-6
    found = CpuEncoder(made, threads=2).encode(texts)
    assert cosines(found, GOLDEN["minilm"]).min() > 0.9999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


@pytest.mark.skipif("avx512" not in KERNELS, reason="needs AVX-512")
def test_wider_vectors_change_no_bit(tmp_path: Path) -> None:
    made = model(tmp_path)
    texts = batch(random_texts(5, 12, random_bert.POSITIONS))
    narrow, wide = (CpuEncoder(made, threads=2, kernels=kernels).encode(texts) for kernels in ("avx2", "avx512"))
    assert np.array_equal(narrow, wide)


def one_by_one(backend: EncoderBackend, texts: list[list[int]]) -> Any:
    return np.concatenate([backend.encode(batch([ids])) for ids in texts])


def random_texts(seed: int, count: int, longest: int, vocab: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_texts_bits_do_not_depend_on_its_company_or_the_threads(tmp_path: Path, kernels: str) -> None:
    made = model(tmp_path)
    texts = random_texts(1, 40, random_bert.POSITIONS)
    backend = CpuEncoder(made, threads=2, kernels=kernels)
    alone = one_by_one(backend, texts)
    assert np.array_equal(backend.encode(batch(texts)), alone)
    assert np.array_equal(backend.encode(batch(texts[::-1])), alone[::-1])
    for threads in (1, 5):
        other = CpuEncoder(made, threads=threads, kernels=kernels)
        assert np.array_equal(other.encode(batch(texts[3:9])), alone[3:9])
        assert np.array_equal(other.encode(batch(texts[:1])), alone[:1])


def test_the_reference_reads_each_text_alone_too(tmp_path: Path) -> None:
    backend = ReferenceEncoder(model(tmp_path))
    texts = random_texts(2, 6, 20)
    assert np.array_equal(backend.encode(batch(texts)), one_by_one(backend, texts))


def test_a_long_text_beside_short_ones(tmp_path: Path) -> None:
    made = model(tmp_path, max_position_embeddings=600)
    texts = [random_texts(3, 1, 600)[0], [5], list(range(40)) * 12, [6, 7]]
    backend = CpuEncoder(made, threads=3)
    found = backend.encode(batch(texts))
    assert np.array_equal(found, one_by_one(backend, texts))
    assert cosines(found, ReferenceEncoder(made).encode(batch(texts))).min() > close(backend.kernels)


@pytest.mark.parametrize(
    ("texts", "kinds", "starts"),
    [
        ([5, len(random_bert.VOCAB)], None, [0, 2]),
        ([5, -1], None, [0, 2]),
        ([5, 6], [0, 2], [0, 2]),
        ([5, 6], None, [0, 0, 2]),
        ([5, 6], None, [0]),
        ([5] * (random_bert.POSITIONS + 1), None, [0, random_bert.POSITIONS + 1]),
    ],
)
def test_what_is_no_batch_is_refused(tmp_path: Path, texts: list[int], kinds: Any, starts: list[int]) -> None:
    made = model(tmp_path)
    asked = TextBatch(np.array(texts, np.int32), np.array(kinds or [0] * len(texts), np.int32), np.array(starts))
    for backend in (ReferenceEncoder(made), CpuEncoder(made)):
        with pytest.raises(ValueError, match=r"token|segment|texts"):
            backend.encode(asked)


@pytest.mark.parametrize("kind", [Format.F16, Format.BF16])
def test_tables_of_sixteen_bits_are_read_as_they_are(tmp_path: Path, kind: Format) -> None:
    made = model(tmp_path)
    values = made.words.data.view(np.float32)
    raw = values.astype(np.float16) if kind is Format.F16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    words = type(made.words)(made.words.name, kind, made.words.shape, raw.view(np.uint8), Path(), 0)  # type: ignore[call-arg]
    other = EncoderModel(**{**vars(made), "words": words})
    texts = batch(GOLDEN["texts"])
    backend = CpuEncoder(other)
    assert cosines(backend.encode(texts), ReferenceEncoder(other).encode(texts)).min() > close(backend.kernels)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_pooled_decoder_gives_a_text_the_same_bits_in_any_company(tmp_path: Path, pooling: Any) -> None:
    made = HiddenModel(load_model(open_checkpoint(random_llama.write(tmp_path / "llama"))))

    def pooled(step: int, **options: Any) -> PooledDecoder:
        backend = ReferenceBackend(made, pages=16, batch_invariant=True)
        return PooledDecoder(
            backend, width=made.hidden, vocab=random_llama.VOCAB, longest=64, pooling=pooling, unit=True,
            step_tokens=step, max_running=4, threads=1, **options,
        )  # fmt: skip

    texts = random_texts(4, 7, 30, random_llama.VOCAB)
    backend = pooled(16)
    alone = one_by_one(backend, texts)
    assert np.array_equal(backend.encode(batch(texts)), alone)
    whole = pooled(64).encode(batch(texts))
    assert np.abs(whole - alone).max() < 1e-5
    assert backend.progress == 2 * sum(map(len, texts))


@pytest.mark.parametrize("kernels", [None, *available_kernels()])
def test_encoders_have_a_build_for_each_of_the_machine_s_kernels(tmp_path: Path, kernels: str | None) -> None:
    found = CpuEncoder(model(tmp_path), kernels=kernels).kernels
    named = kernels or available_kernels()[0]
    assert found == {"avx512bf16": "avx512", "neon": "portable", "dotprod": "portable"}.get(named, named)
