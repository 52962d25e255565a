"""Where an engine's time goes, step by step, for as long as somebody looks.

A profile puts itself between the core and the methods that a step consists of, by attributes of the very objects, and
takes those away again at its end. So it costs nothing while there is none: no code in the core knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tailrace.engine.protocol import Span, Spans

if TYPE_CHECKING:
    from tailrace.engine.process import Core

MOST_SPANS = 200_000
"""After so many a profile ends."""
PIECE = 512
"""Spans that are sent together."""


class Profile:
    """Runs from when it is made until `end`, or until `steps` steps have ended (0: no bound). `send` gets the pieces,
    `ended` is called once. The thread that steps calls everything."""

    def __init__(
        self,
        core: Core,
        send: Callable[[Spans], None],
        ended: Callable[[], None],
        steps: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_SPANS,
    ) -> None:
        self._send = send
        self._ended = ended
        self._left = steps
        self._bounded = steps > 0
        self._clock = clock
        self._room = most
        self._spans: list[Span] = []
        self._open = True
        self._over = False  # ends with the step that runs: those around it are on the stack
        self._depth = 0
        self._taken: list[tuple[object, str]] = []
        self._kernels: Callable[[], dict[str, float]] | None = getattr(core.backend, "profiled", None)
        self._count: Callable[[bool], None] | None = getattr(core.backend, "profile", None)
        for owner, method, name in core.parts():
            self._take(owner, method, name)
        if self._count is not None and self._kernels is not None:
            self._count(True)
            self._kernels()  # what was counted before

    def end(self, *, cut: bool = False) -> None:
        """Takes itself out and sends the rest; does nothing the second time."""
        if not self._open:
            return
        self._open = False
        for owner, method in self._taken:
            delattr(owner, method)
        if self._count is not None:
            self._count(False)
        self._send(Spans(self._spans, done=True, cut=cut))
        self._spans = []
        self._ended()

    def _take(self, owner: object, method: str, name: str) -> None:
        original = getattr(owner, method)
        is_step, is_apply = name == "step", name == "apply"

        def timed(*args: Any, **named: Any) -> Any:
            self._depth += 1
            begin = self._clock()
            try:
                if is_apply:
                    self._step(args[0], begin)
                return original(*args, **named)
            finally:
                self._depth -= 1
                self._add(Span("loop", name, begin, self._clock()))
                if is_step and self._over:
                    self.end(cut=self._room <= 0)

        setattr(owner, method, timed)
        self._taken.append((owner, method))

    def _step(self, flight: Any, now: float) -> None:
        """A step of the backend has ended."""
        plan = flight.plan
        prompt = plan.tokens - plan.decodes - plan.drafted
        facts: dict[str, float] = {
            "requests": len(plan.chunks),
            "decodes": plan.decodes,
            "prompt_tokens": prompt,
            "drafted_tokens": plan.drafted,
        }
        if self._kernels is not None:
            facts.update({f"kernel_{name}": seconds for name, seconds in self._kernels().items() if seconds})
        name = "prefill" if not plan.decodes else "decode" if not prompt else "prefill and decode"
        self._add(Span("steps", name, flight.begin, now, facts))
        self._left -= 1
        if self._bounded and self._left <= 0:
            self._over = True

    def _add(self, span: Span) -> None:
        if not self._open:
            return
        self._spans.append(span)
        self._room -= 1
        if self._room <= 0:
            self._over = True
        if len(self._spans) >= PIECE:
            self._send(Spans(self._spans))
            self._spans = []
