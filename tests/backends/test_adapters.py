"""Adapters on both backends: the numbers of merged weights, and the same bits however a request is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import Adapter, Backend, Format, LowRank, Weight
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.reference import ReferenceBackend
from tailrace.backends.reference.dequantize import dequantize
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.models.adapters import PROJECTIONS, read_adapter
from tailrace.models.quantise import quantise
from tests.batches import batch, rounding
from tests.models import random_lora

MODELS = Path(__file__).parent.parent / "golden" / "models"
PROMPT = np.load(MODELS.parent / "prompt.npy").tolist()
LENGTH, PAGES = 80, 5
KERNELS = available_kernels()
OPTIONS = (
    {"rank": 8},
    {"rank": 20, "ranks": {"up_proj": 3, "v_proj": 33}},
    {"rank": 4, "targets": ("q_proj", "v_proj")},
)
"""Of adapters 0, 1 and 2."""


def model_of(name: str, quantised: str | None = None) -> Model:
    model = load_model(open_checkpoint(MODELS / name), max_context=LENGTH)
    return quantise(model, quantised, threads=1) if quantised else model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Adapter]]:
    """By the model's name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: [
            read_adapter(random_lora.make(folder / name / str(number), model, number, **options), model).adapter
            for number, options in enumerate(OPTIONS)
        ]
        for name in ("llama", "qwen3")
        for model in [model_of(name)]
    }


def cpu(model: Model, adapters: Sequence[Adapter], kernels: str | None = None, threads: int = 2) -> CpuBackend:
    backend = CpuBackend(
        model,
        pages=8 * PAGES,
        max_context=LENGTH,
        step_tokens=512,
        max_running=40,
        threads=threads,
        kernels=kernels,
    )
    return with_adapters(backend, adapters)


def with_adapters(backend: Backend, adapters: Sequence[Adapter]) -> Backend:
    for number, adapter in enumerate(adapters):
        backend.set_adapter(number, backend.pack_adapter(adapter))
    return backend


def logits(backend: Backend, adapter: int, *, chunk: int = LENGTH, first: int = 0) -> np.ndarray:
    """Of the whole prompt, in chunks, with this adapter (-1: none): [LENGTH, vocab]."""
    table = list(range(first, first + PAGES))
    found = []
    for begin in range(0, LENGTH, chunk):
        part = PROMPT[begin : min(LENGTH, begin + chunk)]
        step = batch([(part, begin, table)], range(len(part)))
        step.adapters = np.array([adapter], np.int32) if adapter >= 0 else None
        result = backend.run(step).logits
        assert result is not None
        found.append(result)
    return np.concatenate(found)


def merged(model: Model, adapter: Adapter) -> Model:
    """W + scale * B A in place of each W, worked out in double precision and stored in float32."""

    def of(weight: Weight) -> Weight:
        part = adapter.parts.get(weight.name)
        if part is None:
            return weight
        values = dequantize(weight).astype(np.float64) + part.scale * part.b.astype(np.float64) @ part.a
        data = values.astype(np.float32).view(np.uint8)
        return Weight(weight.name, Format.F32, weight.shape, data)

    layers = [
        dataclasses.replace(layer, **{name: of(getattr(layer, name)) for name in PROJECTIONS}) for layer in model.layers
    ]
    return dataclasses.replace(model, layers=tuple(layers))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_both_backends_give_the_logits_of_merged_weights(
    name: str, number: int, adapters: dict[str, list[Adapter]]
) -> None:
    model = model_of(name)
    exact = ReferenceBackend(merged(model, adapters[name][number]), pages=8, dtype=np.float64, kv_dtype="f32")
    truth, size = logits(exact, -1), np.abs(logits(exact, -1)).max()
    assert np.abs(truth - logits(ReferenceBackend(model, pages=8), -1)).max() > 0.1 * size, "the adapter changes little"
    reference = with_adapters(ReferenceBackend(model, pages=8, kv_dtype="f32"), adapters[name])
    assert np.abs(logits(reference, number) - truth).max() < 1e-5 * size
    # the cpu backend rounds keys and values to bf16, so it is held against a reference that does so too
    kept = with_adapters(ReferenceBackend(model, pages=8, kv_dtype="bf16"), adapters[name])
    for kernels in KERNELS:
        found = np.abs(logits(cpu(model, adapters[name], kernels), number) - logits(kept, number))
        assert found.max() < 5e-3 * size
        assert np.median(found) < 1e-5 * size


@pytest.mark.parametrize("kernels", KERNELS)
def test_over_quantised_weights_an_adapter_reads_the_rounded_activations(
    kernels: str, adapters: dict[str, list[Adapter]]
) -> None:
    model = model_of("llama", "int8")
    reference = ReferenceBackend(model, pages=8, kv_dtype="bf16", rounded=rounding(kernels))
    truth = logits(with_adapters(reference, adapters["llama"]), 1)
    found = np.abs(logits(cpu(model, adapters["llama"], kernels), 1) - truth)
    assert found.max() < 2e-2 * np.abs(truth).max()  # an activation that lies between two steps may go either way
    assert np.median(found) < (1e-3 if kernels == "amx" else 1e-5) * np.abs(truth).max()


@pytest.mark.parametrize("quantised", [None, "int8", "int4"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_chunks_threads_and_company_change_no_bit(
    kernels: str, quantised: str | None, adapters: dict[str, list[Adapter]]
) -> None:
    model = model_of("llama", quantised)
    plain = logits(cpu(model, [], kernels), -1)
    backend = cpu(model, adapters["llama"], kernels)
    truth = {number: logits(backend, number) for number in (-1, 0, 1, 2)}
    assert np.array_equal(truth[-1], plain)
    assert len({values.tobytes() for values in truth.values()}) == 4
    for number, values in truth.items():
        for chunk in (1, 5, 13, 40):
            assert np.array_equal(logits(backend, number, chunk=chunk, first=PAGES), values)
    one = cpu(model, adapters["llama"], kernels, threads=1)
    assert np.array_equal(logits(one, 1, chunk=11), truth[1])
    # prompts of several adapters and of none, in one step of more rows than a panel, some of them wanted
    order = [1, -1, 0, 0, 2, -1]
    parts = [(PROMPT[:LENGTH], 0, range(at * PAGES, (at + 1) * PAGES)) for at in range(len(order))]
    step = batch(parts, range(LENGTH * len(order)))
    step.adapters = np.array(order, np.int32)
    assert np.array_equal(backend.run(step).logits, np.concatenate([truth[number] for number in order]))
    few = batch(parts, [at * LENGTH + LENGTH - 1 for at in range(len(order))])
    few.adapters = step.adapters
    assert np.array_equal(backend.run(few).logits, np.stack([truth[number][-1] for number in order]))


@pytest.mark.parametrize("quantised", [None, "int8"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 3, 14, 40])
def test_decoding_side_by_side_changes_no_bit(
    kernels: str, rows: int, quantised: str | None, adapters: dict[str, list[Adapter]]
) -> None:
    """Steps of one row, of few and of many take different ways through the kernels. Only reading is shared: all rows
    decode the last position over the same pages, each with its own adapter's."""
    backend = cpu(model_of("llama", quantised), adapters["llama"], kernels)
    pages = {number: at * PAGES for at, number in enumerate((-1, 0, 1, 2))}
    truth = {number: logits(backend, number, first=page)[-1] for number, page in pages.items()}
    order = [(-1, 0, 1, 2)[(at * at + at // 3) % 4] for at in range(rows)]
    parts = [(PROMPT[LENGTH - 1 : LENGTH], LENGTH - 1, range(pages[number], pages[number] + PAGES)) for number in order]
    step = batch(parts, range(rows))
    step.adapters = np.array(order, np.int32)
    assert np.array_equal(backend.run(step).logits, np.stack([truth[number] for number in order]))


def test_a_real_model_has_the_same_bits_in_chunks_and_one_by_one(smollm2: Path, tmp_path: Path) -> None:
    """Its products are large enough to be cut among threads in every way."""
    model = load_model(open_checkpoint(smollm2), max_context=LENGTH)
    found = [read_adapter(random_lora.make(tmp_path / str(s), model, s, rank=16), model).adapter for s in (1, 2)]
    backend = cpu(model, found)
    plain, truth = logits(backend, -1), logits(backend, 0)
    assert np.abs(truth - plain).max() > 0.1 * np.abs(plain).max()
    assert np.array_equal(logits(backend, 0, chunk=1, first=PAGES), truth)
    parts = [(PROMPT[:LENGTH], 0, range(at * PAGES, (at + 1) * PAGES)) for at in range(4)]
    step = batch(parts, [at * LENGTH + LENGTH - 1 for at in range(4)])
    step.adapters = np.array([1, 0, -1, 0], np.int32)
    together = backend.run(step).logits
    assert together is not None
    assert np.array_equal(together[1:], np.stack([truth[-1], plain[-1], truth[-1]]))
    one = [(PROMPT[LENGTH - 1 : LENGTH], LENGTH - 1, range(at * PAGES, (at + 1) * PAGES)) for at in range(4)]
    step = batch(one, range(4))
    step.adapters = np.array([1, 0, -1, 0], np.int32)
    assert np.array_equal(backend.run(step).logits, together)


def test_numbers_that_bf16_cannot_hold_are_rounded_to_it(adapters: dict[str, list[Adapter]]) -> None:
    rng = np.random.default_rng(0)
    model = model_of("llama")
    fine = Adapter(
        {
            name: LowRank(*(rng.standard_normal(half.shape, dtype=np.float32) * 0.05 for half in (part.a, part.b)), 1.5)
            for name, part in adapters["llama"][0].parts.items()
        }
    )
    truth = logits(with_adapters(ReferenceBackend(model, pages=8, kv_dtype="bf16"), [fine]), 0)
    found = logits(cpu(model, [fine]), 0)
    assert 0 < np.abs(found - truth).max() < 1e-2 * np.abs(truth).max()


@pytest.mark.parametrize("make", [lambda model: ReferenceBackend(model, pages=8), lambda model: cpu(model, [])])
def test_an_adapter_takes_anothers_place_and_goes(make: object, adapters: dict[str, list[Adapter]]) -> None:
    backend = make(model_of("llama"))
    first, second, _ = adapters["llama"]
    truth = [logits(with_adapters(backend, [one]), 0) for one in (first, second)]
    assert not np.array_equal(*truth)
    assert np.array_equal(logits(with_adapters(backend, [first]), 0), truth[0])
    backend.set_adapter(0, None)
    with pytest.raises((ValueError, KeyError)):
        logits(backend, 0)
    assert np.array_equal(logits(backend, -1), logits(make(model_of("llama")), -1))


def test_a_step_that_runs_keeps_its_adapters(adapters: dict[str, list[Adapter]]) -> None:
    backend = cpu(model_of("llama"), adapters["llama"])
    step = batch([(PROMPT[:LENGTH], 0, range(PAGES))], [LENGTH - 1])
    step.adapters = np.array([1], np.int32)
    backend.launch(step)
    with pytest.raises(RuntimeError, match="between steps"):
        backend.set_adapter(1, None)
    backend.wait()
    backend.set_adapter(1, None)


@pytest.mark.parametrize("numbers", [[7], [-1, 0], [3]], ids=str)
def test_a_step_with_an_adapter_that_is_not_there_is_refused(
    numbers: list[int], adapters: dict[str, list[Adapter]]
) -> None:
    backend = cpu(model_of("llama"), adapters["llama"])
    step = batch([(PROMPT[:LENGTH], 0, range(PAGES))], [LENGTH - 1])
    step.adapters = np.array(numbers, np.int32)
    with pytest.raises(ValueError, match="adapter"):
        backend.run(step)
