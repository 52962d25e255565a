"""What `generate` is made of: prompts read from a file, results appended to a file, and the requests between them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.cli.client import Client, CutOff, ServerError, Unreachable
from tailrace.terms import InvalidInput, TailraceError

_UNSUPPORTED = ("stream", "stream_options", "model", "best_of")
_LONGEST_WAIT = 30.0


@dataclass(frozen=True)
class Item:
    """One line of the prompts file. `digest` names its request: a result with another digest is another prompt's."""

    index: int
    id: str
    path: str
    body: dict[str, Any]
    digest: str


class Prompts:
    """Reads prompts files."""

    @staticmethod
    def read(file: Path, defaults: dict[str, Any], *, chat: bool = False, system: str | None = None) -> list[Item]:
        """The requests of a file. Raises `InvalidInput` naming the line that is wrong."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{file} cannot be read: {error}", param="prompts") from error
        json_lines = file.suffix.lower() in (".jsonl", ".ndjson", ".json")
        items: list[Item] = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                fields = _object(line) if json_lines else {"prompt": line.rstrip("\r")}
                items.append(_item(len(items), fields, defaults, chat, system))
            except InvalidInput as error:
                raise InvalidInput(f"{file}, line {number}: {error}", param="prompts") from error
        if not items:
            raise InvalidInput(f"{file} has no prompts", param="prompts")
        return items


def _object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"not JSON ({error})") from error
    if isinstance(fields, str):
        return {"prompt": fields}
    if not isinstance(fields, dict):
        raise InvalidInput("an object with prompt or messages is wanted, or a string")
    return fields


def _item(index: int, fields: dict[str, Any], defaults: dict[str, Any], chat: bool, system: str | None) -> Item:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidInput("exactly one of prompt and messages is wanted")
    for name in _UNSUPPORTED:
        if name in fields:
            raise InvalidInput(f"{name} cannot be set here")
    if fields.get("n", 1) != 1:
        raise InvalidInput("n cannot be set here: repeat the line, with other seeds")
    rest = {name: value for name, value in fields.items() if name not in ("id", "prompt", "messages")}
    if "max_completion_tokens" in rest:
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
    if "messages" in fields or (chat and isinstance(fields["prompt"], str)):
        messages = fields.get("messages") or [{"role": "user", "content": fields["prompt"]}]
        before = [{"role": "system", "content": system}] if system and messages[0].get("role") != "system" else []
        path, content = "/v1/chat/completions", {"messages": [*before, *messages]}
    else:
        path, content = "/v1/completions", {"prompt": fields["prompt"]}
    body = {**content, **defaults, **rest}
    digest = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()[:16]
    return Item(index, str(fields.get("id", index)), path, body, digest)


class Results:
    """The results file: one JSON object a line, appended in one write each; one process at a time."""

    def __init__(self, path: Path, *, restart: bool = False) -> None:
        self._path, self._restart = path, restart

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be written: {error.strerror}", param="out") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise InvalidInput(f"another tailrace generate writes to {self._path}", param="out") from error
        if self._restart:
            os.ftruncate(self._file, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a pipe or /dev/stdout cannot be synced
            os.fsync(self._file)
        os.close(self._file)

    def left(self, items: Sequence[Item]) -> list[Item]:
        """The items without a good result yet. Cuts off a last line that was torn. Refuses another job's results."""
        done = set()
        wanted: dict[Any, str] = {item.index: item.digest for item in items}
        for record in self._records():
            index = record.get("index")
            if wanted.get(index) != record.get("request"):
                raise InvalidInput(
                    f"{self._path} holds results of other prompts or parameters. Choose another --out, or --restart "
                    f"to overwrite it.",
                    param="out",
                )
            if "error" not in record:
                done.add(index)
        return [item for item in items if item.index not in done]

    def append(self, record: dict[str, Any]) -> None:
        """One line, whole or not at all. Raises `TailraceError` when it cannot be written."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(28, "only a part of the line fitted")
        except OSError as error:
            raise TailraceError(
                f"{self._path} cannot be written: {error.strerror}. Make room and run again: what is done is kept."
            ) from error

    def _records(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # a crash in the middle of a line
            os.ftruncate(self._file, whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise InvalidInput(f"{self._path}, line {number} is no result of generate; choose another --out",
                                   param="out")  # fmt: skip
            yield record


@dataclass(frozen=True)
class Outcome:
    """One item's record for the results file, and its output tokens."""

    record: dict[str, Any]
    tokens: int


class Runner:
    """Sends items to a server, several at a time; `sleep` waits between tries."""

    def __init__(
        self, client: Client, model: str, *, retries: int = 5, sleep: Callable[[float], None] | None = None
    ) -> None:
        self._client, self._model, self._retries = client, model, retries
        self._stopped = threading.Event()
        self._sleep = sleep or (lambda seconds: self._stopped.wait(seconds) and None)

    def run(self, items: Sequence[Item], concurrency: int, finished: Callable[[Outcome], None]) -> None:
        """Calls `finished`, in this thread, as each item ends. An interrupt abandons what runs and is passed on."""
        waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        for item in items:
            waiting.put(item)

        def work() -> None:
            try:
                while not self._stopped.is_set():
                    outcomes.put(self._answer(waiting.get_nowait()))
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - passed on to the thread that waits
                outcomes.put(error)

        for _ in range(min(concurrency, len(items))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in items:
                outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                finished(outcome)
        finally:
            self._stopped.set()

    def _answer(self, item: Item) -> Outcome:
        """The item's record; a failure is a record too. Nothing was kept of a broken try, so trying again is safe."""
        for attempt in range(self._retries + 1):
            try:
                return self._try(item)
            except (ServerError, Unreachable, CutOff) as error:
                if attempt == self._retries or not _passing(error) or self._stopped.is_set():
                    return Outcome({**_head(item), "error": str(error)}, 0)
                asked = error.retry_after if isinstance(error, ServerError) else None
                self._sleep(min(asked if asked is not None else 0.5 * 2**attempt, _LONGEST_WAIT))
            except (ValueError, KeyError, TypeError) as error:
                return Outcome({**_head(item), "error": f"the server's answer is not understood: {error!r}"}, 0)
        raise AssertionError  # the last attempt returns

    def _try(self, item: Item) -> Outcome:
        body = {**item.body, "model": self._model, "stream_options": {"include_usage": True}}
        sent, first, last = time.monotonic(), None, 0.0
        text: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        logprobs: dict[str, list[Any]] = {}
        finish: str | None = None
        usage: dict[str, Any] = {}
        with contextlib.closing(self._client.stream(item.path, body)) as chunks:
            for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    delta = choice.get("delta") or {}
                    piece = delta.get("content") if "delta" in choice else choice.get("text")
                    reasoned, called = delta.get("reasoning_content"), delta.get("tool_calls")
                    for name, values in (choice.get("logprobs") or {}).items():
                        logprobs.setdefault(name, []).extend(values or ())
                    if piece or reasoned or called:
                        last = time.monotonic() - sent
                        first = last if first is None else first
                    text.append(piece or "")
                    reasoning.append(reasoned or "")
                    for call in called or ():
                        _add_call(calls, call)
        if finish is None:
            raise CutOff("the answer ended without a finish reason")
        timing = {"ttft_s": first and round(first, 6), "e2e_s": round(time.monotonic() - sent, 6)}
        record = {**_head(item), "text": "".join(text), "finish_reason": finish, "usage": usage, "timing": timing}
        if any(reasoning):
            record["reasoning"] = "".join(reasoning)
        if calls:
            record["tool_calls"] = list(calls.values())
        if logprobs:
            record["logprobs"] = logprobs
        return Outcome(record, usage.get("completion_tokens", 0))


def _add_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """A streamed piece of a tool call, added to those so far."""
    made = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
    for name in ("name", "arguments"):
        made[name] += piece["function"].get(name) or ""


def _head(item: Item) -> dict[str, Any]:
    return {"index": item.index, "id": item.id, "request": item.digest}


def _passing(error: TailraceError) -> bool:
    """Whether it may go well the next time."""
    return not isinstance(error, ServerError) or error.status in (408, 429, 500, 502, 503, 504)
