"""Every kernel of every instruction path that this machine has agrees with the numpy reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tailrace.backends import BLOCK, Attention, Format, Ops, T, Weight
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.cpu.record import FLOATS
from tailrace.backends.cpu.store import pack
from tailrace.backends.reference import ReferenceBackend, gumbel
from tests.batches import batch, rounding

KERNELS = available_kernels()
NO_ATTENTION = Attention(layer=0, heads=1, kv_heads=1, head_dim=16, scale=1.0)


def floats(name: str, values: np.ndarray) -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    return Weight(name, Format.F32, values.shape, rows.view(np.uint8).reshape(len(rows), -1))


def random_matrix(rng: np.random.Generator, form: Format, n: int, k: int) -> Weight:
    """Random bytes in the form's layout, with scales that are small, finite numbers."""
    values, size = BLOCK[form]
    if form in FLOATS:
        x = rng.normal(size=(n, k)).astype(np.float32)
        match form:
            case Format.F32:
                data = x.view(np.uint8)
            case Format.F16:
                data = x.astype(np.float16).view(np.uint8)
            case _:
                data = np.ascontiguousarray(x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return Weight("w", form, (n, k), data.reshape(n, -1))
    data = rng.integers(0, 256, (n * k // values, size), dtype=np.uint8)
    halves = {
        Format.Q4_0: [0], Format.Q4_1: [0, 2], Format.Q5_0: [0], Format.Q5_1: [0, 2], Format.Q8_0: [0],
        Format.Q2_K: [80, 82], Format.Q3_K: [108], Format.Q4_K: [0, 2], Format.Q5_K: [0, 2], Format.Q6_K: [208],
    }[form]  # fmt: skip
    for at in halves:
        scale = (rng.normal(size=len(data)) * 0.02).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return Weight("w", form, (n, k), data.reshape(n, -1))


@dataclass(frozen=True, eq=False)
class OneLinear:
    """token -> row of a table -> linear: the smallest model that a kernel can be seen through."""

    table: Weight
    weight: Weight
    bias: Weight | None = None

    attentions = (NO_ATTENTION,)

    @property
    def hidden(self) -> int:
        return self.table.shape[1]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    def forward(self, ops: Ops[T]) -> T:
        return ops.linear(ops.wanted(ops.embed(self.table)), self.weight, self.bias)

    def weights(self) -> Iterable[Weight]:
        return [w for w in (self.table, self.weight, self.bias) if w is not None]


@dataclass(frozen=True, eq=False)
class TableOnly:
    """token -> row of a packed table, seen through an identity head."""

    table: Weight
    head: Weight

    attentions = (NO_ATTENTION,)

    @property
    def hidden(self) -> int:
        return self.table.shape[1]

    @property
    def vocab(self) -> int:
        return self.head.shape[0]

    def forward(self, ops: Ops[T]) -> T:
        return ops.linear(ops.wanted(ops.embed(self.table)), self.head)

    def weights(self) -> Iterable[Weight]:
        return [self.table, self.head]


def logits(backend: Any, rows: list[int]) -> np.ndarray:
    found = backend.run(batch([(rows, 0, [0] * 16)], range(len(rows)))).logits
    assert found is not None
    return found


def tolerance(kernels: str) -> float:
    """The C++ test knows what is multiplied to the bit; the reference rounds scales and weights in another order."""
    return 6e-3 if rounding(kernels) == "bf16" else 2e-5


def on_cpu(model: Any, kernels: str, threads: int = 2) -> CpuBackend:
    return CpuBackend(model, pages=1, max_context=256, step_tokens=128, max_running=4, threads=threads, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("n", [16, 50])
def test_a_product_agrees_with_the_reference(form: Format, kernels: str, n: int) -> None:
    rng = np.random.default_rng([n, list(Format).index(form)])
    k = 512 if BLOCK[form][0] == 256 else 96
    table, bias = rng.normal(size=(64, k)), rng.normal(size=n)
    table[3] = 0.0  # a row without a scale
    model = OneLinear(floats("t", table), random_matrix(rng, form, n, k), floats("b", bias))
    expected = ReferenceBackend(model, pages=16, rounded=rounding(kernels))
    for rows in ([0], [1, 2], [3, 4, 5], list(range(6, 17)), list(range(64))):
        found = logits(on_cpu(model, kernels), rows)
        truth = logits(expected, rows)
        assert np.abs(found - truth).max() <= tolerance(kernels) * np.abs(truth).max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", list(Format))
def test_the_most_negative_weight_is_exact(form: Format, kernels: str) -> None:
    """All-ones bytes are the extreme of every format, -128 for Q8_0 and two's complement -1 elsewhere."""
    rng = np.random.default_rng(5)
    k = 256
    for byte in (0x80, 0xFF):
        weight = random_matrix(rng, form, 16, k)
        if form in FLOATS:
            continue
        values, size = BLOCK[form]
        data = weight.data.reshape(-1, size).copy()
        keep = random_matrix(rng, form, 16, k).data.reshape(-1, size)
        scales = {Format.Q2_K: slice(80, 84), Format.Q3_K: slice(108, 110), Format.Q6_K: slice(208, 210)}
        where = scales.get(form, slice(0, 4 if form in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K) else 2))
        data[:] = byte
        data[:, where] = keep[:, where]
        weight = Weight("w", form, (16, k), data.reshape(16, -1))
        table = np.sign(rng.normal(size=(8, k))) * 3.0  # every activation rounds to -127 or 127
        model = OneLinear(floats("t", table), weight)
        truth = logits(ReferenceBackend(model, pages=16, rounded=rounding(kernels)), list(range(8)))
        found = logits(on_cpu(model, kernels), list(range(8)))
        assert np.abs(found - truth).max() <= tolerance(kernels) * max(1.0, np.abs(truth).max())
        assert values in (32, 256)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", list(Format))
def test_a_row_has_the_same_bits_alone_and_in_company(form: Format, kernels: str) -> None:
    rng = np.random.default_rng(2)
    k = 512 if BLOCK[form][0] == 256 else 96
    model = OneLinear(floats("t", rng.normal(size=(100, k))), random_matrix(rng, form, 80, k))
    together = logits(on_cpu(model, kernels), list(range(100)))
    one = on_cpu(model, kernels, threads=1)
    for count in range(1, 28):
        assert np.array_equal(logits(one, list(range(count))), together[:count])
    assert np.array_equal(logits(one, [99]), together[99:])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", list(Format))
def test_a_row_of_a_packed_table_has_the_values_of_the_file(form: Format, kernels: str) -> None:
    rng = np.random.default_rng(3)
    k = 256
    model = TableOnly(random_matrix(rng, form, 40, k), floats("h", np.eye(k)))
    rows = [0, 15, 16, 39]
    assert np.array_equal(logits(on_cpu(model, kernels), rows), logits(ReferenceBackend(model, pages=16), rows))


@pytest.mark.parametrize("form", list(Format))
def test_tiles_take_hardly_more_memory_than_the_file(form: Format) -> None:
    """Decoding reads them once a token."""
    weight = random_matrix(np.random.default_rng(4), form, 32, 1024)
    assert weight.data.nbytes <= pack(weight).nbytes <= 1.04 * weight.data.nbytes


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.5, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 2.0, "top_p": 0.5, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.8, "top_k": 50},
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("params", SAMPLING, ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()))
def test_a_draw_agrees_with_the_reference(params: dict[str, Any], kernels: str) -> None:
    rng = np.random.default_rng(11)
    vocab, k, rows = 500, 32, 48
    model = OneLinear(floats("t", rng.normal(size=(rows, k))), floats("w", rng.normal(size=(vocab, k)) * 0.7))
    values = dict(params, seed=rng.integers(0, 2**63, rows), position=rng.integers(0, 9000, rows), logprobs=3)
    step = batch([(range(rows), 0, [0] * 16)], range(rows), **values)
    found, truth = on_cpu(model, kernels).run(step), ReferenceBackend(model, pages=16).run(step)
    assert (found.tokens == truth.tokens).mean() > 0.97  # two candidates within rounding may swap
    same = found.tokens == truth.tokens
    assert np.allclose(found.logprobs[same], truth.logprobs[same], atol=1e-4)
    assert np.array_equal(found.top_tokens, truth.top_tokens)
    assert np.allclose(found.top_logprobs, truth.top_logprobs, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_penalties_and_biases_agree_with_the_reference(kernels: str) -> None:
    rng = np.random.default_rng(12)
    vocab, k, rows = 300, 32, 32
    model = OneLinear(floats("t", rng.normal(size=(rows, k))), floats("w", rng.normal(size=(vocab, k)) * 0.3))
    starts = np.arange(rows + 1) * 40
    seen = np.concatenate([rng.permutation(vocab)[:40] for _ in range(rows)])
    bias_starts = np.arange(rows + 1) * 5
    biases = np.concatenate([rng.permutation(vocab)[:5] for _ in range(rows)])
    bias = rng.normal(size=rows * 5) * 3
    bias[::7] = -np.inf
    step = batch(
        [(range(rows), 0, [0] * 16)],
        range(rows),
        temperature=np.where(np.arange(rows) % 2, 0.8, 0.0),
        presence=0.7,
        frequency=0.3,
        repetition=1.4,
        seed=rng.integers(0, 2**63, rows),
        position=5,
        logprobs=0,
        seen_start=starts,
        seen_token=seen,
        seen_count=rng.integers(0, 4, rows * 40),
        bias_start=bias_starts,
        bias_token=biases,
        bias_value=bias,
    )
    found, truth = on_cpu(model, kernels).run(step), ReferenceBackend(model, pages=16).run(step)
    assert (found.tokens == truth.tokens).mean() > 0.95
    same = found.tokens == truth.tokens
    assert np.allclose(found.logprobs[same], truth.logprobs[same], atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_padded_row_of_the_head_is_never_drawn(kernels: str) -> None:
    """The head may have more rows than the tokenizer has ids (known fault: a padded id gets sampled)."""
    rng = np.random.default_rng(13)
    weight = rng.normal(size=(100, 32))
    weight[70:] *= 50  # the padding rows would win every draw
    model = OneLinear(floats("t", rng.normal(size=(64, 32))), floats("w", weight))
    backend = CpuBackend(model, pages=1, max_context=64, step_tokens=64, max_running=1, kernels=kernels, vocab_limit=70)
    for params in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.99}):
        biased = {"bias_start": np.arange(65), "bias_token": np.full(64, 99), "bias_value": np.full(64, 100.0)}
        step = batch([(range(64), 0, [0] * 4)], range(64), seed=np.arange(64), logprobs=5, **params, **biased)
        result = backend.run(step)
        assert result.tokens.max() < 70
        assert result.top_tokens.max() < 70


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_with_nothing_left_to_draw_says_so(kernels: str) -> None:
    model = OneLinear(floats("t", np.ones((1, 32))), floats("w", np.ones((4, 32))))
    everything = {"bias_start": [0, 4], "bias_token": range(4), "bias_value": [-np.inf] * 4}
    for temperature in (0.0, 1.0):
        step = batch([([0], 0, [0])], [0], temperature=temperature, **everything)
        assert on_cpu(model, kernels).run(step).tokens.tolist() == [-1]


@pytest.mark.parametrize("kernels", KERNELS)
def test_not_a_number_is_never_drawn(kernels: str) -> None:
    table = np.ones((1, 32))
    table[0, 5] = np.nan
    model = OneLinear(floats("t", table), floats("w", np.ones((64, 32))))
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}):
        assert on_cpu(model, kernels).run(batch([([0], 0, [0])], [0], **params)).tokens.tolist() == [-1]


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_noise_makes_the_impossible_likely(kernels: str) -> None:
    """The largest hash of all, for a token that is e^60 less likely than another. 24 bits of it are infinite."""
    model = OneLinear(
        floats("t", np.ones((1, 32))), floats("w", np.array([0, -60, -60, -60, -60, -60])[:, None] * np.eye(1, 32))
    )
    step = batch([([0], 0, [0])], [0], temperature=1.0, seed=1_988_407, position=0)
    assert gumbel(1_988_407, 0, 6)[5] > 15
    assert on_cpu(model, kernels).run(step).tokens.tolist() == [0]
    assert ReferenceBackend(model, pages=1).run(step).tokens.tolist() == [0]


def test_the_noise_is_uniform_enough_to_sample_from() -> None:
    """Frequencies of 20,000 draws from a known distribution lie within five standard errors."""
    wanted = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    model = OneLinear(floats("t", np.ones((1, 32))), floats("w", np.log(wanted)[:, None] * np.eye(1, 32)))
    backend = CpuBackend(model, pages=8, max_context=128, step_tokens=100, max_running=1)
    counts = np.zeros(5)
    for seed in range(200):
        step = batch([([0] * 100, 0, range(8))], range(100), temperature=1.0, seed=seed, position=np.arange(100))
        counts += np.bincount(backend.run(step).tokens, minlength=5)
    error = np.sqrt(wanted * (1 - wanted) / counts.sum())
    assert (np.abs(counts / counts.sum() - wanted) < 5 * error).all()
