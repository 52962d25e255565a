"""When a request's text reaches one of its stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.engine.protocol import SamplingParams

if TYPE_CHECKING:
    from tailrace.text.tokens import TokenBytes


class StopWatch:
    """Matches stop strings over a request's output tokens, one at a time. The text of the first `min_tokens` tokens
    cannot be part of a match. The API process cuts the text with a watch over the same tokens, so both agree."""

    def __init__(self, token_bytes: TokenBytes, params: SamplingParams) -> None:
        from tailrace.text.detokenize import Detokenizer
        from tailrace.text.stop import StopMatcher

        self._detokenizer = Detokenizer(token_bytes, start=not params.continues, shown=params.shown)
        self._matcher = StopMatcher(params.stop, params.include_stop)
        self._free = params.min_tokens

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that is safe to show after this token, and the stop string that it completed."""
        text = self._detokenizer.push(token)
        if self._free > 0:
            self._free -= 1
            return text, None
        return self._matcher.push(text)

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, when no more tokens come; half a character may complete a stop string here."""
        text, stop = self._matcher.push(self._detokenizer.finish())
        return (text, stop) if stop is not None else (text + self._matcher.flush(), None)
