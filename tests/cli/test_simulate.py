"""`tailrace simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

COST = 'kind = "linear"\nstep = 0.02\ntoken = 0.001\nabout = "made up for a test"\n'


@pytest.fixture
def cost(tmp_path: Path) -> str:
    file = tmp_path / "cost.toml"
    file.write_text(COST)
    return str(file)


def test_a_trace_on_two_replicas(run: Run, cost: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 500 * at,
            "input_length": 1024 + at,
            "output_length": 5,
            "hash_ids": [at % 4, 10 + at % 4, 20 + at],
        }
        for at in range(1, 13)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {kind: tmp_path / f"result.{kind}" for kind in ("json", "csv", "html")}
    timelines = tmp_path / "timelines.jsonl"
    outs = [part for file in files.values() for part in ("--out", str(file))]
    ended = run("simulate", str(trace), "--cost", cost, "--kv-tokens", "8192", "--replicas", "2", "--place", "prefix",
                "--slo", "ttft=10s", "--warmup", "0", "--timelines", str(timelines), *outs)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "trace on tailrace at 2 replicas, placed by prefix, as recorded, 1 times as fast (predicted)" in ended.stdout
    assert "12 requests in" in ended.stdout
    assert "100.0%" in ended.stdout
    assert "Cost: made up for a test" in ended.stdout
    assert "client" not in ended.stdout
    told = [json.loads(line) for line in timelines.read_text().splitlines()]
    assert {line["replica"] for line in told} == {0, 1}
    assert sum(line["tokens"]["cached"] for line in told) == 8 * 1024  # all but the first of each of four prefixes
    saved = json.loads(files["json"].read_text())
    assert [one["source"] for one in saved["runs"]] == ["predicted"]
    assert len(files["csv"].read_text().splitlines()) == 13
    page = files["html"].read_text()
    assert "<h1>Prediction: trace on tailrace</h1>" in page
    assert "Predicted by tailrace simulate" in page


def test_what_is_wrong_is_said(run: Run, cost: str, tmp_path: Path) -> None:
    for arguments, said in (
        (("chat", "--cost", str(tmp_path / "none.toml"), "--kv-tokens", "8192"), "none.toml cannot be read"),
        (("nothing", "--cost", cost, "--kv-tokens", "8192"), "there is no workload 'nothing'"),
        (("chat", "--cost", cost, "--kv-tokens", "8"), "kv_tokens must hold at least one page"),
        (("chat", "--cost", cost, "--kv-tokens", "8192", "--timelines", "/nowhere/t"), "/nowhere/t cannot be written"),
    ):
        ended = run("simulate", *arguments)
        assert ended.returncode == 2, ended.stderr
        assert said in ended.stderr.replace("\n", " ")
        assert "Traceback" not in ended.stderr
