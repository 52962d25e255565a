"""What one step will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.engine.request import Request
from tailrace.kv.prefix import Node
from tailrace.kv.windows import Side


@dataclass(slots=True)
class Chunk:
    """`count` tokens of one request, at positions begin .. end-1. `sample`: the next token, at position `end`, is drawn
    after the last one. `decode`: it is the token that a request has drawn last, and those that were forced after it.
    `draft`: tokens at positions `end` and on that may follow; the step draws what comes after each of them too."""

    request: Request
    begin: int
    end: int
    count: int
    sample: bool
    decode: bool
    draft: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.count + len(self.draft)

    @property
    def drawn(self) -> range:
        """Positions of the tokens that the step draws."""
        return range(self.end, self.end + 1 + len(self.draft)) if self.sample else range(0)


@dataclass(slots=True)
class Plan:
    """Chunks by request, in the order of the batch; changed freely until it is launched."""

    number: int
    chunks: dict[str, Chunk] = field(default_factory=dict)
    tokens: int = 0
    decodes: int = 0
    partial: int = 0  # decodes that do not get as far as to draw
    drafted: int = 0  # tokens that may follow those that decodes compute
    scored: int = 0  # prompt tokens whose log-probabilities are asked for
    admitted: list[Request] = field(default_factory=list)
    inserted: list[Node] = field(default_factory=list)  # in the index since launch; their content comes with this step
    sides: list[Side] = field(default_factory=list)  # likewise, of sliding groups

    @property
    def plain(self) -> bool:
        """Whether all that it does is to compute one token for each of its requests, and to draw the next."""
        return self.tokens == self.decodes and not self.partial

    def add(self, request: Request, count: int, *, decode: bool) -> None:
        """Plans the request's next `count` tokens, and moves its counters on."""
        begin = request.computed
        request.computed = end = begin + count
        sample = end == request.expected
        if sample:
            request.expected += 1
        request.turn = self.number << 16 | len(self.chunks)
        request.cause = ""
        self.chunks[request.id] = Chunk(request, begin, end, count, sample, decode)
        self.tokens += count
        if decode:
            self.decodes += 1
            request.ahead = request.expected - end - 1
            self.partial += not sample
        elif request.scoring:
            self.scored += count

    def draft(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Adds what may follow a decode's token to its chunk."""
        chunk.draft = tokens
        self.tokens += len(tokens)
        self.drafted += len(tokens)

    def retract(self, request: Request) -> None:
        """Takes the request's chunk out again, counters and all; nothing where it has none. Its pages stay."""
        chunk = self.chunks.pop(request.id, None)
        if chunk is None:
            return
        request.computed -= chunk.count
        request.expected -= chunk.sample
        self.tokens -= chunk.rows
        self.drafted -= len(chunk.draft)
        if chunk.decode:
            self.decodes -= 1
            request.ahead = request.expected - request.computed - 1
            self.partial -= not chunk.sample
        elif request.scoring:
            self.scored -= chunk.count

    def retract_prefills(self) -> None:
        """Takes back every chunk that is not a decode, so that they can be shared out anew."""
        for chunk in [chunk for chunk in self.chunks.values() if not chunk.decode]:
            self.retract(chunk.request)

    def drop(self, request: Request) -> bool:
        """The request is leaving: its chunk goes, and its admission, if this plan was to be its first step. Returns
        whether it was."""
        self.retract(request)
        if request in self.admitted:
            self.admitted.remove(request)
            return True
        return False
