"""Masks say which tokens a row may draw, on both backends alike, and a step waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import Batch, Masks
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.reference.sampler import sample
from tailrace.models import load_model, open_checkpoint
from tests.backends.test_cpu_model import GOLDEN, NAMES, PROMPT
from tests.batches import batch

ROWS = 6
BANNED_ROW = 3


@pytest.fixture(scope="module", params=available_kernels())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    path: Path = GOLDEN / "models" / NAMES[0]
    model = load_model(open_checkpoint(path), max_context=80)
    return CpuBackend(model, pages=64, max_context=80, step_tokens=128, max_running=8, threads=2, kernels=request.param)


def masked(vocab: int, *, logprobs: int, temperature: float = 0.8) -> Batch:
    """Rows with masks of many, few, one and no token, and two rows without."""
    made = batch(
        [(PROMPT[:10], 0, [0])] + [(PROMPT[row : row + 5], 0, [row]) for row in range(1, ROWS)],
        [9, *(14 + 5 * row for row in range(ROWS - 1))],
        temperature=temperature,
        seed=np.arange(ROWS),
        position=np.array([10] + [5] * (ROWS - 1)),
        logprobs=logprobs,
    )
    generator = np.random.default_rng(3)
    bits = np.zeros((4, -(-vocab // 32)), np.uint32)
    for line, share in enumerate((0.5, 0.02)):
        for token in np.flatnonzero(generator.random(vocab) < share).tolist():
            bits[line, token // 32] |= np.uint32(1 << token % 32)
    bits[2, 1] = 1 << 7  # token 39 alone; line 3 has none
    row = np.array([0, -1, 1, 3, 2, -1], np.int32)
    made.sampling.masks = Masks(row, bits, np.zeros(1, np.int32))
    return made


@pytest.mark.parametrize("logprobs", [-1, 0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masked_rows_draw_what_the_reference_draws(backend: CpuBackend, logprobs: int, temperature: float) -> None:
    made = masked(backend._vocab, logprobs=logprobs, temperature=temperature)
    assert made.sampling.masks is not None
    backend.release(made.sampling.masks)
    found = backend.run(made)
    assert found.logits is not None
    truth = sample(found.logits, made.sampling)
    assert found.tokens.tolist() == truth.tokens.tolist()
    assert found.tokens[4] == 39
    assert found.tokens[BANNED_ROW] == -1
    if logprobs >= 0:
        drawn = found.tokens >= 0
        np.testing.assert_allclose(found.logprobs[drawn], truth.logprobs[drawn], atol=1e-4)
        np.testing.assert_array_equal(found.top_tokens, truth.top_tokens)


def test_a_step_waits_until_its_masks_are_released(backend: CpuBackend) -> None:
    made = masked(backend._vocab, logprobs=-1)
    masks = made.sampling.masks
    assert masks is not None
    backend.release(masks)
    want = backend.run(made).tokens.tolist()
    bits = masks.bits.copy()
    masks.bits[:] = 0
    masks.ready[0] = 0
    backend.launch(made)
    done: list[list[int]] = []
    waiting = threading.Thread(target=lambda: done.append(backend.wait().tokens.tolist()))
    waiting.start()
    waiting.join(0.05)
    assert not done
    masks.bits[:] = bits
    backend.release(masks)
    waiting.join(20.0)
    assert done == [want]


def test_a_mask_that_is_too_short_is_refused(backend: CpuBackend) -> None:
    made = masked(backend._vocab, logprobs=-1)
    masks = made.sampling.masks
    assert masks is not None
    masks.bits = masks.bits[:, :1].copy()
    with pytest.raises(ValueError, match="a bit for each token"):
        backend.launch(made)
    masks.bits = np.zeros((1, -(-backend._vocab // 32)), np.uint32)
    with pytest.raises(ValueError, match="past the masks"):
        backend.launch(made)
