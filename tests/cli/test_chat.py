"""`tailrace chat` against a stand-in server."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.standin import Answer, Refusal, StandIn


def test_piped_lines_are_answered_one_after_the_other(run: Run, standin: StandIn) -> None:
    ended = run("chat", "--url", standin.url, text="hello\nagain\n")
    assert ended.returncode == 0
    assert ended.stdout == "you said: hello\nyou said: again\n"
    assert ended.stderr.count("TTFT") == 2
    assert ended.stderr.count("2 tokens in") == 2
    assert "prompt 7, 3 cached" in ended.stderr


def test_the_conversation_is_sent_with_every_question(run: Run, standin: StandIn) -> None:
    run("chat", "--url", standin.url, "--system", "Be brief.", "--temperature", "0", "--seed", "4", text="a\nb\n")
    assert standin.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "you said: a"},
        {"role": "user", "content": "b"},
    ]
    assert (standin.bodies[1]["temperature"], standin.bodies[1]["seed"]) == (0, 4)
    assert standin.bodies[1]["model"] == "tiny"


def test_reasoning_is_shown_beside_the_answer(run: Run, standin: StandIn) -> None:
    standin.answer = lambda _: Answer(
        ["So."], deltas=[{"reasoning_content": "Why [x]"}, {"reasoning_content": " then"}]
    )
    ended = run("chat", "--url", standin.url, text="a\nb\n")
    assert ended.stdout == "So.\nSo.\n"
    assert ended.stderr.count("Why [x] then\n\n") == 2
    assert standin.bodies[1]["messages"][1] == {"role": "assistant", "content": "So."}


def test_the_commands(run: Run, standin: StandIn) -> None:
    text = "a\n/reset\nb\n/system Be kind.\n/system\nc\n/help\n/nonsense\n/exit\nd\n"
    ended = run("chat", "--url", standin.url, text=text)
    assert [[message["content"] for message in body["messages"]] for body in standin.bodies] == [
        ["a"], ["b"], ["Be kind.", "c"],
    ]  # fmt: skip
    assert "System message: Be kind." in ended.stderr
    assert "/help " in ended.stderr
    assert "There is no /nonsense." in ended.stderr


def test_an_error_is_told_and_the_question_forgotten(run: Run, standin: StandIn) -> None:
    standin.answer = lambda body: (
        Refusal(400, "too long by far for the context") if len(standin.bodies) == 1 else Answer(["fine"])
    )
    ended = run("chat", "--url", standin.url, text="long\nshort\n")
    assert ended.returncode == 1
    assert "error: too long by far for the context" in ended.stderr
    assert "/reset" in ended.stderr
    assert ended.stdout == "fine\n"
    assert [message["content"] for message in standin.bodies[1]["messages"]] == ["short"]


def test_an_answer_that_is_cut_off_is_no_answer(run: Run, standin: StandIn) -> None:
    standin.answer = lambda _: Answer(["half an"], complete=False)
    ended = run("chat", "--url", standin.url, text="x\n")
    assert ended.returncode == 1
    assert "ended the answer before it was complete" in ended.stderr


def test_no_server_at_the_address(run: Run, free_port: int) -> None:
    ended = run("chat", "--url", f"http://127.0.0.1:{free_port}", text="x\n")
    assert ended.returncode == 1
    assert "Start one: tailrace serve" in ended.stderr
    assert run("chat", "--url", "ftp://x", text="x\n").returncode == 2


def test_the_key_comes_from_the_environment(run: Run, standin: StandIn) -> None:
    run("chat", "--url", f"{standin.url}/v1", text="x\n", TAILRACE_API_KEY="secret")
    assert standin.keys == ["Bearer secret"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    environment: dict[str, str], standin: StandIn, tmp_path: Path
) -> None:
    """In a terminal: the answer is interrupted, the server is hung up on, the chat goes on with what was said."""
    hold = threading.Event()
    standin.answer = lambda body: (
        Answer(["begun", "never said"], hold=hold) if len(body["messages"]) == 1 else Answer(["second"])
    )
    outside, inside = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", "chat", "--url", standin.url],
        stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    try:
        shown = read_until(outside, "> ")
        os.write(outside, b"question\n")
        shown += read_until(outside, "begun")
        child.send_signal(signal.SIGINT)
        shown += read_until(outside, "Stopped.")
        assert standin.hung_up.wait(30)
        os.write(outside, b"\x03go on\n")
        shown += read_until(outside, "TTFT")
        os.write(outside, b"/exit\n")
        assert child.wait(30) == 0
    finally:
        hold.set()
        child.kill()
        child.wait()
        os.close(outside)
    assert "never said" not in shown
    assert standin.bodies[1]["messages"][1] == {"role": "assistant", "content": "begun"}


def read_until(terminal: int, text: str) -> str:
    """What a terminal shows up to this text; fails where it does not come within a minute."""
    shown, deadline = "", time.monotonic() + 60
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{text!r} never came; shown so far: {shown!r}"
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
