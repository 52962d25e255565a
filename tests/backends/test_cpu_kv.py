"""KV in fewer bits on the cpu backend: the reference's numbers, the same bits in every company, pages that travel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import PAGE_SIZE
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.kvdtype import parse
from tailrace.backends.reference import ReferenceBackend
from tailrace.models import Model, describe, load_model, open_checkpoint
from tailrace.terms import ModelError
from tests.batches import batch, logits_of, pages_for
from tests.models import random_llama

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
KINDS = ["fp16", "int8", "int4", "k8v4", "k16v8", "k4v16"]
NAMES = ["llama", "llama-biased", "qwen3", "mistral-window"]
"""Heads of 8, 24, 16 and 8."""


def golden(name: str, length: int = 80) -> Model:
    return load_model(open_checkpoint(GOLDEN / "models" / name), max_context=length)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 64, three to a KV head."""
    shape = {"LAYERS": 2, "HEADS": 6, "KV_HEADS": 2, "HIDDEN": 384, "INNER": 256, "HEAD_DIM": 64}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shape.items():
            patch.setattr(random_llama, name, value)
        return random_llama.write(tmp_path_factory.mktemp("wide") / "model")


def on_cpu(model: Model, kind: str, length: int = 80, *, kernels: str | None = None, threads: int = 2) -> CpuBackend:
    return CpuBackend(
        model,
        pages=4 * pages_for(length) + 8,
        max_context=length,
        step_tokens=256,
        max_running=8,
        threads=threads,
        kernels=kernels,
        kv_dtype=parse(kind[:-1], "1") if kind.endswith("+") else kind,
    )


def near(found: np.ndarray, truth: np.ndarray, exact: np.ndarray) -> None:
    """A number or a scale that lies between two steps may round either way after float32 rounding, and everything that
    follows then differs a little: far less than by rounding at all."""
    assert np.abs(found - truth).max() < 0.1 * np.abs(truth).max()
    assert np.abs(found - truth).mean() < 0.25 * np.abs(truth - exact).mean()


@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_the_logits_of_the_reference(name: str, kind: str, kernels: str) -> None:
    model = golden(name)
    truth = logits_of(ReferenceBackend(model, pages=8, kv_dtype=kind), PROMPT[:80], range(80))
    exact = logits_of(ReferenceBackend(model, pages=8), PROMPT[:80], range(80))
    near(logits_of(on_cpu(model, kind, kernels=kernels), PROMPT[:80], range(80)), truth, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_one_with_heads_of_64(wide: Path, kind: str) -> None:
    model = load_model(open_checkpoint(wide), max_context=256)
    prompt = [token % random_llama.VOCAB for token in PROMPT[:150]]
    truth = logits_of(ReferenceBackend(model, pages=16, kv_dtype=kind), prompt, range(150))
    exact = logits_of(ReferenceBackend(model, pages=16), prompt, range(150))
    near(logits_of(on_cpu(model, kind, 160), prompt, range(150)), truth, exact)


@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize("kind", [*KINDS, "k8v4+"])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_pages_threads_and_company_do_not_change_a_bit(name: str, kind: str, kernels: str) -> None:
    model, prompt = golden(name), PROMPT[:80]
    backend = on_cpu(model, kind, kernels=kernels)
    truth = logits_of(backend, prompt, range(80))
    for chunk in (1, 7, 64):
        assert np.array_equal(logits_of(backend, prompt, range(80), chunk=chunk, first_page=5), truth)
    alone = on_cpu(model, kind, kernels=kernels, threads=1)
    assert np.array_equal(logits_of(alone, prompt, [79], chunk=11), truth[79:])
    other = PROMPT[100:150]
    together = backend.run(batch([(other, 0, [10, 11, 12, 13]), (prompt, 0, [3, 1, 4, 2, 0])], range(50, 130))).logits
    assert np.array_equal(together, truth)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_context_has_the_same_bits_decoded_by_pieces(wide: Path, kind: str) -> None:
    """One sequence that decodes alone is cut over its KV among the threads; among others it is not; and a chunk of
    queries reads numbers that were widened before."""
    length = 250
    model = load_model(open_checkpoint(wide), max_context=length)
    prompt = [token % random_llama.VOCAB for token in PROMPT[:length]]
    backend = on_cpu(model, kind, length)
    truth = logits_of(backend, prompt, range(length))
    table = list(range(pages_for(length)))
    parts = [([prompt[199]], 199, table), *(([5], 0, [30 + at]) for at in range(7))]
    together = backend.run(batch(parts, range(8))).logits
    assert np.array_equal(together[0], truth[199])
    for position in (249, 200, 128, 127, 64, 63):  # downwards: the last row of a sequence clears its page behind it
        alone = backend.run(batch([([prompt[position]], position, table)], [0])).logits
        assert np.array_equal(alone[0], truth[position])


@pytest.mark.parametrize("kind", [*KINDS, "k8v4+"])
@pytest.mark.parametrize("name", NAMES)
def test_another_pool_goes_on_where_the_first_stopped(name: str, kind: str) -> None:
    model = golden(name)
    source, target = on_cpu(model, kind), on_cpu(model, kind)
    truth = logits_of(source, PROMPT[:80], range(64, 80), chunk=64)
    table = [9, 5, 7, 6, 2]
    for page, to in enumerate(table[:4]):
        data = source.read_page(page)
        assert len(data) == source.page_bytes
        target.write_page(to, data)
        assert target.read_page(to) == data
    found = target.run(batch([(PROMPT[64:80], 64, table)], range(16))).logits
    assert np.array_equal(found, truth)


@pytest.mark.parametrize("kind", [*KINDS, "bf16", "k8v4+"])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_takes_what_info_says(name: str, kind: str) -> None:
    made = parse(kind.removesuffix("+"), "1" if kind.endswith("+") else "")
    info = describe(open_checkpoint(GOLDEN / "models" / name), kv_dtype=made)
    backend = on_cpu(golden(name), kind)
    assert backend.page_bytes == PAGE_SIZE * info.kv_bytes_per_token
    assert info.kv_dtype == made.name


def test_a_page_holds_nothing_of_those_who_had_it_before() -> None:
    model = golden("llama")
    for kind in KINDS:
        backend, fresh = on_cpu(model, kind), on_cpu(model, kind)
        logits_of(backend, PROMPT[100:116], [15])
        for used in (backend, fresh):
            logits_of(used, PROMPT[:5], [4])
        assert backend.read_page(0) == fresh.read_page(0), kind


def test_what_cannot_be_is_refused() -> None:
    model = golden("llama")
    with pytest.raises(ModelError, match="f32"):
        on_cpu(model, "f32")
    with pytest.raises(ModelError, match=r"layer 7.*0 \.\. 1"):
        CpuBackend(model, pages=2, max_context=16, step_tokens=16, max_running=1, kv_dtype=parse("int8", "7"))


def test_types_have_numerics_of_their_own() -> None:
    model = golden("llama")
    names = {on_cpu(model, kind).numerics for kind in [*KINDS, "bf16", "k8v4+"]}
    assert len(names) == len(KINDS) + 2
