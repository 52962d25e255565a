"""What the benchmarks make is what they say: models that can be served, and weights that can be multiplied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import kernels, kv, ledger, quality, shapes
from tailrace.backends import Format
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.cpu.store import pack
from tailrace.backends.reference import ReferenceBackend, dequantize
from tailrace.engine.assets import open_model
from tailrace.ledger.run import Run
from tailrace.ledger.store import Ledger
from tailrace.ledger.usage import usage
from tailrace.models import load_model, open_checkpoint
from tailrace.models.rope import RopeConfig, build_rope
from tests.batches import logits_of
from tests.models import random_llama

PROMPT = np.random.default_rng(1).integers(0, 200, 40).tolist()


@pytest.mark.parametrize(("kind", "vocab"), [("q4_0", 300), ("q8_0", 60_000)])
def test_a_shapes_file_is_a_model_with_random_weights(
    kind: str, vocab: int, tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shapes.Shape(2, 256, 4, 2, 512, vocab, 500_000.0, 4096, tied=vocab < 1000, factor=32.0)
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    path = shapes.file_of(f"small-{kind}", tmp_path, smollm2)
    assert abs(path.stat().st_size - shapes.size_of(f"small-{kind}")) < 4_000_000  # the header, tokenizer and all
    opened = open_model(path, tmp_path / "cache", tokenizer=True)
    assert len(opened.table) == vocab
    model = load_model(opened.checkpoint, max_context=64)
    for weight in model.weights():
        if len(weight.shape) == 2:
            assert dequantize(weight).std() == pytest.approx(shapes.SPREAD, rel=0.1)
    backend = CpuBackend(model, pages=8, max_context=64, step_tokens=64, max_running=1, threads=1)
    logits = logits_of(backend, PROMPT, [39])
    assert 0.01 < logits.std() < 10
    assert np.isfinite(logits).all()


def test_the_ropes_divisors_are_those_of_llama_3() -> None:
    shape = shapes.SHAPES["llama-1b"]
    plain = RopeConfig("default", shape.theta)
    scaled = RopeConfig("llama3", shape.theta, factor=shape.factor, original_context=8192)
    found = build_rope(plain, shape.head_dim, 8192, shapes.rope_divisors(shape))
    np.testing.assert_allclose(found.inv_freq, build_rope(scaled, shape.head_dim, 8192).inv_freq, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_shuffled_channels_computes_the_same(tied: bool, tmp_path: Path) -> None:
    """Else what quantising it costs would be that of another model."""
    checkpoint = open_checkpoint(random_llama.write(tmp_path / "m", tied=tied))
    model = load_model(checkpoint)
    (tmp_path / "copy").mkdir()
    copied = load_model(open_checkpoint(quality.copy_as_bf16(checkpoint, model.config, tmp_path / "copy")))
    assert not np.array_equal(copied.layers[0].down.data, model.layers[0].down.data)
    truth, found = (logits_of(ReferenceBackend(one, pages=4), PROMPT, range(40)) for one in (model, copied))
    assert np.abs(found - truth).max() < 1e-4


@pytest.mark.parametrize("form", list(Format))
def test_products_of_random_weights_are_timed(form: Format) -> None:
    weight = kernels.random_weight(form, 32, 512)
    values = dequantize(weight)
    assert values.shape == (32, 512)
    assert values.std() > 0  # which is not a number, unless all values are finite
    one, many = kernels.measure(weight, available_kernels()[0], 1, (1, 20), 0.001)
    assert (one.rows, many.rows) == (1, 20)
    assert 0 < many.multiply_adds <= many.best_multiply_adds
    assert one.bytes == pytest.approx(one.multiply_adds / (32 * 512) * pack(weight).nbytes)


def test_the_prefix_index_is_measured_under_every_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PAGES", 4000), ("EVICTED", 1000), ("SINGLE", 50)):
        monkeypatch.setattr(kv, name, value)
    kv.run(1)
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()[-4:]}
    assert set(rows) == {"lru", "lfu", "ttl", "cost"}
    for row in rows.values():
        assert all(float(number.replace(",", "")) > 0 for number in row[:3])
        assert float(row[3].rstrip(",")) < 2


def test_what_the_ledgers_benchmark_writes_are_rows(tmp_path: Path) -> None:
    made = Ledger(str(tmp_path / "ledger.db"))
    made.write(Run("made", 0), list(enumerate(ledger.made_rows(500), 1)), 0)
    assert sum(line.requests for line in usage(made, ["key", "model"])) == 500
    made.close()
    assert ledger.a_request(str(tmp_path / "ledger.db")).startswith("chatcmpl-")


def test_an_interval_of_a_median_holds_it() -> None:
    low, high = ledger.interval([1.0, 1.01, 1.02, 1.03, 1.5])
    assert 1.0 <= low <= 1.02 <= high <= 1.5
