"""One request's state: a machine of four states, and the counters that scheduling is made of."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tailrace.backends import PAGE_SIZE
from tailrace.backends.groups import pages_for as pages_for
from tailrace.engine.protocol import FinishReason, Submit, TokenLogprob
from tailrace.kv.prefix import Node, PageChain

if TYPE_CHECKING:
    from tailrace.engine.adapters import LoadedAdapter
    from tailrace.engine.constrain import Constraint
    from tailrace.engine.lookup import Drafter
    from tailrace.engine.transfer import Load, Lookup, Offered
    from tailrace.kv.windows import Side


class State(enum.Enum):
    """Where a request stands. Only RUNNING requests hold pages, a slot and pins."""

    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}
"""Every legal transition; anything else is a bug and raises."""


class WindowTable:
    """A request's block table in one sliding group of layers. `pages` are those of its positions, 0 where it has let
    them go, which it has with the first `first`. Those after them it holds, and the `spare` ones, for positions to
    come. `sides` are what the prefix index knows of them, pinned."""

    __slots__ = ("first", "pages", "sides", "spare")

    def __init__(self, first: int, sides: Sequence[Side], spare: list[int]) -> None:
        self.first = first
        self.pages = [0] * first + [side.page for side in sides]
        self.sides: list[Side | None] = [*[None] * first, *sides]
        self.spare = spare

    @property
    def held(self) -> list[int]:
        """All pages that it holds."""
        return self.pages[self.first :] + self.spare

    @property
    def own(self) -> int:
        """Pages that it alone holds and knows of."""
        return len(self.spare) + sum(side is None for side in self.sides[self.first :])

    def let_go(self, first: int) -> tuple[list[Side], list[int]]:
        """Lets the pages before number `first` go. Returns sides that are to be unpinned, and their pages, to be
        released; those that only the request knows of are spare ones now."""
        known: list[Side] = []
        pages: list[int] = []
        for at in range(self.first, min(first, len(self.pages))):
            side = self.sides[at]
            if side is None:
                self.spare.append(self.pages[at])
            else:
                known.append(side)
                pages.append(self.pages[at])
            self.pages[at] = 0
            self.sides[at] = None
        missing = first - len(self.pages)
        if missing > 0:
            self.pages += [0] * missing
            self.sides += [None] * missing
        self.first = max(self.first, first)
        return known, pages

    def extend(self) -> None:
        """A spare page is that of the next position."""
        self.pages.append(self.spare.pop())
        self.sides.append(None)


class Request:
    """A request inside the engine.

    Three counters say everything about its progress: `computed` tokens have their KV in its pages (or will, once the
    steps planned so far have run), of the `expected` tokens that it will then have, of which the values of the first
    `len(tokens)` are known. A step computes some of the `todo = expected - computed`; the step that computes the last
    one draws the next token. Prefill, decode and recomputing after a preemption are all the same.
    """

    __slots__ = (
        "adapter",
        "ahead",
        "arrived",
        "blocked_on",
        "cached",
        "cause",
        "chain",
        "compiling",
        "computed",
        "constraint",
        "deadline",
        "drafter",
        "expected",
        "finish",
        "found",
        "hit",
        "id",
        "limit",
        "loadable",
        "loading",
        "lookup",
        "lost",
        "missed",
        "offered",
        "pages",
        "params",
        "passed",
        "path",
        "preemptions",
        "priority",
        "private",
        "prompt_len",
        "prompt_logprobs",
        "protected",
        "retry_step",
        "scoring",
        "seq",
        "slot",
        "state",
        "tables",
        "tag",
        "tenant",
        "tokens",
        "turn",
        "waited_for",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        seq: int,
        arrived: float,
        chain: PageChain | None,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.id = submit.request
        self.adapter = adapter
        self.params = submit.params
        self.tenant = submit.tenant
        self.priority = submit.priority
        self.deadline = submit.deadline
        self.seq = seq  # order of arrival
        self.arrived = arrived
        self.state = State.QUEUED
        self.finish: FinishReason | None = None
        self.tokens = array("i", submit.prompt)  # prompt and output so far
        self.prompt_len = len(submit.prompt)
        self.limit = self.prompt_len + submit.params.max_tokens  # most tokens it can ever have
        self.computed = 0
        self.expected = self.prompt_len
        self.ahead = 0  # tokens of those to be computed that the grammar has forced after the last one drawn
        self.compiling = False  # its grammar is: it is not admitted before that
        self.constraint: Constraint | None = None
        self.drafter: Drafter | None = None
        self.chain = chain  # None: neither takes from the prefix index nor gives to it
        self.pages: list[int] = []  # its block table
        self.tables: list[WindowTable] = []  # and those of the sliding groups of layers
        self.path: list[Node] = []  # the index's nodes of its first pages, pinned
        self.found: list[Node] = []  # what the index had of it when it was looked up last, while it waits
        self.private = False  # its pages after those cannot be known: equal ones are, or their digests are taken
        self.slot = -1
        self.cached = 0  # prompt tokens that the first admission found
        self.hit = 0  # tokens that the latest admission found
        self.loading: Load | None = None  # fills some of its pages; nothing of it is computed meanwhile
        self.lookup: Lookup | None = None  # what tiers below the pool have, since it last began to wait
        self.loadable = True  # no load has kept it waiting for too long, or was expected to
        self.offered: Offered | None = None  # what tiers below the pool had when that was last asked
        self.lost = 0  # tokens that it had computed when it was preempted last
        self.scoring = submit.params.prompt_logprobs >= 0  # still owes log-probabilities of the prompt
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * self.prompt_len if self.scoring else []
        self.tag = 0.0  # its place in the order between tenants
        self.passed = 0  # times that a later request was admitted before it for want of room
        self.retry_step = 0  # not looked at again before this step
        self.blocked_on = b""  # the page that another request is computing for it
        self.cause = ""  # why it waits or was last left out
        self.missed = ""  # why the admission found no more of its prompt: see `terms.Event.missed`
        self.waited_for = ""  # why it waited before it was admitted last
        self.preemptions = 0
        self.protected = False  # holds, or will get, all the pages it can ever need
        self.turn = 0  # when it was last planned: grows with every chunk

    @property
    def todo(self) -> int:
        """Tokens that the next step could compute; 0 when the last token that it may have is already on its way, and
        while pages are loaded."""
        return self.expected - self.computed if self.expected < self.limit and self.loading is None else 0

    @property
    def decoding(self) -> bool:
        """It needs one token computed to draw the next one, besides those that were forced, and has drawn before."""
        return self.expected > self.prompt_len and self.expected - self.computed == 1 + self.ahead

    @property
    def generated(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - self.prompt_len

    def move(self, state: State) -> None:
        """Goes to another state; ValueError where the table does not have it."""
        if state not in LEGAL[self.state]:
            raise ValueError(f"request {self.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def extend_chain(self) -> None:
        """Identifies the full pages of all known tokens."""
        chain = self.chain
        if chain is not None:
            begin = len(chain) * PAGE_SIZE
            if len(self.tokens) - begin >= PAGE_SIZE:
                chain.extend(self.tokens[begin:].tobytes())
