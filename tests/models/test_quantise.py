"""Float matrices are rounded to 8 or 4 bits within their bounds, and nothing else of a model is touched."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import Format, Weight
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.reference import ReferenceBackend, dequantize
from tailrace.models import Model, describe, load_model, open_checkpoint
from tailrace.models.files.mapped import PermutedWeight
from tailrace.models.quantise import RoundedWeight, quantise, rounded, to_q4_1, to_q8_0
from tailrace.terms import ModelError
from tests.batches import logits_of
from tests.models import random_llama
from tests.models.gguf_bytes import convert

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.random.default_rng(1).integers(0, random_llama.VOCAB, 48).tolist()


def read_back(kind: Format, blocks: np.ndarray) -> np.ndarray:
    return dequantize(Weight("w", kind, (len(blocks), 32), blocks))


def plain_q4_1(x: np.ndarray) -> np.ndarray:
    """The values that the textbook choice leaves: the minimum, and a 15th of the range, as float16."""
    low = x.min(axis=1, keepdims=True)
    scale = ((x.max(axis=1, keepdims=True) - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    least = low.astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        quants = np.where(scale > 0, np.rint((x - least) / scale), 0).clip(0, 15).astype(np.float32)
    return scale * quants + least


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    """Root of the mean square of the error, over that of the truth."""
    return float(np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2)))


@pytest.mark.parametrize("spread", [1e-4, 0.02, 3.0])
def test_round_trips_of_random_blocks_stay_within_their_bounds(spread: float) -> None:
    x = np.random.default_rng(0).standard_normal((5000, 32), dtype=np.float32) * np.float32(spread)
    eight = read_back(Format.Q8_0, to_q8_0(x))
    assert np.all(np.abs(eight - x) <= np.abs(x).max(axis=1, keepdims=True) / 127 * 0.56)
    assert relative(eight, x) < 0.006
    four, plain = read_back(Format.Q4_1, to_q4_1(x)), plain_q4_1(x)
    assert relative(four, x) < 0.072
    assert relative(four, x) < 0.92 * relative(plain, x)  # 0.81 of the squared error, for normal values


def odd_blocks(count: int) -> np.ndarray:
    """Blocks of every size and offset, with more or fewer values that are zero, tiny, equal, or as large as can be."""
    rng = np.random.default_rng(3)
    size, offset = 10.0 ** rng.uniform(-9, 3, (2, count, 1)) * rng.integers(0, 2, (2, count, 1))
    x = (offset + size * rng.standard_normal((count, 32))).astype(np.float32)
    odd = rng.choice(np.array([0, 1e-40, 6e-8, -1e-6, 1, 1.0009765, -3.5, 65504, -65504], np.float32), (count, 32))
    return np.where(rng.random((count, 32)) < rng.choice([0, 0.05, 1], (count, 1)), odd, x)


def test_the_search_never_does_worse_than_the_plain_choice() -> None:
    x = odd_blocks(20_000)
    found, plain = read_back(Format.Q4_1, to_q4_1(x)), plain_q4_1(x)
    error, bound = (np.sum((y.astype(np.float64) - x) ** 2, axis=1) for y in (found, plain))
    assert np.all(error <= bound * (1 + 1e-4))  # sums in float32 choose between them
    assert np.mean(error < 0.95 * bound) > 0.3
    eight = read_back(Format.Q8_0, to_q8_0(x))
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert np.all(np.abs(eight - x) <= largest / 127 * 0.56 + 6e-8)  # 2**-24, the smallest scale


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_models_matrices_are_rounded_and_nothing_else(kind: str, tmp_path: Path) -> None:
    stored = load_model(open_checkpoint(random_llama.write(tmp_path / "m")))
    model = quantise(stored, kind)
    assert model.variant.startswith(kind)
    assert stored.variant == ""
    for before, after in zip(stored.weights(), model.weights(), strict=True):
        outer = after.name in ("model.embed_tokens.weight", "lm_head.weight")
        if len(before.shape) == 1:
            assert after is before
        else:
            assert after.format is (Format.Q8_0 if outer or kind == "int8" else Format.Q4_1)
            assert after.shape == before.shape
            bound = 0.006 if after.format is Format.Q8_0 else 0.072
            assert 0 < relative(dequantize(after), dequantize(before)) < bound


def test_a_tied_head_stays_the_embedding(tmp_path: Path) -> None:
    model = quantise(load_model(open_checkpoint(random_llama.write(tmp_path / "m", tied=True))), "int4")
    assert model.head is model.embedding
    assert model.embedding.format is Format.Q8_0


def test_rows_that_are_no_whole_blocks_stay_as_they_are() -> None:
    stored = load_model(open_checkpoint(GOLDEN / "models" / "llama"))
    model = quantise(stored, "int8")
    assert model.layers[0].down is stored.layers[0].down  # 48 inputs
    assert isinstance(model.layers[0].up, RoundedWeight)


def test_a_gguf_file_of_floats_gives_the_same_blocks_as_its_safetensors(tmp_path: Path) -> None:
    """Its q and k rows lie in another order."""
    folder = open_checkpoint(GOLDEN / "models" / "llama")
    file = load_model(open_checkpoint(convert(folder).write(tmp_path / "x.gguf")))
    assert isinstance(file.layers[0].q, PermutedWeight)
    models = quantise(file, "int4"), quantise(load_model(folder), "int4")
    for one, other in zip(*(model.weights() for model in models), strict=True):
        assert one.name == other.name
        assert isinstance(one, RoundedWeight) == isinstance(other, RoundedWeight)
        if isinstance(one, RoundedWeight):
            assert one.format == other.format
            assert np.array_equal(one.data, other.data)


def test_a_model_that_is_quantised_already_is_left_alone(smollm2: Path) -> None:
    stored = load_model(open_checkpoint(smollm2))
    assert quantise(stored, "int4") is stored


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e6])
def test_a_value_that_cannot_be_rounded_is_refused_by_name(value: float, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = quantise(load_model(open_checkpoint(random_llama.write(tmp_path / "m", spoil={name: value}))), "int8")
    with pytest.raises(ModelError, match=name):
        CpuBackend(model, pages=8, max_context=64, step_tokens=64, max_running=2)


def test_a_matrix_never_exists_as_floats() -> None:
    rows = np.random.default_rng(0).integers(0, 1 << 15, (8192, 1024), dtype=np.uint16)  # any bf16 below 1
    rows &= np.uint16(0x3F7F)
    weight = RoundedWeight(Weight("w", Format.BF16, rows.shape, rows.view(np.uint8)), Format.Q8_0, threads=1)
    tracemalloc.start()
    try:
        data = weight.data
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < data.nbytes + (4 << 20) < rows.size * 4


def test_logits_stay_close_to_those_of_the_weights_as_stored(tmp_path: Path) -> None:
    stored = load_model(open_checkpoint(random_llama.write(tmp_path / "m")))
    truth = logits_of(ReferenceBackend(stored, pages=8), PROMPT, range(48))
    for kind, bound in (("int8", 0.05), ("int4", 0.4)):
        model = quantise(stored, kind, threads=2)
        exact = logits_of(ReferenceBackend(model, pages=8), PROMPT, range(48))
        found = logits_of(on_cpu(model), PROMPT, range(48))
        assert 0 < relative(exact, truth) < bound, kind
        assert relative(found, truth) < bound, kind
        assert relative(found, exact) < 0.04, kind  # activations are rounded to int8 besides


def on_cpu(model: Model, cache: Path | None = None) -> CpuBackend:
    return CpuBackend(
        model, pages=8, max_context=64, step_tokens=64, max_running=2, threads=2, cache_dir=cache, variant=model.variant
    )


def test_each_setting_has_its_own_cache_file_and_maps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load_model(open_checkpoint(random_llama.write(tmp_path / "m")))
    models = [stored, quantise(stored, "int8"), quantise(stored, "int4")]
    cache = tmp_path / "cache"
    first = [logits_of(on_cpu(model, cache), PROMPT, range(48)) for model in models]
    assert len(list(cache.iterdir())) == 3
    assert len({logits.tobytes() for logits in first}) == 3

    def never(*_: object) -> None:
        raise AssertionError("a start with a whole cache rounds nothing")

    monkeypatch.setattr("tailrace.models.quantise._rounded", never)
    for model, before in zip(models, first, strict=True):
        again = on_cpu(model, cache)
        assert again.mapped
        assert np.array_equal(logits_of(again, PROMPT, range(48)), before)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_info_says_of_the_bytes_is_what_is_computed_with(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_llama.write(tmp_path / "m"))
    info, plain = describe(checkpoint, kind), describe(checkpoint)
    model = quantise(load_model(checkpoint), kind)
    assert info.weight_bytes == sum(weight.data.nbytes for weight in model.weights())
    assert info.stored_bytes == plain.weight_bytes == plain.stored_bytes > info.weight_bytes
    assert info.quantised == sum(1 for _ in rounded(model)) == 7 * random_llama.LAYERS + 2
    assert plain.quantised == 0


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(random_llama.write(tmp_path / "m")))
    with pytest.raises(ModelError, match=r"int8 or int4, not to 'int3'"):
        quantise(model, "int3")
