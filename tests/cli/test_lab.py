"""`tailrace lab` as a person and as a program use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.cli import app, lab
from tailrace.terms import TailraceError
from tests.cli.conftest import Run
from tests.measure import mock
from tests.measure.mock import running
from tests.models import random_llama


def test_the_list_says_what_each_answers(capsys: pytest.CaptureFixture[str]) -> None:
    lab.list_()
    said = capsys.readouterr().out
    for words in ("shapes ", "why does one request take so much longer", "kv ", "--url works", "this machine alone"):
        assert words in said
    lab.list_(as_json=True)
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [
        "shapes", "batch", "context", "kv", "prefix", "agent", "precision", "roofline"
    ]  # fmt: skip


def test_a_server_at_an_address_is_measured_and_reported(run: Run, tmp_path: Path) -> None:
    page, numbers = tmp_path / "lab.html", tmp_path / "lab.json"
    with running(mock.steady(0.002, 0.001)) as server:
        ended = run("lab", "agent", "some-model", "--url", server.url, "--seconds", "1", "--api", "x=1/2",
                    "--html", str(page), "--json", str(numbers))  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "agent: about 9 s." in ended.stderr
    assert f"Written: {page}" in ended.stderr
    for words in ("tokens, ", "times those of its first step", "A five-step agent costs twelve times one call",
                  "[predicted]", "The prices of x: --api"):  # fmt: skip
        assert words in ended.stdout, words
    found = json.loads(numbers.read_text())
    (chapter,) = found["chapters"]
    assert chapter["lesson"]["figures"] == []
    assert len(chapter["found"]["steps"]) == 5
    assert "<svg" in page.read_text()


def test_our_own_server_is_started_and_its_pages_are_as_predicted(run: Run, tmp_path: Path) -> None:
    folder = random_llama.write(tmp_path / "m")
    ended = run("lab", "kv", str(folder), "--quick", "--seconds", "1", "--threads", "1", "--json", "-")
    assert ended.returncode == 0, ended.stderr
    (chapter,) = json.loads(ended.stdout)["chapters"]
    assert chapter["found"]["token_bytes"] == 2 * 2 * 2 * 32 * 2
    looks = [look for wave in chapter["found"]["contexts"] + chapter["found"]["users"] for look in wave["samples"]]
    assert all(look["low"] <= look["pages"] <= look["high"] for look in looks), looks
    assert chapter["found"]["rss"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shapes", "nonsense"], "No model is called 'nonsense'"),
        (["shapes", "--url", "ftp://x"], "is no address of a server"),
        (["shapes", "--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["roofline", "--url", "http://127.0.0.1:9"], "roofline measures this machine"),
        (["shapes", "--url", "http://127.0.0.1:9", "--threads", "1"], "--threads is for a server that is started here"),
        (["kv", "nonsense", "--url", "http://127.0.0.1:9"], "the files of nonsense are not here"),
        (["agent", "--url", "http://127.0.0.1:9", "--api", "x=1"], "--api is as in some-api=0.15/0.60"),
        (["shapes", "--api", "x=1/2"], "--api is for the agent's bill"),
        (["precision", "--quantize", "int8"], "--quantize is not for precision"),
        (["shapes", "--html", "/no/such/lab.html"], "/no/such/lab.html cannot be written: there is no directory"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], words: str) -> None:
    with pytest.raises(TailraceError) as caught:
        app.run(["lab", *arguments])
    assert words in str(caught.value)
