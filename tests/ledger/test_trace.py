"""A ledger's requests as a trace: what was asked comes back in its order, with its lengths and what it shared."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv import trace as traces
from tailrace.kv.trace import Line
from tailrace.ledger import fingerprints
from tailrace.ledger.fingerprints import BLOCK_TOKENS, KEY_FILE, MOST_BLOCKS
from tailrace.ledger.record import Record, record_of
from tailrace.ledger.store import Ledger
from tailrace.ledger.trace import lines, save
from tailrace.ledger.usage import ALWAYS, Span
from tailrace.terms import InvalidInput
from tailrace.workload import make, spec
from tests.ledger.rows import NOW, RUN, note, timeline

KEY = bytes(range(32))


def row(name: str, prompt: list[int], at: float, *, key: bytes | None = KEY, **values: object) -> Record:
    """A request that was received so many seconds after `NOW`."""
    made = record_of(
        timeline(name, at=0.0, prompt=len(prompt)), note(prompt=prompt, tenant=str(values.pop("tenant", "t"))),
        clock=NOW + at, usd_per_hour=None, key=key,
    )  # fmt: skip
    return msgspec.structs.replace(made, **values)


def traced(tmp_path: Path, rows: list[Record], span: Span = ALWAYS, **only: str) -> list[Line]:
    ledger = Ledger(str(tmp_path / "l.db"))
    ledger.write(RUN, list(enumerate(rows, 1)), 0)
    try:
        return list(lines(ledger, span, **only))
    finally:
        ledger.close()


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2**31), max_size=300), st.lists(st.integers(0, 2**31), max_size=300), st.integers(0, 300)
)
def test_prompts_have_as_many_fingerprints_in_common_as_whole_blocks(a: list[int], b: list[int], same: int) -> None:
    b = a[:same] + b
    found = [fingerprints.blocks(fingerprints.of(prompt, "t", KEY)) for prompt in (a, b)]
    assert [len(prints) for prints in found] == [-(-len(prompt) // BLOCK_TOKENS) for prompt in (a, b)]
    common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    whole = -(-common // BLOCK_TOKENS) if a == b else common // BLOCK_TOKENS
    assert found[0][:whole] == found[1][:whole]
    assert len(found[0]) <= whole or len(found[1]) <= whole or found[0][whole] != found[1][whole]


def test_neither_another_tenant_nor_another_key_has_the_same() -> None:
    prompt = list(range(200))
    usual = fingerprints.of(prompt, "t", KEY)
    assert usual == fingerprints.of(tuple(prompt), "t", KEY)
    assert not set(fingerprints.blocks(usual)) & set(fingerprints.blocks(fingerprints.of(prompt, "u", KEY)))
    assert not set(fingerprints.blocks(usual)) & set(fingerprints.blocks(fingerprints.of(prompt, "t", bytes(32))))


def test_a_very_long_prompt_s_row_stays_bounded() -> None:
    prints = fingerprints.of(range(200_000), "t", KEY)
    assert len(fingerprints.blocks(prints)) == MOST_BLOCKS
    assert len(prints) < 6000


@pytest.mark.parametrize("text", ["AAAAA", "AAAAAAAA", "\u00e9", "*"])
def test_what_is_no_fingerprint_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        fingerprints.blocks(text)


def test_servers_that_begin_at_a_time_agree_on_a_key(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(fingerprints.key_in(tmp_path / "s"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "s").iterdir()] == [KEY_FILE]
    assert (tmp_path / "s" / KEY_FILE).stat().st_mode & 0o77 == 0
    (tmp_path / "s" / KEY_FILE).write_bytes(b"short")
    assert len(fingerprints.key_in(tmp_path / "s")) == 32


def test_a_trace_has_times_lengths_and_what_was_shared(tmp_path: Path) -> None:
    system = list(range(130))  # two blocks and two tokens
    rows = [
        row("b", [*system, 7, 8, 9], 2.5),
        row("a", [*system, 1], 1.0),  # came first, ended later
        row("again", [*system, 7, 8, 9], 4.0),
        row("other", list(range(1000, 1100)), 5.0),
        row("unknown", [*system, 1], 6.0, key=None),  # written by a server that notes no fingerprints
        row("refused", system, 7.0, outcome="refused"),
        row("embedding", system, 8.0, endpoint="embeddings"),
    ]
    found = traced(tmp_path, rows)
    assert [line.timestamp for line in found] == [0, 1500, 3000, 4000, 5000]
    assert [line.input_length for line in found] == [131, 133, 133, 100, 131]
    assert {line.output_length for line in found} == {4}
    assert [line.hash_ids for line in found] == [[0, 1, 2], [0, 1, 3], [0, 1, 3], [4, 5], [6, 7, 8]]


def test_a_trace_can_be_of_a_part(tmp_path: Path) -> None:
    rows = [row(name, [1, 2, 3], at, workload=name) for at, name in enumerate(("chat", "rag", "chat"))]
    assert len(traced(tmp_path, rows, workload="chat")) == 2
    assert len(traced(tmp_path, [], tenant="nobody")) == 0
    assert len(traced(tmp_path, [], Span(since=rows[1].ended / 1e6))) == 2


def test_it_is_read_by_what_reads_traces(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = [row(str(at), [*range(200), at, at], at) for at in range(5)]
    assert save(path, traced(tmp_path, rows)) == 5
    assert traces.block_tokens(path) == BLOCK_TOKENS
    sessions = list(make.sessions(spec.load(str(path))))
    assert [session.at for session in sessions] == [0, 1, 2, 3, 4]
    for one, other in pairwise(session.turns[0] for session in sessions):
        assert (one.input, one.output) == (202, 4)
        assert one.pieces[:3] == other.pieces[:3]
        assert one.pieces[3].source != other.pieces[3].source


def test_a_block_s_size_is_told_from_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for size in (16, 64, 512, 2048):
        asked = [1, size, size + 1, 5 * size + 3]
        made = [
            {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(range(-(-n // size)))}
            for n in asked
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in made))
        assert traces.block_tokens(path) == size
        assert len(list(traces.lines(path, size))) == 4
    short = {"timestamp": 0, "input_length": 60, "output_length": 1, "hash_ids": [0]}
    path.write_text(
        (json.dumps(short) + "\n") * 1500 + json.dumps(short | {"input_length": 200, "hash_ids": [0, 1, 2, 3]})
    )
    assert traces.block_tokens(path) == BLOCK_TOKENS  # the last line alone tells
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2, 3, 4]}\n')
    with pytest.raises(InvalidInput, match="9 tokens are 1 blocks of 512"):
        list(make.sessions(spec.load(str(path))))


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    assert save(path, []) == 0
    with pytest.raises(InvalidInput, match="cannot be written"):
        save(tmp_path / "none" / "t.jsonl", [])

    def broken():  # type: ignore[no-untyped-def]
        yield Line(0, 1, 1, [0])
        raise RuntimeError("the database went away")

    with pytest.raises(RuntimeError, match="went away"):
        save(path, broken())
    assert path.read_text() == "old"
    assert [left.name for left in tmp_path.iterdir()] == ["t.jsonl"]
