"""Requests whose text must match a grammar: compiling that on a thread of its own, and following it token by token.

The engine's thread hands a request over and takes it back (`Grammars`); meanwhile the request waits. From then on its
`Constraint` says after each token what may follow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.terms import TailraceError

if TYPE_CHECKING:
    from tailrace.engine.request import Request
    from tailrace.text.grammar import Grammar

COMPILE_LIMIT = 10.0
"""Seconds that a request waits for its grammar before it fails."""


class Matcher(Protocol):
    """What is needed of `text.grammar.Matcher`."""

    words: int

    @property
    def ended(self) -> bool: ...

    def take(self, token: int) -> None: ...

    def forced(self) -> list[int]: ...

    def fill(self, bits: NDArray[np.uint32]) -> None: ...


class Compiler(Protocol):
    """What is needed of `text.grammar.Compiler`."""

    def known(self, grammar: Grammar) -> Matcher | None: ...

    def compile(self, grammar: Grammar) -> Matcher: ...


class Constraint:
    """What one request's grammar allows next.

    Where the grammar leaves no choice but one text, the tokens of that text are known beforehand. With `jump` they are
    handed out to be appended without drawing them; without it, each has to be drawn, since its log-probability is
    asked for, and is then the only one allowed. Which tokens a request gets depends on neither.
    """

    __slots__ = ("_jump", "_matcher", "_pending")

    def __init__(self, matcher: Matcher, *, jump: bool) -> None:
        self._matcher = matcher
        self._jump = jump
        self._pending = deque([] if matcher.ended else matcher.forced())  # taken in already, to be drawn

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return self._matcher.words

    @property
    def ended(self) -> bool:
        """The text is complete: nothing can follow."""
        return not self._pending and self._matcher.ended

    def take(self, token: int) -> list[int]:
        """A token has been drawn. Returns those that follow it without being drawn. Raises GrammarError."""
        if self._pending:
            self._pending.popleft()
        else:
            self._matcher.take(token)
            if not self._matcher.ended:
                self._pending.extend(self._matcher.forced())
        if not self._jump:
            return []
        following = list(self._pending)
        self._pending.clear()
        return following

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Writes the mask of the next token: uint32 [words]. Raises GrammarError."""
        if not self._pending:
            self._matcher.fill(bits)
            return
        token = self._pending[0]
        bits[:] = 0
        bits[token // 32] = np.uint32(1 << token % 32)


class Grammars:
    """Compiles grammars. `open_compiler` is called when the first one comes, on the thread that compiles; `notify` on
    it whenever one is ready. Without `thread` whoever calls `work` is the thread."""

    def __init__(
        self,
        open_compiler: Callable[[], Compiler],
        *,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._open = open_compiler
        self._clock = clock
        self._compiler: Compiler | None = None
        self._threaded = thread
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._asked: deque[Request] = deque()
        self._ready: deque[tuple[Request, Matcher | str]] = deque()
        self._waiting: dict[str, tuple[Request, float]] = {}  # with the time until which it waits
        self._closing = False

    # --- the engine's thread

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    @property
    def has_finished(self) -> bool:
        """Whether `finished` may have something to give."""
        return bool(self._ready)

    def begin(self, request: Request) -> None:
        """Gives a request its constraint, at once where its grammar is compiled already; else `finished` will."""
        grammar = request.params.grammar
        assert grammar is not None
        matcher = self._compiler.known(grammar) if self._compiler is not None else None
        if matcher is not None:
            request.constraint = constraint(request, matcher)
            return
        request.compiling = True
        self._waiting[request.id] = (request, self._clock() + COMPILE_LIMIT)
        with self._wake:
            self._asked.append(request)
            self._wake.notify()
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            self._thread.start()

    def finished(self) -> list[tuple[Request, str]]:
        """The requests that no longer wait, each once, with what went wrong ("" where nothing did)."""
        done: list[tuple[Request, str]] = []
        while self._ready:
            request, made = self._ready.popleft()
            if self._waiting.pop(request.id, None) is None:
                continue  # it has ended meanwhile, or waited for too long
            error = made if isinstance(made, str) else ""
            if not isinstance(made, str):
                try:
                    request.constraint = constraint(request, made)
                except TailraceError as failure:
                    error = f"grammar_failed: {failure}"
            request.compiling = False
            done.append((request, error))
        now = self._clock()
        late = [request for request, until in self._waiting.values() if until <= now]
        for request in late:
            del self._waiting[request.id]
            done.append((request, f"grammar_failed: compiling the grammar took more than {COMPILE_LIMIT:g} seconds"))
        return done

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._waiting.pop(request.id, None)

    def close(self) -> None:
        """Ends the thread once it is done with what it compiles; nobody waits for it."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    # --- the thread

    def work(self) -> bool:
        """One grammar; False where there is none to compile."""
        with self._wake:
            request = self._asked.popleft() if self._asked else None
        if request is None:
            return False
        if request.id in self._waiting:
            self._ready.append((request, self._compile(request)))
            self.notify()
        return True

    def _compile(self, request: Request) -> Matcher | str:
        grammar = request.params.grammar
        assert grammar is not None
        try:
            if self._compiler is None:
                self._compiler = self._open()
            return self._compiler.compile(grammar)
        except TailraceError as error:
            return f"invalid_grammar: {error}"
        except Exception as error:  # noqa: BLE001 - whatever the library raises fails this request, and only that
            return f"grammar_failed: {type(error).__name__}: {error}"

    def _run(self) -> None:
        while not self._closing:
            if not self.work():
                with self._wake:
                    if not self._asked and not self._closing:
                        self._wake.wait()


def constraint(request: Request, matcher: Matcher) -> Constraint:
    """A request's constraint, at the beginning of its text."""
    params = request.params
    return Constraint(matcher, jump=params.logprobs < 0 and params.prompt_logprobs < 0)
