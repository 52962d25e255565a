"""The reference backend keeps what it should in pages, row by row, and agrees with transformers on a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.backends import Format, Weight
from tailrace.backends.reference import ReferenceBackend
from tailrace.backends.reference.kept import round_to_bf16
from tailrace.backends.reference.ops import round_to_int8, widen_to_bf16
from tailrace.models import load_model, open_checkpoint
from tests.batches import batch, logits_of, pages_for

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
LOGITS = np.load(GOLDEN / "logits.npz")
SMOLLM2_TOKENS = 16
"""Of the forty of each case; numpy takes seconds for these."""


def backend_of(name: str = "mistral-window", pages: int = 24, **options: Any) -> ReferenceBackend:
    return ReferenceBackend(load_model(open_checkpoint(GOLDEN / "models" / name)), pages=pages, **options)


def test_several_sequences_in_one_batch_do_not_mix() -> None:
    backend = backend_of()
    prompts = [PROMPT[:40], PROMPT[100:117], PROMPT[200:233]]
    tables = [[3, 0, 7], [9, 4], [5, 11, 1]]
    starts = np.cumsum([0] + [len(prompt) for prompt in prompts])
    wanted = [int(end) - 1 for end in starts[1:]]
    together = backend.run(batch(list(zip(prompts, [0] * 3, tables, strict=True)), wanted)).logits
    assert together is not None
    for row, prompt in enumerate(prompts):
        alone = logits_of(backend_of(), prompt, [len(prompt) - 1])
        assert np.abs(together[row] - alone[0]).max() < 1e-4


def test_a_shared_prefix_is_read_from_its_pages() -> None:
    backend = backend_of("llama")
    logits_of(backend, PROMPT[:32], [31])
    rest = backend.run(batch([(PROMPT[32:50], 32, [0, 1, 5, 6]), (PROMPT[32:60], 32, [0, 1, 8, 9])], [17, 45])).logits
    assert rest is not None
    whole = logits_of(backend_of("llama"), PROMPT[:60], [49, 59])
    assert np.abs(rest - whole).max() < 1e-4


@pytest.mark.parametrize("name", ["mistral-window", "qwen3", "llama-biased"])
def test_bits_do_not_depend_on_company_or_chunks_when_batch_invariant(name: str) -> None:
    whole = logits_of(backend_of(name, batch_invariant=True), PROMPT[:50], range(50))
    chunked = logits_of(backend_of(name, batch_invariant=True), PROMPT[:50], range(50), chunk=7, first_page=9)
    assert np.array_equal(whole, chunked)
    company = backend_of(name, batch_invariant=True)
    parts = [(PROMPT[300:333], 0, [20, 21, 22]), (PROMPT[:50], 0, [4, 3, 2, 1])]
    together = company.run(batch(parts, list(range(33, 83)))).logits
    assert together is not None
    assert np.array_equal(whole, together)


def test_the_last_layer_skips_rows_that_nobody_wants_and_only_those() -> None:
    for wanted in ([79], [0, 40], [5, 6, 7, 79]):
        found = logits_of(backend_of("llama"), PROMPT[:80], wanted)
        assert np.abs(found - LOGITS["llama"][wanted]).max() < 1e-4


def test_a_step_that_wants_nothing_still_keeps_its_keys_and_values() -> None:
    backend = backend_of("llama")
    first = backend.run(batch([(PROMPT[:20], 0, [0, 1])], []))
    assert first.tokens.shape == (0,)
    found = backend.run(batch([(PROMPT[20:30], 20, [0, 1])], [9])).logits
    assert found is not None
    assert np.abs(found[0] - LOGITS["llama"][29]).max() < 1e-4


def test_bfloat16_pages_round_keys_and_values_before_anything_reads_them() -> None:
    options: dict[str, Any] = {"kv_dtype": "bf16", "batch_invariant": True}
    whole = logits_of(backend_of("llama", **options), PROMPT[:40], range(40))
    chunked = logits_of(backend_of("llama", **options), PROMPT[:40], range(40), chunk=3)
    assert np.array_equal(whole, chunked)
    difference = np.abs(whole - LOGITS["llama"][:40]).max()
    assert 1e-4 < difference < 0.3


def test_rounding_to_bfloat16() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000], np.uint32)
    rounded = round_to_bf16(bits.view(np.float32)).view(np.uint32)
    assert rounded.tolist() == [0x3F800000, 0x3F800000, 0x3F820000, 0x3F810000, 0x7F800000, 0xFF800000]
    assert np.isnan(round_to_bf16(np.array([np.nan], np.float32))[0])


def test_rounding_activations_to_int8() -> None:
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = [127.0, 0.5, 1.5, -2.5]  # d = 1: halves go to even
    x[1, 32:] = np.linspace(-3, 3, 32)
    rounded = round_to_int8(x)
    assert rounded[0, :4].tolist() == [127.0, 0.0, 2.0, -2.0]
    assert (rounded[0, 4:] == 0).all()
    assert np.abs(rounded - x)[1].max() <= 3 / 127 / 2 + 1e-6


def test_only_quantised_weights_see_rounded_activations() -> None:
    exact = logits_of(backend_of("llama"), PROMPT[:10], [9])
    for rounded in ("int8", "bf16"):
        assert np.array_equal(exact, logits_of(backend_of("llama", rounded=rounded), PROMPT[:10], [9]))


def test_widening_weights_to_bf16() -> None:
    weights = np.array([0.0, 1.0, -1.0, 1 + 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-10, 3e-8, 300.0, -256.0], np.float32)
    above = 1 + 2**-7  # the next bf16; halves go away from zero
    assert widen_to_bf16(weights).tolist() == [0.0, 1.0, -1.0, above, -above, 1.0, 0.0, 256.0, -256.0]
    rng = np.random.default_rng(0)
    some = (rng.normal(size=1000) * 0.05).astype(np.float32)
    assert (np.abs(widen_to_bf16(some) - some) <= np.abs(some) * 2**-8 * 1.1 + 2**-22).all()


def test_counted_bytes() -> None:
    backend = backend_of("llama", pages=4)
    assert backend.kv_bytes == 2 * 2 * 4 * 16 * 2 * 8 * 4  # keys, values; layers, pages, slots, heads, dims, bytes
    logits_of(backend, PROMPT[:4], [3])
    assert backend.weight_bytes == 4 * sum(np.prod(w.shape) for w in backend._model.weights())  # type: ignore[attr-defined]


def test_a_weight_is_decoded_once() -> None:
    backend = backend_of("llama")
    weight = Weight("t", Format.F32, (1, 2), np.zeros((1, 8), np.uint8))
    assert backend.values(weight) is backend.values(weight)


def test_smollm2_continues_as_in_transformers(smollm2: Path) -> None:
    """Greedy ids of a dozen prompts; every best logit leads by 0.007 or more, far above float32's noise. The ids are
    fed, and each must be the best at its place, which is the same as drawing them one by one."""
    cases = json.loads((GOLDEN / "smollm2-135m.json").read_text())
    parts, wanted, expected, pages, rows = [], [], [], 0, 0
    for case in cases:
        ids = case["ids"][:SMOLLM2_TOKENS]
        fed = case["prompt_ids"] + ids[:-1]
        parts.append((fed, 0, list(range(pages, pages + pages_for(len(fed))))))
        pages += pages_for(len(fed))
        rows += len(fed)
        wanted += range(rows - len(ids), rows)
        expected += ids
    backend = ReferenceBackend(load_model(open_checkpoint(smollm2)), pages=pages)
    assert backend.run(batch(parts, wanted)).tokens.tolist() == expected
