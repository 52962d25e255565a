"""The batch that is kept from step to step says the same as one built anew."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from tailrace.backends import PAGE_SIZE, Batch, Sampling
from tailrace.engine.batch import BatchBuilder
from tailrace.engine.plan import Plan
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.request import Request


def builder() -> BatchBuilder:
    return BatchBuilder(max_running=4, max_context=1024, eos_ids=(1,), vocab_size=500)


def request(slot: int, length: int) -> Request:
    params = SamplingParams(max_tokens=800, temperature=slot / 4, seed=slot)
    made = Request(
        Submit(f"r{slot}", [slot * 50 + at % 40 for at in range(length)], params), seq=slot, arrived=0.0, chain=None
    )
    made.slot, made.computed, made.expected = slot, length - 1, length
    made.prompt_len -= 1
    return made


def same(kept: Batch, built: Batch) -> None:
    width = min(kept.tables.shape[1], built.tables.shape[1])
    assert np.array_equal(kept.tables[:, :width], built.tables[:, :width])
    assert not kept.tables[:, width:].any()
    assert not built.tables[:, width:].any()
    for name in ("tokens", "starts", "context", "wanted"):
        assert np.array_equal(getattr(kept, name), getattr(built, name)), name
    for one in fields(Sampling):
        assert np.array_equal(getattr(kept.sampling, one.name), getattr(built.sampling, one.name)), one.name


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_decodes_keep_their_batch_and_say_what_a_new_one_would(ahead: bool) -> None:
    """Built when all is known, or ahead of the tokens, which the backend fills in."""
    keeping = builder()
    requests = [request(2, 17), request(0, 5), request(3, 160)]
    for one in requests:
        keeping.seat(one)
    batches: list[Batch] = []
    kept: Batch | None = None
    followed = 0
    for step in range(300):
        plan = Plan(step)
        for one in requests if step != 150 else requests[:2]:
            while len(one.pages) * PAGE_SIZE <= one.computed:
                one.pages.append(100 * one.slot + len(one.pages) + 1)
            plan.add(one, 1, decode=True)
        before = kept.tokens.copy() if kept is not None else None
        following = keeping.ahead(plan) if ahead and step else None
        if following is None:
            kept = keeping.build(plan)
        else:
            followed += 1
            assert kept is not None
            assert before is not None
            assert np.array_equal(kept.tokens, before), "a batch changed while its step ran"
            kept = following[0]
            kept.tokens[:] = [chunk.request.tokens[chunk.begin] for chunk in plan.chunks.values()]
            keeping.follow()
        fresh = builder()
        for one in requests:
            fresh.seat(one)
        same(kept, fresh.build(plan))
        if not any(kept is one for one in batches):
            batches.append(kept)
        for chunk in plan.chunks.values():
            chunk.request.tokens.append((step * 7 + chunk.request.slot) % 500)
    assert len(batches) < 12
    assert followed > 250 if ahead else followed == 0


def test_what_may_end_a_request_is_known_beforehand_or_the_step_is_not_built_ahead() -> None:
    for stop, ends in ((None, [1, 7, 9]), (["x"], None)):
        keeping = builder()
        one = request(0, 5)
        one.params = SamplingParams(max_tokens=800, stop_ids=[7, 9], stop=stop or [])
        one.pages = list(range(9))
        keeping.seat(one)
        for step in range(2):
            plan = Plan(step)
            plan.add(one, 1, decode=True)
            if step == 0:
                keeping.build(plan)
                one.tokens.append(3)
        following = keeping.ahead(plan)
        assert (sorted(following[1].tokens) if following else None) == ends
