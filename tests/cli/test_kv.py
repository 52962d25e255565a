"""`tailrace kv replay`: the table, the JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty conversations in turns: each comes again with two more blocks, until it has eight."""
    lines, made = [], {talk: [1000 * talk] for talk in range(40)}
    for number in range(160):
        ids = made[number % 40]
        ids += [1000 * (number % 40) + len(ids), 1000 * (number % 40) + len(ids) + 1]
        length = 512 * (len(ids) - 1) + 100
        lines.append({"timestamp": 1000 * number, "input_length": length, "output_length": 9, "hash_ids": list(ids)})
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(file)


def test_the_table_has_every_policy_in_every_size(run: Run, trace: str) -> None:
    ended = run("kv", "replay", trace, "--bytes-per-token", "1024", COLUMNS="120")
    assert ended.returncode == 0, ended.stderr
    assert "160 requests with 425.6 k tokens, 320 different pages of 512 tokens" in ended.stdout
    rows = [row.split() for row in ended.stdout.splitlines() if "%" in row and "share" not in row]
    assert len(rows) == 25
    assert [row[-6] for row in rows[:5]] == ["lru", "lfu", "ttl", "cost", "optimal"]
    assert "1.5 MiB" in ended.stdout
    assert ended.stderr == ""


def test_programs_get_json(run: Run, trace: str) -> None:
    ended = run("kv", "replay", trace, "--json", "--sizes", "64,100%", "--policies", "lru,optimal",
                "--bytes-per-token", "10")  # fmt: skip
    found = json.loads(ended.stdout)
    assert (found["requests"], found["distinct_pages"]) == (160, 320)
    lru, optimal, *all_of_it = found["outcomes"]
    assert (lru["policy"], lru["pages"], lru["pool_bytes"]) == ("lru", 64, 64 * 512 * 10)
    assert lru["hit_tokens"] < optimal["hit_tokens"] < all_of_it[0]["hit_tokens"]
    assert all_of_it[0]["hit_tokens"] == all_of_it[1]["hit_tokens"] == 40 * (2 + 4 + 6) * 512
    assert all_of_it[0]["evictions"] == 0


def test_what_is_wrong_is_said(run: Run, trace: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    for arguments, said in (
        ((str(tmp_path / "bad.jsonl"),), "bad.jsonl, line 1: Object missing required field `input_length`"),
        ((str(tmp_path / "nowhere"),), "nowhere cannot be read"),
        ((trace, "--policies", "lru,mru"), "'mru' is not one of lru, lfu, ttl, cost, optimal"),
        ((trace, "--sizes", "5,x"), "'x' is neither a number of pages"),
        ((trace, "--sizes", "0%"), "--sizes"),
        ((trace, "--ttl", "0"), "--ttl"),
        ((trace, "--parity", "nan"), "--parity"),
    ):
        ended = run("kv", "replay", *arguments)
        assert ended.returncode == 2, arguments
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
