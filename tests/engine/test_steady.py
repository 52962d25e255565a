"""The batch that is kept from step to step says the same as one built anew."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

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


def test_steps_of_decodes_keep_their_batch_and_say_what_a_new_one_would() -> None:
    keeping = builder()
    requests = [request(2, 17), request(0, 5), request(3, 160)]
    for one in requests:
        keeping.seat(one)
    batches: list[Batch] = []
    for step in range(300):
        plan = Plan(step)
        for one in requests if step != 150 else requests[:2]:
            while len(one.pages) * PAGE_SIZE <= one.computed:
                one.pages.append(100 * one.slot + len(one.pages) + 1)
            plan.add(one, 1, decode=True)
        kept = keeping.build(plan)
        fresh = builder()
        for one in requests:
            fresh.seat(one)
        same(kept, fresh.build(plan))
        if not batches or kept is not batches[-1]:
            batches.append(kept)
        for chunk in plan.chunks.values():
            chunk.request.tokens.append((step * 7 + chunk.request.slot) % 500)
    assert len(batches) < 12
