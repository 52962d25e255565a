"""What is found out of a server before it is measured."""

from __future__ import annotations

import uvloop

from tailrace.measure import probe
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.record import Outcome
from tailrace.measure.target import Target
from tailrace.workload.arrivals import Closed
from tests.measure import mock
from tests.measure.mock import Body, Script, running
from tests.measure.support import loaded


def prepared(url: str) -> tuple[Target, list[str]]:
    async def ask() -> tuple[Target, list[str]]:
        pool = Pool(url)
        try:
            return await probe.prepare(pool, model="m", api="chat", form="text", extra={}, exact=True)
        finally:
            pool.close()

    return uvloop.run(ask())


def unmarked(body: Body) -> Script:
    """As `transformers serve` has it: a finish reason and usage, and no [DONE]."""
    return Script([(0.0, mock.piece("x") + mock.FINISH + mock.usage(mock.prompt_tokens(body), 1))])


def cut(body: Body) -> Script:
    return Script([(0.0, mock.piece("x"))])


def test_streams_that_never_say_done_end_with_their_finish_reason() -> None:
    with running(unmarked) as server:
        target, notes = prepared(server.url)
        assert not target.marked
        assert target.extra == {"ignore_eos": True}  # it takes that
        assert notes == ["The server's streams end without [DONE]: those with a finish reason count as complete."]
        assert {one.outcome for one in loaded(server, target=target).records} == {Outcome.OK}
        server.answer = cut
        run = loaded(server, Plan(Closed(1), sessions=1, sustain=False), target=target)
        assert [one.outcome for one in run.records] == [Outcome.CUT]
        assert run.records[0].error == "the stream ended without a finish reason"


def test_a_server_that_knows_no_ignore_eos_and_says_no_done_is_taken_as_it_is() -> None:
    def answer(body: Body) -> Script:
        return mock.refuse(422, "unexpected field")(body) if "ignore_eos" in body else unmarked(body)

    with running(answer) as server:
        target, notes = prepared(server.url)
    assert (target.extra, target.marked) == ({}, False)
    assert len(notes) == 2
    assert "does not take ignore_eos" in notes[0]
