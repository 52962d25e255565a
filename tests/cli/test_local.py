"""Commands that start a server of their own, with the real one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import local
from tailrace.terms import InvalidInput, TailraceError
from tests.cli.conftest import Run
from tests.cli.standin import StandIn

SMALL = {"TAILRACE_CACHE": os.environ.get("TAILRACE_CACHE") or str(Path.home() / ".cache" / "tailrace")}


def test_generate_starts_a_server_for_the_model_and_ends_it(run: Run, smollm2: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("The capital of France is\nOne, two, three,\n")
    ended = run("generate", str(prompts), "-m", str(smollm2), "-o", str(out), "--max-tokens", "4", "--temperature", "0",
                **SMALL)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Starting a server" in ended.stderr
    answers = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda one: one["index"])
    assert "Paris" in answers[0]["text"]
    assert [one["usage"]["completion_tokens"] for one in answers] == [4, 4]


def test_chat_starts_a_server_for_the_model_and_remembers(run: Run, smollm2: Path) -> None:
    ended = run("chat", str(smollm2), "--temperature", "0", "--max-tokens", "12", text="Say hello.\nAgain.\n", **SMALL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("TTFT") == 2
    assert ended.stdout.strip()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all")
    with (
        pytest.raises(TailraceError, match=r"(?s)ended while it started.*broken\.gguf"),
        local.started(str(tmp_path / "broken.gguf")),
    ):
        pass


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"quantize": "int8"}, ("--quantize", "int8")),
        ({"lora": ("adapter", "a dir")}, ("--lora", "adapter=a dir")),
        ({"chat_template": "hermes"}, ("--chat-template", "hermes")),
    ],
)
def test_what_a_server_is_started_with_wants_a_server_of_their_own(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], options: tuple[str, ...]
) -> None:
    """One that runs may compute with other weights: it is not asked, and one that is named is not put up with."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    @contextlib.contextmanager
    def started(model: str, *, options: tuple[str, ...] = (), **_: Any) -> Iterator[None]:
        asked.append((model, options))
        yield

    monkeypatch.setattr(local, "started", started)
    monkeypatch.setattr(local, "_serves", lambda *_: True)
    with local.connected(None, "m", None, print, **own):
        pass
    assert asked == [("m", options)]
    with (
        pytest.raises(InvalidInput, match=options[0]),
        local.connected("http://x", "m", None, print, **own),
    ):
        pass


def test_a_server_that_is_named_must_have_the_model(standin: StandIn) -> None:
    with local.connected(standin.url, "tiny", None, print) as client:
        assert client.models() == ["tiny"]
    with (
        pytest.raises(InvalidInput, match="no model 'other'; it has tiny"),
        local.connected(standin.url, "other", None, print),
    ):
        pass
