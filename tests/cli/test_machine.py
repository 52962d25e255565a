"""`tailrace machine` as a person and as a program use it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run

LLAMA = Path(__file__).parent.parent / "golden" / "models" / "llama"


def test_without_a_model_the_ceilings_are_shown_and_saved(run: Run, environment: dict[str, str]) -> None:
    ended = run("machine", "--seconds", "0.2")
    assert ended.returncode == 0, ended.stderr
    for words in ("reading, GB/s", "memory", "multiply-adds, G/s", "int8_by_int4", "page fault", "tailrace pull"):
        assert words in ended.stdout
    saved = json.loads((Path(environment["TAILRACE_CACHE"]) / "machine.json").read_text())
    (only,) = saved["machines"]
    assert only["ceilings"]["machine"]["kernels"] in ended.stdout
    assert only["ceilings"]["bandwidths"][0]["bytes_per_second"] > 0


def test_json_has_a_model_s_operations_too(run: Run, environment: dict[str, str]) -> None:
    ended = run("machine", str(LLAMA), "--seconds", "0.2", "--context", "32", "--threads", "1", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ceilings"]["machine"]["threads"] == found["roofline"]["threads"] == 1
    steps = found["roofline"]["steps"]
    assert [step["step"] for step in steps] == ["decode 1 at 32", "decode 16 at 32", "prefill 512"]
    assert steps[0]["points"][0]["operation"] == "q+k+v"
    (entry,) = json.loads((Path(environment["TAILRACE_CACHE"]) / "machine.json").read_text())["machines"]
    assert entry == {"ceilings": found["ceilings"], "rooflines": [found["roofline"]]}
    shown = run("machine", str(LLAMA), "--seconds", "0.2", "--context", "32").stdout
    for words in ("decode 16 at 32", "gate+up x2", "head", "attention x2", "share", "held by", "arithmetic"):
        assert words in shown


def test_what_is_wrong_is_said(run: Run, environment: dict[str, str]) -> None:
    for arguments, words in (
        (["--kernels", "sse9"], "kernels 'sse9' cannot run on this machine; it can run"),
        (["--threads", "4096"], "threads must be 1 to"),
        (["nonsense"], "No model is called 'nonsense'"),
        ([""], "The model has no name"),
        (["/dev/null"], "/dev/null is neither a file nor a directory"),
        (["no/such.gguf"], "There is no no/such.gguf"),
        ([str(Path(__file__).parent)], "the weights are missing"),
    ):
        ended = run("machine", *arguments)
        assert ended.returncode in (1, 2)
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (Path(environment["TAILRACE_CACHE"]) / "machine.json").exists()
