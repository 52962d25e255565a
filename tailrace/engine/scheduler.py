"""Which requests compute how many tokens in the next step, on which pages. Pure: state and the time in, plan out.

The policy, in the order in which a step's `step_tokens` are given out:

1. **Decodes**: every running request that needs one token gets it, with the tokens that its grammar has forced after
   it, as far as the step has room; where few decode, tokens that are likely to follow are computed along
   (`engine.lookup`). Only where prompts wait and decodes alone would fill more than `decode_share` of the step do they
   take turns, least recently served first.
2. **Admission** of waiting requests, in the order (priority raised by age, preempted first, tenants' fair order,
   arrival). A request that does not fit is passed over; see `_admit` for how it still gets its turn. All pages of the
   tokens known at admission are handed out at once, so only decodes ever grow.
3. **Prompts** share the rest: the oldest is sure of `oldest_share`, then the shortest remaining first, better priority
   before. So a short prompt does not wait for a long one, and a long one always goes on.

A decode that needs a page when none is free or evictable preempts the most junior unprotected request, if that is
junior to it (seniority: protected, then priority, then arrival); else it stalls, keeping its pages, until a senior one
ends. The most senior unprotected request can preempt every other; protected ones hold all that they can ever need. So
some running request can always go on, and nobody is preempted more than `max_preemptions` times.

A waiting request whose next page a running one is about to compute waits for it (cause "prefix"); pages count as known
from the launch of the step that computes them, since steps run in order. What the running one leaves uncomputed when it
ends or is preempted is free for the next to compute.

Where tiers below the pool (`kv.tiers`) have pages beyond those that the index knows, a request may be admitted to
load them (`offer` decides): it runs, holding all its pages, but computes nothing until they are there. Where a tier has
to be asked first, it waits for the answer (cause "kv_lookup"), for a time that `offer` bounds. A preempted request's
pages stay known until their room is needed, and `spilled` names them, so that the caller can see to it that tiers have
them by then; what it comes back with, `resumed` counts.

Where layers have windows, each of their groups has a pool of its own (`kv.windows`). At admission a request gets as
many pages there as its known tokens need at a time: its window and a step's. As it moves on it lets those go that no
later token sees, and takes as many anew; where others hold on to what it has let go, that may need room as a decode
does. A page is let go when the step after the last one that reads it is planned: whoever gets it writes it in that step
or later.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from tailrace.backends import PAGE_SIZE, Pages
from tailrace.backends.groups import first_page, most_pages
from tailrace.engine.adapters import LoadedAdapter
from tailrace.engine.config import EngineConfig
from tailrace.engine.fairness import FairOrder
from tailrace.engine.lookup import Drafter
from tailrace.engine.plan import Chunk, Plan
from tailrace.engine.protocol import Submit
from tailrace.engine.request import Request, State, WindowTable, pages_for
from tailrace.engine.transfer import NOTHING, Load, Offered
from tailrace.kv.pages import PagePool
from tailrace.kv.prefix import Digest, Node, PageChain, PrefixIndex, page_digest, root_digest
from tailrace.kv.retention import Policy, make_policy
from tailrace.kv.tiers import key_at
from tailrace.kv.windows import Side, WindowIndex

LOOK_UP_PAGES = 4096
"""Pages that one plan looks up in the prefix index for waiting requests, before it leaves the rest to the next plan."""
MOST_FORCED = 64
"""Most tokens of a request that one step computes beside the one that was drawn, where a grammar has forced them."""
LONGEST_RETRY = 16
"""Most steps for which a request that did not fit is not looked at again."""

Offer = Callable[[Request, int, int], Offered | None]
"""Which of a request's pages first .. limit-1, in a row from `first`, are better loaded than computed; None where the
request has to wait until that is known."""


@dataclass(slots=True)
class Resumed:
    """Tokens that preempted requests had computed, by where they came from when those were admitted again."""

    ram: int = 0
    tier: int = 0
    computed: int = 0  # computed again, or about to be


def seniority(request: Request) -> tuple[bool, int, int]:
    """Sorts the most senior first."""
    return (not request.protected, request.priority, request.seq)


def _can_draft(chunk: Chunk) -> bool:
    drafter = chunk.request.drafter
    return drafter is not None and drafter.ready and len(chunk.request.tokens) == chunk.end


def _policy(config: EngineConfig) -> Policy:
    return make_policy(config.kv_policy, page_tokens=PAGE_SIZE, ttl=config.kv_ttl, parity=config.attention_parity)


def _first_after(window: int, pages: int) -> int:
    """The first page that a sequence needs in layers with this window when it goes on after so many."""
    return first_page(window, pages * PAGE_SIZE)


class Scheduler:
    """Waiting and running requests, their pages, and the plan of each step.

    The caller's loop: `plan` (as often as it likes until launch), `launch`, run the step, then `Request.tokens.append`
    for what was drawn and `finish` for what ended; `withdraw` where the step failed.
    """

    def __init__(self, config: EngineConfig, *, identity: bytes = b"", digest: Digest = page_digest) -> None:
        self.config = config
        self.pool = PagePool(config.pages)
        self.windows = [
            WindowIndex(
                PagePool(pages),
                partial(_first_after, window),
                _policy(config),
                number=number,
                share=config.kv_tenant_share,
                keep_pages=pinned,
            )
            for number, (window, pages, pinned) in enumerate(
                zip(config.windows, config.sliding_pages, config.pinned_sliding_pages, strict=True)
            )
        ]
        self.index = PrefixIndex(
            self.pool,
            _policy(config),
            share=config.kv_tenant_share,
            keep=config.pinned_prefixes,
            keep_pages=config.pinned_pages,
            windows=self.windows,
        )
        self.waiting: dict[str, Request] = {}
        self.running: list[Request] = []  # most senior first
        self.preempted: list[tuple[Request, str]] = []  # since the caller last took them, with the cause
        self.spilled: list[tuple[Node, int]] = []  # what those of them had computed, with its page; likewise
        self.resumed = Resumed()
        self.offer: Offer = lambda _request, _first, _limit: NOTHING
        self.awaiting = False  # the latest plan left out a request that waits for what `offer` will say
        self.loads: list[Load] = []  # that hold pages
        self.unbegun: list[Load] = []  # of those: to be begun once no step runs that their pages may be left over from
        self.preemptions = 0
        self.prefix_loads: dict[int, int] = {}  # prompt tokens found below the pool, by number of the tier
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._identity = identity
        self._digest = digest
        self._fair = FairOrder(config.tenant_weights)
        self._slots = list(range(config.max_running - 1, -1, -1))
        self._computing: dict[bytes, Request] = {}  # full pages that running requests have yet to launch
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrivals = 0
        self._number = 0
        self._looked_up = 0
        self._launched: Plan | None = None  # the step that runs, or ran last
        self._claim: Request | None = None
        self._behind_claim: set[str] = set()  # admitted since the claim was made

    # --- requests come and go

    def take(
        self, submit: Submit, now: float, adapter: LoadedAdapter | None = None, chain: PageChain | None = None
    ) -> Request:
        """Puts a checked request into the waiting queue. `chain`: its own (`chain`), where the caller has looked it
        up."""
        chain = chain if chain is not None else self.chain(submit, adapter)
        self._arrivals += 1
        request = Request(submit, seq=self._arrivals, arrived=now, chain=chain, adapter=adapter)
        request.protected = self.config.max_preemptions == 0
        if self.config.draft_tokens and submit.params.guessable:
            request.drafter = Drafter(request.tokens, submit.params.predicted)
        request.tag = self._fair.tag(request.tenant, request.limit)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.seq, request))
        self.waiting[request.id] = request
        return request

    def chain(self, submit: Submit, adapter: LoadedAdapter | None = None) -> PageChain | None:
        """What identifies the pages of a request, none of them as yet; None where it has no part in the prefix index.
        Equal in all engines of one identity."""
        if not self.config.prefix_cache:
            return None
        keys = {"tenant": submit.tenant.encode(), "model": self._identity}
        if adapter is not None:
            keys["adapter"] = adapter.digest
        return PageChain(root_digest(keys), PAGE_SIZE, self._digest, adapter.id if adapter is not None else None)

    def overdue(self, now: float) -> list[Request]:
        """Requests whose deadline has passed and that have not ended; each is returned once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is not State.FINISHED:
                late.append(request)
        return late

    def finish(self, request: Request, plan: Plan | None) -> None:
        """Ends a request in any state: its pages are free now, and it is out of the plan that was to come next."""
        if plan is not None:
            plan.drop(request)
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            del self.waiting[request.id]
        if self._claim is request:
            self._claim = None
        self._fair.give_back(request.tenant, max(0, request.limit - len(request.tokens)))
        request.move(State.FINISHED)

    # --- planning

    def plan(self, now: float, plan: Plan | None = None) -> Plan:
        """The next step, as if every running request went on. Given a plan that has not been launched, brings it up to
        date: its decodes stay, prompts and admissions are shared out anew."""
        self.index.advance(now)
        self.awaiting = False
        if plan is None:
            self._number += 1
            plan = Plan(self._number)
        else:
            plan.retract_prefills()
        self._decode(plan)
        self._draft(plan)
        room = self._prompt_room(plan)
        if self.waiting:
            self._admit(plan, now, room)
        self._prefill(plan, room)
        return plan

    def _prompt_room(self, plan: Plan) -> int:
        room = self.config.step_tokens - plan.tokens
        if plan.decodes and self.config.prefill_beside_decodes:
            room = min(room, self.config.prefill_beside_decodes)
        return room

    def _decode(self, plan: Plan) -> None:
        """One token for each decoding request, most senior first."""
        planned, sliding = plan.chunks, bool(self.windows)
        decodes = [
            r  # r.decoding and r.todo, spelled out since it is asked of every request in every step
            for r in self.running
            if r.expected - r.computed == 1 + r.ahead and r.prompt_len < r.expected < r.limit and r.id not in planned
        ]
        step = most = self.config.step_tokens
        if len(decodes) + plan.decodes > self.config.decode_share * step:
            if self.waiting or any(r.todo and not r.decoding for r in self.running):
                most = max(1, min(int(self.config.decode_share * step), step - 1))
            if len(decodes) + plan.decodes > most:
                for request in decodes:
                    request.cause = "budget"
                decodes.sort(key=lambda r: r.turn)
        behind = len(decodes)
        for request in decodes:
            if plan.decodes >= most or plan.tokens >= step:
                break
            behind -= 1
            if request.state is not State.RUNNING:
                continue
            count = 1
            if request.ahead:
                count = self._forced(request, step - plan.tokens - min(behind, most - plan.decodes - 1), plan)
            elif request.computed >= len(request.pages) * PAGE_SIZE:
                count = int(self._grow(request, plan))
            if sliding:
                count = self._covered(request, count, plan)
            if count > 0:
                plan.add(request, count, decode=True)

    def _draft(self, plan: Plan) -> None:
        """Adds what is likely to follow to decodes whose token is known, as far as there is room: no request gives
        way to a guess, so half of what is left of the step is left for prompts and late decodes."""
        config = self.config
        rows = min(config.draft_rows - plan.decodes - plan.drafted, (config.step_tokens - plan.tokens) // 2)
        if not config.draft_tokens or rows < 1:
            return
        ready = [c for c in plan.chunks.values() if c.decode and not c.draft and _can_draft(c)]
        for left, chunk in zip(range(len(ready), 0, -1), ready, strict=True):
            request, end = chunk.request, chunk.end
            count = min(-(-rows // left), config.draft_tokens, request.limit - end - 1, self._vacant(request, end))
            if count > 0 and request.drafter is not None:
                tokens = request.drafter.draft(count)
                plan.draft(chunk, tokens)
                rows -= len(tokens)

    def _vacant(self, request: Request, end: int) -> int:
        """Positions from `end` on that its pages have room for, with one more page if it can be had."""
        wanted = min(end + self.config.draft_tokens, request.limit - 1)
        if not request.tables and wanted > len(request.pages) * PAGE_SIZE and self._make_room(1):
            request.pages += self.pool.take(1)
        return min(len(table) for table in (request.pages, *(t.pages for t in request.tables))) * PAGE_SIZE - end

    def accept(self, request: Request, count: int, plan: Plan) -> None:
        """So many tokens of its draft in a step that has ended were those that were drawn."""
        request.computed += count
        request.expected += count
        if self.config.prefix_cache and request.computed // PAGE_SIZE > len(request.path):
            self._publish(request, request.computed // PAGE_SIZE, plan.inserted, plan.sides)

    def _forced(self, request: Request, room: int, plan: Plan) -> int:
        """How many tokens a request computes in this step whose next ones are forced: as many as there is room for."""
        count = max(1, min(1 + request.ahead, MOST_FORCED, room))
        return self._hold(request, count, plan)

    def _hold(self, request: Request, count: int, plan: Plan) -> int:
        """Gets the pages of its next `count` tokens, as far as they can be had. Returns how many tokens they hold."""
        while len(request.pages) * PAGE_SIZE < request.computed + count and self._grow(request, plan):
            pass
        return min(count, len(request.pages) * PAGE_SIZE - request.computed)

    def _grow(self, request: Request, plan: Plan) -> bool:
        """One more page for a decode, by preempting juniors if need be. False: it stalls."""
        while not self._make_room(1):
            if not (self.windows and self._replace_followed(request)) and not self._give_way(request, plan):
                return False
        request.pages += self.pool.take(1)
        return True

    def _give_way(self, request: Request, plan: Plan) -> bool:
        """Somebody loses pages, so that a request may have another. False where it is the most junior: it stalls."""
        victim = self.running[-1]  # the most junior: never a protected one, since those never grow
        if victim is request:
            request.cause = "pages"
            return False
        self.preempt(victim, plan, "pages")
        return True

    def _replace_followed(self, request: Request) -> bool:
        """Known pages that a request only follows, having computed equal ones (`_publish`), give way to these where no
        other request holds them, and where no step that may still fail was to write the equal one. False where there
        are none."""
        chunk = self._launched.chunks.get(request.id) if self._launched is not None else None
        written = (chunk.begin if chunk is not None else request.computed) // PAGE_SIZE
        done = False
        for node, page in zip(request.path[:written], request.pages, strict=False):
            if node.page != page and node.pins - node.kept == 1:
                self.index.replace(node, page)
                done = True
        return done

    def _slide(self, request: Request, count: int, plan: Plan) -> bool:
        """Moves a request's windows on to its next token, lets go what no later one sees, and sees to it that there are
        pages for `count` more, by preempting juniors if need be. False: it stalls."""
        begin, span = request.computed, self.config.step_tokens
        if request.decoding:
            span = 1 if request.constraint is None else min(MOST_FORCED, span)
        known = request.limit - 1 if request.protected else request.expected
        for window, table, size in zip(self.windows, request.tables, self.config.windows, strict=True):
            first = first_page(size, begin)
            if first > table.first:
                sides, pages = table.let_go(first)
                window.unpin(sides)
                window.pool.release(pages)
                held = table.own if request.protected else len(table.pages) - first + len(table.spare)
                surplus = held - min(pages_for(known) - first, most_pages(size, known, span))
                if surplus > 0:
                    window.pool.release(table.spare[:surplus])
                    del table.spare[:surplus]
            while len(table.pages) < pages_for(begin + count):
                if not table.spare:
                    while not window.make_room(1):
                        if not self._give_way(request, plan):
                            return False
                    table.spare += window.pool.take(1)
                table.extend()
        return True

    def _make_room(self, count: int) -> bool:
        """Evicts so that `count` pages are free; False, and nothing evicted, where that cannot be."""
        short = count - self.pool.free
        if short > self.index.evictable:
            return False
        if short > 0:
            self.index.evict(short)
        return True

    def _prefill(self, plan: Plan, room: int) -> None:
        """Shares out what is left among the prompts, after the token of each that was admitted with but one to compute:
        a preempted one whose pages are all still known."""
        for request in list(plan.admitted):
            if room > 0 and request.id not in plan.chunks and request.decoding and request.todo:
                if self.windows and not (request.state is State.RUNNING and self._slide(request, 1, plan)):
                    continue
                plan.add(request, 1, decode=True)
                room -= 1
        if plan.decodes == len(self.running):
            return
        prompts = [r for r in self.running if r.todo and not r.decoding]
        grants: dict[str, int] = {}
        scored = self.config.scored_rows

        def grant(request: Request, most: int) -> None:
            nonlocal room, scored
            count = min(request.todo - grants.get(request.id, 0), most, room)
            if request.scoring:
                count = min(count, scored)
                scored -= count
            grants[request.id] = grants.get(request.id, 0) + count
            room -= count

        if len(prompts) > 1:
            grant(min(prompts, key=lambda r: r.seq), max(1, int(room * self.config.oldest_share)))
            prompts.sort(key=lambda r: (r.priority, r.todo, r.seq))
        for request in prompts:
            if request.state is not State.RUNNING:
                continue  # preempted for one before it
            grant(request, room)
            count = grants[request.id]
            if count <= 0:
                request.cause = "budget"
                continue
            if request.computed + count > len(request.pages) * PAGE_SIZE:  # forced tokens came after it was admitted
                count = self._hold(request, count, plan)
            if self.windows:
                count = self._covered(request, count, plan)
            if count > 0:
                plan.add(request, count, decode=False)

    def extend(self, request: Request, count: int, plan: Plan | None) -> None:
        """`count` tokens are known that follow the one which was drawn last: what is computed next begins with that one
        and them, and draws the token after. `plan`: the one that is to be launched next, where there is one."""
        if plan is not None:
            plan.retract(request)
        ahead = request.decoding
        request.expected += count
        if ahead:
            request.ahead += count

    def _covered(self, request: Request, count: int, plan: Plan) -> int:
        """How many of the `count` tokens that a request is to compute it can compute in the pages of its windows."""
        if count <= 0 or self._slide(request, count, plan):
            return count
        return max(0, min(len(table.pages) for table in request.tables) * PAGE_SIZE - request.computed)

    # --- admission

    def _order(self, request: Request, now: float) -> tuple[bool, int, bool, float, int]:
        """Sorts the waiting request that is to be considered first to the front."""
        level = request.priority - int((now - request.arrived) / self.config.age_seconds)
        return (request is not self._claim, level, request.state is not State.PREEMPTED, request.tag, request.seq)

    def _admit(self, plan: Plan, now: float, room: int) -> None:
        """Admits waiting requests that would compute something in this step and whose pages can be had.

        One that does not fit is passed over, and looked at again after a few steps. When later ones have passed it
        `max_passed` times it no longer waits for shorter prompts; and if it lacks pages, it makes the claim: it is
        looked at first, and others are admitted only if all that they could ever hold fits beside it. So what was
        running drains, nothing that comes after can be in its way, and the pool does not idle meanwhile.
        """
        if room < 1 or not self._slots:
            for request in self.waiting.values():
                request.cause = "slots" if room >= 1 else "budget"
            return
        remaining = [r.todo for r in self.running if r.todo and not r.decoding]
        skipped: list[Request] = []
        self._looked_up = 0
        for request in sorted(self.waiting.values(), key=lambda r: self._order(r, now)):
            if not self._slots:
                request.cause = "slots"
                break
            if request.blocked_on in self._computing:
                continue
            if request.compiling:
                request.cause = "grammar"
                continue
            must = not self.running
            if request.retry_step > plan.number and not must and request is not self._claim:
                skipped.append(request)
                continue
            if self._looked_up > LOOK_UP_PAGES:
                break
            cause = self._try(request, remaining, room)
            if not cause:
                plan.admitted.append(request)
                remaining.append(request.todo)
                for other in skipped:
                    other.passed += 1
                continue
            request.cause = cause
            if cause == "kv_lookup":
                self.awaiting = True
            elif cause != "prefix":
                skipped.append(request)
            if cause == "pages":
                request.retry_step = plan.number + min(LONGEST_RETRY, 1 << min(request.passed, 8))
                if request.passed >= self.config.max_passed and self._claim is None:
                    self._claim = request
                    self._behind_claim.clear()

    def _try(self, request: Request, remaining: list[int], room: int) -> str:
        """Admits one waiting request, or says why it has to wait."""
        request.extend_chain()
        chain = request.chain
        hits: list[Node] = []
        offered = NOTHING
        if chain is not None and not request.scoring:
            limit = min((request.expected - 1) // PAGE_SIZE, len(chain))
            hits = request.found = self.index.match(chain, limit, request.found)
            self._looked_up += len(hits)
            if len(hits) < limit and chain.digests[len(hits)] in self._computing:
                request.blocked_on = chain.digests[len(hits)]
                return "prefix"
            if len(hits) < limit and request.loadable and not (self.windows and request.protected):
                told = self.offer(request, len(hits), limit)
                if told is None:
                    return "kv_lookup"
                offered = request.offered = told
                request.loadable = told.why != "slower"
        todo = request.expected - (len(hits) + offered.pages) * PAGE_SIZE
        ahead = sum(left for left in remaining if left <= todo)
        if ahead >= room * (1.0 - self.config.oldest_share) and remaining and request.passed < self.config.max_passed:
            return "budget"
        after = len(hits) + offered.pages
        if not self._fits(request, hits, after):
            if not (self.windows and request.protected and hits and self._fits(request, [], 0)):
                return "pages"
            hits, after = [], 0  # nobody else may hold a page of its windows: it has to go on whatever they do
        self._enter(request, hits, after)
        if request.preemptions:
            self.resumed.ram += min(request.hit, request.lost)
            self.resumed.computed += max(0, request.lost - request.hit - offered.pages * PAGE_SIZE)
        if offered.pages:
            self._load(request, offered)
        return ""

    def _fits(self, request: Request, hits: list[Node], after: int) -> bool:
        """Whether the pages can be had of a request that computes what comes after so many, with one in hand for each
        running request that may grow, beside the claim."""
        unpinned = 0
        for node in reversed(hits):
            if node.pins:
                break
            unpinned += 1
        claim = self._claim
        spare = sum(not r.protected for r in self.running) if request is not claim else 0
        available = self.pool.free + self.index.evictable - unpinned - spare
        if self._pages_wanted(request) - len(hits) > available:
            return False
        for window, size in zip(self.windows, self.config.windows, strict=True):
            sides = window.of(hits, after)
            available = window.pool.free + window.evictable - sum(not side.pins for side in sides) - spare
            if self._sliding_wanted(request, size, after, len(sides)) > available:
                return False
        if claim is None or claim is request:
            return True
        beside = [claim, request, *(r for r in self.running if r.id in self._behind_claim)]
        if sum(pages_for(r.limit) for r in beside) > self.pool.size - self.config.pinned_pages:
            return False
        pinned, step = self.config.pinned_sliding_pages, self.config.step_tokens
        return all(
            sum(most_pages(size, r.limit, step) for r in beside) <= window.pool.size - kept
            for window, size, kept in zip(self.windows, self.config.windows, pinned, strict=True)
        )

    def _sliding_wanted(self, request: Request, window: int, after: int, shared: int) -> int:
        """Pages that a request takes in a sliding group when it enters to compute what comes after so many, of which
        it holds `shared` there: as many as its known tokens need at a time; all that it can ever need at a time where
        it is protected, whatever becomes of the shared ones."""
        step = self.config.step_tokens
        if request.protected:
            return min(pages_for(request.limit - 1) - after, most_pages(window, request.limit, step))
        first = first_page(window, after * PAGE_SIZE)
        return max(0, min(pages_for(request.expected) - first, most_pages(window, request.expected, step)) - shared)

    def _pages_wanted(self, request: Request) -> int:
        """Pages of the tokens known; all that it can ever need where it is protected."""
        return pages_for(request.limit - 1 if request.protected else request.expected)

    def _enter(self, request: Request, hits: list[Node], after: int) -> None:
        """A waiting request gets its pages, its pins and its slot, and runs. It computes what comes after so many
        pages: those beyond the hits will be loaded."""
        self.index.pin(hits)
        request.path, request.found = hits, []
        request.pages = [node.page for node in hits]
        self.pool.share(request.pages)
        new = self._pages_wanted(request) - len(hits)
        if not self._make_room(new):
            raise AssertionError("admitted without room")
        request.pages += self.pool.take(new)
        self._open_windows(request, hits, after)
        request.computed = request.hit = len(hits) * PAGE_SIZE
        request.waited_for = request.cause
        if request.chain is not None:
            if not request.preemptions:
                request.cached = min(request.computed, request.prompt_len)
                self.prefix_hits += request.cached
                self.prefix_queries += request.prompt_len
                request.missed = self._missed(request, request.chain, after)
            # known, but not to be used
            request.private = not self.windows and not hits and bool(self.index.match(request.chain, 1))
            alone = request.private or (request.protected and bool(self.windows))  # of no use to those that wait
            for digest in request.chain.digests[len(hits) :] if not alone else ():
                self._computing[digest] = request
        request.slot = self._slots.pop()
        del self.waiting[request.id]
        request.move(State.RUNNING)
        insort(self.running, request, key=seniority)
        self._fair.admitted(request.tag)
        request.blocked_on = b""
        request.retry_step = request.passed = 0
        if self._claim is request:
            self._claim = None
        elif self._claim is not None:
            self._behind_claim.add(request.id)

    def _missed(self, request: Request, chain: PageChain, after: int) -> str:
        """Why no more than so many pages of its prompt need no computing."""
        if after >= min((request.prompt_len - 1) // PAGE_SIZE, len(chain)):
            return ""
        return "scoring" if request.scoring else self.index.why_absent(chain.digests[after]) or "new"

    def _open_windows(self, request: Request, hits: list[Node], after: int) -> None:
        """Its pages in the sliding groups: those of the hits that it goes on to see, those that will be loaded, and as
        many more as it needs."""
        request.tables = []
        for window, size in zip(self.windows, self.config.windows, strict=True):
            sides = window.of(hits, after)
            window.pin(sides)
            window.pool.share([side.page for side in sides])
            new = self._sliding_wanted(request, size, after, len(sides))
            if not window.make_room(new):
                raise AssertionError("admitted without room")
            table = WindowTable(first_page(size, after * PAGE_SIZE), sides, window.pool.take(new))
            while len(table.pages) < after:
                table.extend()
            request.tables.append(table)

    def _close_windows(self, request: Request) -> None:
        for window, table in zip(self.windows, request.tables, strict=True):
            held = table.held
            window.unpin([side for side in table.sides if side is not None])
            window.pool.release(held)
        request.tables = []

    # --- loading

    def _load(self, request: Request, offered: Offered) -> None:
        """The pages after those that the index knew are to be loaded before anything is computed."""
        chain, first, count = request.chain, len(request.path), offered.pages
        assert chain is not None
        end = first + count
        pages: list[Pages] = list(request.pages[first:end])
        if request.tables:  # what their windows do not reach back to is left out
            sliding = [
                [-1 if at < table.first else table.pages[at] for at in range(first, end)] for table in request.tables
            ]
            pages = list(zip(request.pages[first:end], *sliding, strict=True))
        load = Load(
            request,
            first,
            pages,
            [key_at(chain, at) for at in range(first, end)],
            offered.loading,
            offered.split,
            computing=offered.computing,
            tiers=offered.tiers,
        )
        for pool, held in zip(self._pools, self._held_by(load), strict=True):
            pool.share(held)
        self.loads.append(load)
        self.unbegun.append(load)
        request.loading = load

    def loaded(self, load: Load) -> int:
        """A load has ended: what it has filled is known from now, and its request computes the rest. Returns the tokens
        that the request need not compute; 0 too where it has not waited for it."""
        self._let_go(load)
        request = load.request
        if request.loading is not load:
            return 0
        request.loading = None
        if request.tables and load.done < len(load.pages):  # it has no windows but at the end of what was to come
            self.give_up(request)
            return 0
        tokens = load.done * PAGE_SIZE
        request.computed += tokens
        request.hit += tokens
        if not request.preemptions:
            count = min(request.computed, request.prompt_len) - request.cached
            request.cached += count
            self.prefix_hits += count
            for tier, pages in load.filled:
                found = min(count, pages * PAGE_SIZE)
                self.prefix_loads[tier] = self.prefix_loads.get(tier, 0) + found
                count -= found
        else:
            self.resumed.tier += tokens
            self.resumed.computed += len(load.pages) * PAGE_SIZE - tokens
        self._publish(request, load.first + load.done, [], [])
        return tokens

    def give_up(self, request: Request) -> None:
        """Its load takes too long: the request waits to be admitted again, and computes everything."""
        request.loadable, request.offered = False, Offered(why="late")
        if request.preemptions and request.loading is not None:
            self.resumed.computed += len(request.loading.pages) * PAGE_SIZE
        request.lost = 0
        self._wait_again(request, "kv_load")
        self.preempted.append((request, "kv_load"))

    def _let_go(self, load: Load) -> None:
        self.loads.remove(load)
        for pool, held in zip(self._pools, self._held_by(load), strict=True):
            pool.release(held)

    @property
    def _pools(self) -> list[PagePool]:
        """That of full attention, and those of the sliding groups."""
        return [self.pool, *(window.pool for window in self.windows)]

    def _held_by(self, load: Load) -> list[list[int]]:
        """A load's pages in each pool."""
        rows = [(page,) if isinstance(page, int) else page for page in load.pages]
        return [[row[at] for row in rows if row[at] >= 0] for at in range(len(self._pools))]

    # --- leaving

    def preempt(self, request: Request, plan: Plan | None, cause: str) -> None:
        """A running request loses its pages, keeps its output, and waits to be admitted again. If the plan was to be
        its first step, it has only not been admitted."""
        unseen = plan is not None and plan.drop(request)
        request.lost = request.computed
        if cause != "error" and not self.windows:  # a page of theirs is of no use without those of the windows
            self.spilled += [(node, node.page) for node in request.path]
        self._wait_again(request, cause)
        if not unseen:
            request.loadable, request.offered = True, None
            request.preemptions += 1
            request.protected = request.preemptions >= self.config.max_preemptions
            self.preemptions += 1
            self.preempted.append((request, cause))

    def _wait_again(self, request: Request, cause: str) -> None:
        self._leave(request)
        request.lookup = None
        request.computed = request.ahead = 0
        request.move(State.PREEMPTED)
        self.waiting[request.id] = request
        request.cause = cause

    def _leave(self, request: Request) -> None:
        """A running request gives back its pages, its pins and its slot. What is being loaded for it holds its pages
        until that has ended."""
        load, request.loading = request.loading, None
        if load in self.unbegun:
            self.unbegun.remove(load)
            self._let_go(load)
        elif load is not None:
            load.cancelled = True
        self.index.unpin(request.path)
        request.path = []
        self.pool.release(request.pages)
        request.pages = []
        if request.tables:
            self._close_windows(request)
        self._slots.append(request.slot)
        request.slot = -1
        self.running.remove(request)
        self._behind_claim.discard(request.id)
        self._compute_no_more(request)

    def _compute_no_more(self, request: Request) -> None:
        """Whoever waits for pages of this request has to find another way."""
        for digest in request.chain.digests if request.chain is not None else ():
            if self._computing.get(digest) is request:
                del self._computing[digest]

    # --- the step itself

    def launch(self, plan: Plan) -> None:
        """The plan is about to run, all values of its tokens are known: pages that it completes are known from now."""
        if not self.config.prefix_cache:
            return
        self._launched = plan
        for chunk in plan.chunks.values():
            request = chunk.request
            if chunk.end // PAGE_SIZE > len(request.path):
                self._publish(request, chunk.end // PAGE_SIZE, plan.inserted, plan.sides)

    # --- steps that are alike

    def steady(self, plan: Plan) -> int:
        """How many steps, from the launched `plan` on, give each running request one token and end none, however long
        they take, where nothing comes in meanwhile; 0 where that is not known. All that happens in them is that pages
        are handed out and become known."""
        config, count = self.config, len(plan.chunks)
        queued = bool(self.waiting) and (bool(self._slots) or count > config.decode_share * config.step_tokens)
        if not plan.plain or queued or self.windows or self.loads or self.preempted or self._deadlines:
            return 0
        if not 0 < count == len(self.running) < config.step_tokens:
            return 0
        for request, chunk in zip(self.running, plan.chunks.values(), strict=True):
            if chunk.request is not request or request.drafter is not None or request.constraint is not None:
                return 0
        steps = min(r.limit - len(r.tokens) for r in self.running) - 1
        wanted = sum(max(0, pages_for(r.computed + steps) - len(r.pages)) for r in self.running)
        if wanted > self.pool.free + self.index.evictable:
            return min(steps, *(len(r.pages) * PAGE_SIZE - r.computed for r in self.running))
        return steps

    def repeat(self, plan: Plan, begins: Sequence[float]) -> None:
        """The launched plan and those after it, which begin at these times, have run: at most `steady` of them. Their
        tokens are appended already. Leaves `plan` as the one that is launched then."""
        count = len(begins)
        turns: list[tuple[int, bool, int, Request]] = []  # step, launched, place in it
        for place, request in enumerate(self.running):
            computed, path = request.computed, len(request.path)
            grown = range(len(request.pages) * PAGE_SIZE - computed, count, PAGE_SIZE)
            turns += [(step, False, place, request) for step in grown]
            if self.config.prefix_cache and not request.private:
                known = range(max(0, (path + 1) * PAGE_SIZE - computed - 1), count, PAGE_SIZE)
                turns += [(step, True, place, request) for step in known]
        turns.sort(key=lambda turn: turn[:3])
        plan.number += count
        self._number += count
        plan.admitted, plan.inserted, plan.sides = [], [], []
        for step, launched, _, request in turns:
            if launched:
                last = step == count - 1
                full = (request.computed + step + 1) // PAGE_SIZE
                self._publish(request, full, plan.inserted if last else [], plan.sides)
                continue
            self.index.advance(begins[step])
            if not self._grow(request, plan):
                raise AssertionError("no page for a step that was to be like the one before it")
        for place, chunk in enumerate(plan.chunks.values()):
            request = chunk.request
            chunk.begin += count
            chunk.end += count
            request.computed += count
            request.expected += count
            request.turn = plan.number << 16 | place
        for request in self.waiting.values():
            request.cause = "slots"

    def _publish(self, request: Request, full: int, inserted: list[Node], given: list[Side]) -> None:
        """Makes the request's first `full` pages known; adds to `inserted` the nodes of those that were not, and to
        `given` the sides. Where layers have windows, a page may be known and yet have been computed again, since its
        sides were missing: then the request follows the known one, and gives it those."""
        request.extend_chain()
        chain, path = request.chain, request.path
        if chain is None or request.private:
            return
        for at in range(len(path), full):
            page = request.pages[at]
            node = self.index.insert(chain, at, path[-1] if path else None, page)
            if self._computing.get(chain.digests[at]) is request:
                del self._computing[chain.digests[at]]
            if node is not None:
                inserted.append(node)
            elif self.windows:
                node = self.index.follow(chain, at, path[-1] if path else None)
            if node is None:
                request.private = True
                self._compute_no_more(request)
                break
            path.append(node)
            if self.windows and not request.protected:
                self._give_sides(request, node, at, given)

    def _give_sides(self, request: Request, node: Node, at: int, given: list[Side]) -> None:
        """Makes the request's pages of position `at` known as the sides of a node that lacks them."""
        for window, table in zip(self.windows, request.tables, strict=True):
            if at < table.first:
                continue
            side = window.insert(node, table.pages[at])
            if side is not None:
                table.sides[at] = side
                given.append(side)

    def withdraw(self, failed: Plan, following: Plan | None) -> None:
        """The launched plan has failed and its requests have been finished: what it was to write was never written.
        Requests that were to build on that wait again."""
        if following is not None:
            for chunk in list(following.chunks.values()):
                following.retract(chunk.request)
        lost = {id(node) for node in failed.inserted}
        self.spilled = [(node, page) for node, page in self.spilled if id(node) not in lost]
        lost.update(map(id, failed.sides))
        for request in [r for r in self.running if any(id(held) in lost for held in _holdings(r))]:
            self.preempt(request, following, "error")
        for window in self.windows:
            for side in failed.sides:
                if side.alive and side.node.sides is not None and side.node.sides[window.number] is side:
                    window.drop(side)
        self.index.withdraw(failed.inserted)

    def stalled(self, plan: Plan) -> list[tuple[Request, str]]:
        """Running requests that the plan leaves out, and why."""
        if len(plan.chunks) >= len(self.running):
            return []
        return [(r, r.cause or "budget") for r in self.running if r.todo and r.id not in plan.chunks]

    def reset_prefix(self) -> int:
        """Forgets the cached pages that no request holds."""
        return self.index.reset()

    def check_integrity(self) -> None:
        """AssertionError unless pages, pins, slots and states agree. Cheap enough to run at idle."""
        tables: Iterable[list[int]] = [r.pages for r in self.running]
        loads = [self._held_by(load) for load in self.loads]
        self.pool.check_integrity([*tables, self.index.pages(), *(held[0] for held in loads)])
        self.index.check_integrity(r.path for r in self.running)
        self._check_windows()
        for request in self.running:
            assert request.state is State.RUNNING
            assert len(request.pages) * PAGE_SIZE >= request.computed
            assert self.windows or [node.page for node in request.path] == request.pages[: len(request.path)]
            assert request.loading is None or request.loading in self.loads
        for request in self.waiting.values():
            assert request.state in (State.QUEUED, State.PREEMPTED)
            assert not request.pages
            assert not request.path
            assert not request.tables
        slots = self._slots + [r.slot for r in self.running]
        assert sorted(slots) == list(range(self.config.max_running)), "a slot was lost"
        assert self.running == sorted(self.running, key=seniority)
        assert all(r.state is State.RUNNING for r in self._computing.values()), "nobody computes an awaited page"

    def _check_windows(self) -> None:
        nodes = self.index.nodes() if self.windows else []
        for at, (window, size) in enumerate(zip(self.windows, self.config.windows, strict=True)):
            tables = [r.tables[at] for r in self.running]
            loads = [self._held_by(load)[1 + at] for load in self.loads]
            window.pool.check_integrity([*(table.held for table in tables), window.pages(), *loads])
            window.check_integrity((table.sides for table in tables), nodes)
            for request, table in zip(self.running, tables, strict=True):
                load = request.loading
                goes_on = request.computed if load is None else (load.first + len(load.pages)) * PAGE_SIZE
                assert table.first <= first_page(size, goes_on), "a page was let go that is still seen"
                assert not any(table.pages[: table.first])
                assert len(table.sides) == len(table.pages)
                for page, side in zip(table.pages, table.sides, strict=True):
                    assert side is None or not side.alive or side.page == page, "a side is of another page"


def _holdings(request: Request) -> list[Node | Side]:
    """What the prefix index has that a request builds on."""
    sides = (side for table in request.tables for side in table.sides)
    return [*request.path, *(side for side in sides if side is not None)]
