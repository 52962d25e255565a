"""Weights in other formats, held against those that are stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tailrace.backends import Format, Weight
from tailrace.backends.reference.dequantize import dequantize
from tailrace.improve import weights
from tailrace.improve.text import Passage
from tailrace.improve.weights import Setting, evaluate, kinds
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.models.quantise import map_matrices, quantise
from tailrace.models.widen import widened
from tests.models import random_llama


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_checkpoint(random_llama.write(tmp_path_factory.mktemp("m") / "m")))


def as_int8(model: Model) -> Model:
    """As if its file were quantised: plain weights in Q8_0."""

    def plain(weight: Weight) -> Weight:
        return Weight(weight.name, weight.format, weight.shape, weight.data)

    return replace(map_matrices(quantise(model, "int8"), plain, plain), variant="")


def test_widened_weights_are_the_nearest_of_bf16(stored: Model) -> None:
    rows = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 0.0, 1e-30]], np.float32)
    weight = Weight("w", Format.F32, rows.shape, rows.view(np.uint8))
    made = widened(replace(stored, embedding=weight)).embedding
    assert made.format is Format.BF16
    # halfway between two: to the one whose last bit is 0
    expected = [1.0, 1.0, 1 + 2**-6, -3.140625, 0.0]
    assert dequantize(made)[0, :5].tolist() == expected
    assert dequantize(made)[0, 5] == pytest.approx(1e-30, rel=2**-8)


def test_a_model_in_bf16_is_left_alone(stored: Model) -> None:
    assert widened(stored) is stored


def test_there_are_as_many_kinds_as_differ_from_what_is_stored(stored: Model) -> None:
    found, missing = kinds(stored, 1)
    assert [kind.name for kind in found] == ["stored (BF16)", "int8", "int4"]
    assert missing == {"bf16": "the stored weights are that"}
    found, missing = kinds(as_int8(stored), 1)
    assert [kind.name for kind in found] == ["stored (Q8_0)", "bf16", "int4"]
    assert missing == {"int8": "the stored weights are that already"}
    assert "rounded twice" in found[2].origin
    assert found[1].bits == pytest.approx(16, abs=0.3)
    assert found[2].weight_bytes < found[0].weight_bytes < found[1].weight_bytes


def test_fewer_bits_diverge_more(stored: Model) -> None:
    rng = np.random.default_rng(3)
    texts = [Passage("some", rng.integers(0, 190, 150).tolist())]
    setting = Setting(seconds=0.1, context=64, sequences=2, threads=2)
    found, _ = evaluate(stored, texts, setting, lambda _: None)
    base, int8, int4 = found
    assert base.quality.mean_kl == base.quality.perplexity_change == 0.0
    assert 0 < int8.quality.mean_kl < int4.quality.mean_kl
    for one in found:
        low, high = one.quality.change_interval
        assert low <= one.quality.perplexity_change <= high
        assert one.quality.kl_interval[0] <= one.quality.mean_kl <= one.quality.kl_interval[1]
        assert [step.phase for step in one.speeds] == ["prefill", "decode", "decode", "decode", "decode"]
        assert all(step.pairs >= weights.FEWEST and step.low <= step.ratio <= step.high for step in one.speeds)
    assert {step.ratio for step in base.speeds} == {1.0}


def test_a_kind_that_memory_cannot_hold_is_named(stored: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available_memory", lambda: 0)
    texts = [Passage("some", list(range(40)))]
    found, missing = evaluate(stored, texts, Setting(seconds=0.1, context=32, sequences=1, threads=1), lambda _: None)
    assert [one.kind.name for one in found] == ["stored (BF16)"]
    assert set(missing) == {"bf16", "int8", "int4"}
    assert "more than is free" in missing["int8"]
