"""A replayed trace finds what an engine would find, and a malformed one is refused by its line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv import replay as replaying
from tailrace.kv.replay import REPLAYED, Outcome, Trace, prefill_work
from tailrace.terms import InvalidInput

BLOCK = 8


def line(at: float, ids: list[int], rest: int = 1, **changes: Any) -> dict[str, Any]:
    """A request whose full blocks have these numbers, with `rest` tokens after them."""
    tail = [1000 + len(ids)] if rest else []
    length = len(ids) * BLOCK + rest
    return {"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": ids + tail} | changes


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def trace_of(tmp_path: Path, lines: list[dict[str, Any]]) -> Trace:
    return replaying.read(written(tmp_path / "trace.jsonl", lines), BLOCK)


def run(trace: Trace, name: str, pages: int, ttl: float = 60.0) -> Outcome:
    return replaying.replay(trace, name, pages, ttl=ttl)


def test_a_prompt_finds_the_full_blocks_that_it_begins_with(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [line(0, [1, 2, 3]), line(10, [1, 2, 4]), line(20, [1, 2, 3]), line(30, [2, 3])])
    for name in REPLAYED:
        outcome = run(trace, name, 100)
        assert outcome.hit_tokens == (2 + 3) * BLOCK
        assert outcome.hit_rate == pytest.approx(5 * BLOCK / (11 * BLOCK + 4))
        assert outcome.evictions == 0
    assert (trace.distinct_pages, trace.input_tokens) == (6, 11 * BLOCK + 4)


def test_a_partial_block_is_never_found_and_one_token_is_always_computed(tmp_path: Path) -> None:
    whole, partial = line(0, [1, 2], rest=0), line(0, [1, 2], rest=5)
    assert run(trace_of(tmp_path, [whole, whole]), "lru", 10).hit_tokens == BLOCK
    assert run(trace_of(tmp_path, [partial, partial]), "lru", 10).hit_tokens == 2 * BLOCK


def test_work_saved_counts_late_tokens_for_more() -> None:
    assert prefill_work(100, 1e12) == pytest.approx(100)
    assert prefill_work(100, 50) == pytest.approx(200)
    assert prefill_work(100, 50) - prefill_work(90, 50) > prefill_work(10, 50)


def test_policies_differ_where_they_should(tmp_path: Path) -> None:
    popular = [line(at, [1]) for at in range(5)]
    flood = [line(10_000 + at, [100 + at]) for at in range(4)]
    late = [line(30_000, [1])]
    trace = trace_of(tmp_path, popular + flood + late)
    hits = {name: run(trace, name, 3).hit_tokens // BLOCK for name in REPLAYED}
    assert hits == {"lru": 4, "lfu": 5, "ttl": 4, "cost": 5, "optimal": 5}
    assert run(trace, "ttl", 100).hit_tokens // BLOCK == 5
    short = run(trace, "ttl", 100, ttl=5.0)
    assert short.hit_tokens // BLOCK == 4
    assert short.evictions == 5
    assert (short.most_held, run(trace, "lru", 100).most_held, run(trace, "lru", 3).most_held) == (4, 5, 3)


def test_a_prompt_larger_than_the_pool_is_kept_as_far_as_it_fits(tmp_path: Path) -> None:
    long = line(0, list(range(10)))
    for name in REPLAYED:
        assert run(trace_of(tmp_path, [long, long]), name, 4).hit_tokens == 4 * BLOCK


def test_progress_adds_up_to_all_requests(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [line(at, [at % 7]) for at in range(1203)])
    told: list[int] = []
    replaying.replay(trace, "lru", 5, ttl=60.0, report=told.append)
    assert sum(told) == 1203
    assert len(told) > 2


traces = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=2, max_size=7)


def lines_of(paths: list[list[int]]) -> list[dict[str, Any]]:
    """Requests down a binary tree; a block's number says where it is."""
    ids = [[int("1" + "".join(map(str, path[: at + 1]))) for at in range(len(path))] for path in paths]
    return [line(1000 * n, one) for n, one in enumerate(ids)]


def best(requests: list[frozenset[int]], pages: int) -> int:
    """Most blocks that can be found, by trying all ways of forgetting."""
    states = {frozenset[int](): 0}
    for wanted in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            spare = held - wanted
            for kept in itertools.combinations(sorted(spare), min(len(spare), pages - len(wanted))):
                state = wanted | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + len(wanted & held))
        states = after
    return max(states.values())


@settings(max_examples=80, derandomize=True, deadline=None)
@given(traces, st.integers(3, 6))
def test_no_policy_finds_more_than_the_optimum_and_the_optimum_finds_all_that_can_be_found(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], pages: int
) -> None:
    lines = lines_of(paths)
    trace = trace_of(tmp_path_factory.mktemp("trace"), lines)
    hits = {name: run(trace, name, pages, ttl=2.5).hit_tokens // BLOCK for name in REPLAYED}
    assert hits["optimal"] == max(hits.values())
    assert hits["optimal"] == best([frozenset(one["hash_ids"][:-1]) for one in lines], pages)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ("[1]", "Expected `object`"),
        (json.dumps(line(5, [1]) | {"hash_ids": "x"}), "hash_ids"),
        (json.dumps({"timestamp": 5}), "input_length"),
        (json.dumps(line(5, [-1])), "hash_ids"),
        (json.dumps(line(5, [1 << 31])), "hash_ids"),
        (json.dumps(line(5, [1]) | {"input_length": 0}), "input_length"),
        (json.dumps(line(5, [1]) | {"input_length": 1.5}), "input_length"),
        (json.dumps(line(5, [1]) | {"input_length": 100}), "100 tokens are 13 blocks of 8, but there are 2"),
        (json.dumps(line(3, [1])), "before that of the line above"),
        ("\xff", "line 3"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, wrong: str, said: str) -> None:
    file = written(tmp_path / "trace.jsonl", [line(4, [1]), line(4, [2])])
    file.write_bytes(file.read_bytes() + wrong.encode("latin-1") + b"\n" + json.dumps(line(9, [1])).encode())
    with pytest.raises(InvalidInput, match="line 3") as refused:
        replaying.read(file, BLOCK)
    assert said in str(refused.value)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidInput, match="no requests"):
        replaying.read(tmp_path / "empty")
    with pytest.raises(InvalidInput, match="cannot be read"):
        replaying.read(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="cannot be read"):
        replaying.read(tmp_path)
