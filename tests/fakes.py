"""A backend without a model, and a clock without time.

The fake's next token is a hash of the whole sequence read back through the block table, so that any mistake with pages
becomes a wrong token; `expected_tokens` says what a request must get when it runs alone.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tailrace.backends import PAGE_SIZE, Adapter, Batch, Inline, PackedAdapter, Pages, Result, Sampling
from tailrace.backends.groups import first_page
from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import Grammars
from tailrace.engine.core import EngineCore
from tailrace.engine.protocol import Output, SamplingParams, Submit, TokenLogprob, Tokens
from tailrace.engine.transfer import Transfers
from tailrace.kv.cost import MeasuredCost
from tailrace.kv.prefix import Digest, PageChain, page_digest
from tailrace.kv.tiers import PageKey, Tier, TierStats, key_at
from tailrace.terms import Event, EventKind, InvalidInput
from tailrace.text.grammar import Grammar, GrammarError

if TYPE_CHECKING:
    from tailrace.engine.publisher import Publisher
    from tailrace.kv.cost import LoadCost

FORCE = 50.0  # a logit bias above this wins


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def mix(*parts: bytes) -> int:
    """A number that depends on every byte."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def draw(
    sequence: bytes,
    *,
    vocab: int,
    temperature: float = 0.0,
    seed: int = 0,
    position: int = 0,
    penalties: bytes = b"",
    bias: dict[int, float] | None = None,
    allowed: Container[int] | None = None,
    period: int = 0,
) -> int:
    """The next token after these int32 bytes: what the parameters say matters, and nothing else. With a `period` most
    tokens are the one that came so many before."""
    parts = [sequence]
    if temperature > 0.0:
        parts.append(f"{temperature} {seed} {position}".encode())
    if penalties:
        parts.append(penalties)
    bias = bias or {}
    if bias:
        parts.append(str(sorted(bias.items())).encode())
    for token, value in sorted(bias.items()):
        if value > FORCE and (allowed is None or token in allowed):
            return token
    token = mix(*parts) % vocab
    if 0 < period <= len(sequence) // 4 and mix(*parts, b"again") % 16:
        token = int.from_bytes(sequence[-4 * period :][:4], sys.byteorder)
    while bias.get(token, 0.0) == -np.inf or (allowed is not None and token not in allowed):
        token = (token + 1) % vocab
    return token


def score(sequence: bytes, token: int) -> float:
    """Log-probability of a token after a sequence."""
    return -(mix(sequence, str(token).encode()) % 1000) / 100.0


class FakeMatcher:
    """Follows a grammar of token ids: "5 9 ? ! 3" wants 5 and 9, then one of a third of the vocabulary, then fails when
    it is asked what may follow."""

    def __init__(self, text: str, vocab: int) -> None:
        self.items = text.split()
        self.vocab = vocab
        self.words = -(-vocab // 32)
        self.at = 0

    @property
    def ended(self) -> bool:
        return self.at == len(self.items)

    def allowed(self) -> set[int]:
        """The tokens that may follow."""
        item = self.items[self.at]
        if item == "?":
            return {token for token in range(self.vocab) if (token + self.at) % 3 == 0}
        if item == "!":
            raise GrammarError("too complex")
        return {int(item)}

    def take(self, token: int) -> None:
        if self.ended or token not in self.allowed():
            raise GrammarError(f"token {token} is not in the grammar")
        self.at += 1

    def forced(self) -> list[int]:
        tokens = []
        while not self.ended and self.items[self.at].isdigit():
            tokens.append(int(self.items[self.at]))
            self.at += 1
        return tokens

    def fill(self, bits: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        for token in self.allowed():
            bits[token // 32] |= np.uint32(1 << token % 32)


class FakeCompiler:
    """Compiles grammars of `FakeMatcher`; those that begin with "bad" are wrong, with "raise" harm the compiler."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.compiled: list[Grammar] = []

    def known(self, grammar: Grammar) -> FakeMatcher | None:
        return FakeMatcher(grammar.text, self.vocab) if grammar in self.compiled else None

    def compile(self, grammar: Grammar) -> FakeMatcher:
        if grammar.text.startswith("bad"):
            raise InvalidInput("bad grammar")
        if grammar.text.startswith("raise"):
            raise OSError("the compiler fell over")
        self.compiled.append(grammar)
        return FakeMatcher(grammar.text, self.vocab)


class FakeBackend(Inline):
    """Implements `Backend`. `duration` gives a step's fake seconds, which pass on `clock`; `fail` is asked before every
    step, and what it returns is raised.

    `windows` are pairs of a window and the pages of its pool: layers that keep the same numbers as full attention does,
    in pages of their own, and have to find them there as far as their window reaches back.

    Breaking a rule of the pages raises, and is kept in `violations`, since the engine turns what a backend raises into
    failed requests.
    """

    name = "fake"
    kernels = "python"
    batch_invariant = True
    weight_bytes = 0
    kv_bytes = 0

    def __init__(
        self,
        pages: int,
        vocab: int = 512,
        *,
        clock: FakeClock | None = None,
        duration: Callable[[Batch], float] | None = None,
        fail: Callable[[Batch], Exception | None] | None = None,
        max_wanted: int | None = None,
        windows: Sequence[tuple[int, int]] = (),
        period: int = 0,
    ) -> None:
        self.vocab = vocab
        self.period = period
        self.windows = [window for window, _ in windows]
        self.sliding = [np.full((2, count, PAGE_SIZE), -1, np.int32) for _, count in windows]  # tokens and positions
        self.tokens = np.full((pages, PAGE_SIZE), -1, np.int32)
        self.positions = np.full((pages, PAGE_SIZE), -1, np.int32)
        self.violations: list[str] = []
        self.computed = 0  # tokens, ever
        self.adapters: dict[int, PackedAdapter] = {}
        self.steps: list[tuple[int, int]] = []  # sequences and tokens of each step
        self.max_wanted = max_wanted
        self._clock = clock
        self._duration = duration
        self._fail = fail

    @property
    def work(self) -> int:  # type: ignore[override]  # `Inline` has a plain attribute
        return self.computed

    @property
    def page_bytes(self) -> int:
        return 8 * PAGE_SIZE * (1 + len(self.windows))

    numerics = "fake-1"

    def read_page(self, page: Pages, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        out = bytearray(self.page_bytes) if out is None else out
        pages = (page,) if isinstance(page, int) else page
        out[:] = b"".join(
            tokens[one].tobytes() + positions[one].tobytes()
            for one, (tokens, positions) in zip(pages, self._groups, strict=True)
        )
        return out

    def write_page(self, page: Pages, data: bytes | bytearray | memoryview) -> None:
        self._require(len(data) == self.page_bytes, "a page's data has the wrong size")
        pages = (page,) if isinstance(page, int) else page
        parts = np.frombuffer(data, np.int32).reshape(-1, 2, PAGE_SIZE)
        for one, part, (tokens, positions) in zip(pages, parts, self._groups, strict=True):
            if one >= 0:
                tokens[one], positions[one] = part

    @property
    def _groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.tokens, self.positions), *((group[0], group[1]) for group in self.sliding)]

    def pack_adapter(self, adapter: Adapter) -> Adapter:
        return adapter

    def set_adapter(self, number: int, adapter: PackedAdapter | None) -> None:
        self.adapters.pop(number, None)
        if adapter is not None:
            self.adapters[number] = adapter

    def run(self, batch: Batch) -> Result:
        if self._clock is not None and self._duration is not None:
            self._clock.advance(self._duration(batch))
        error = self._fail(batch) if self._fail is not None else None
        if error is not None:
            raise error
        self.computed += len(batch.tokens)
        self.steps.append((len(batch.context), len(batch.tokens)))
        self._check_shapes(batch)
        self._write(batch.tables[:, : self._width(batch)], batch, None, self.tokens, self.positions)
        for group, (window, (tokens, positions)) in enumerate(zip(self.windows, self.sliding, strict=True)):
            table = self._columns(batch, group + 1)
            self._write(table, batch, window, tokens, positions)
        return self._sample(batch)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)
            raise AssertionError(what)

    def _check_shapes(self, batch: Batch) -> None:
        count, wanted, sampling = len(batch.context), len(batch.wanted), batch.sampling
        self._require(count > 0, "an empty batch")
        self._require(len(batch.starts) == count + 1, "starts")
        self._require(int(batch.starts[0]) == 0 and int(batch.starts[-1]) == len(batch.tokens), "starts' ends")
        self._require(bool((np.diff(batch.starts) > 0).all()), "a sequence without tokens")
        self._require(bool((np.diff(batch.wanted) > 0).all()), "wanted rows are not ascending")
        self._require(self.max_wanted is None or wanted <= self.max_wanted, "too many wanted rows")
        for array, kind in ((batch.tokens, np.int32), (batch.starts, np.int32), (batch.context, np.int32)):
            self._require(array.dtype == kind, "dtype of the batch")
        self._require(batch.tables.dtype == np.int32 and batch.tables.flags.c_contiguous, "block tables")
        self._require(bool((batch.tokens >= 0).all() and (batch.tokens < self.vocab).all()), "token ids")
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "seed"):
            self._require(getattr(sampling, name).shape == (wanted,), name)
        for name in ("position", "forced", "logprobs"):
            self._require(getattr(sampling, name).shape == (wanted,), name)
        for start, tokens in ((sampling.seen_start, sampling.seen_token), (sampling.bias_start, sampling.bias_token)):
            self._require(start.shape == (wanted + 1,) and int(start[-1]) == len(tokens), "CSR")
        self._require(bool((sampling.bias_token < self.vocab).all()), "a bias on an id that does not exist")

    def _width(self, batch: Batch) -> int:
        return batch.tables.shape[1] // (1 + len(self.windows))

    def _columns(self, batch: Batch, group: int) -> np.ndarray:
        """A group's block tables."""
        width = self._width(batch)
        return batch.tables[:, group * width : (group + 1) * width]

    def _write(
        self, tables: np.ndarray, batch: Batch, window: int | None, tokens: np.ndarray, positions: np.ndarray
    ) -> None:
        written: dict[int, int] = {}
        read: dict[int, set[int]] = {}
        for s, begin in enumerate(batch.context.tolist()):
            fresh = batch.tokens[batch.starts[s] : batch.starts[s + 1]]
            end = begin + len(fresh)
            table = tables[s]
            self._require(-(-end // PAGE_SIZE) <= len(table), "a block table is too short")
            first = 0 if window is None else first_page(window, begin)
            self._require(not table[:first].any(), "a page that was let go is in the table")
            used = table[first : -(-end // PAGE_SIZE)].tolist()
            self._require(len(set(used)) == len(used), "a page is in one table twice")
            for page in used[begin // PAGE_SIZE - first :]:
                self._require(page not in written, f"page {page} is written by two sequences")
                written[page] = s
            for page in used:
                read.setdefault(page, set()).add(s)
            at = np.arange(begin, end)
            tokens[table[at // PAGE_SIZE], at % PAGE_SIZE] = fresh
            positions[table[at // PAGE_SIZE], at % PAGE_SIZE] = at
        for page, writer in written.items():
            self._require(read[page] == {writer}, f"page {page} is written by one sequence and read by another")

    def _read(self, batch: Batch, s: int, end: int) -> bytes:
        """The first `end` token ids of a sequence, through its block table."""
        at = np.arange(end)
        pages, slots = batch.tables[s][at // PAGE_SIZE], at % PAGE_SIZE
        self._require(bool((self.positions[pages, slots] == at).all()), "a page holds other positions than it should")
        sequence = self.tokens[pages, slots]
        for group, (window, (tokens, positions)) in enumerate(zip(self.windows, self.sliding, strict=True)):
            seen = at[first_page(window, int(batch.context[s])) * PAGE_SIZE :]
            pages, slots = self._columns(batch, group + 1)[s][seen // PAGE_SIZE], seen % PAGE_SIZE
            self._require(bool((positions[pages, slots] == seen).all()), "a window's page holds other positions")
            self._require(bool((tokens[pages, slots] == sequence[seen]).all()), "a window's page holds other tokens")
        return sequence.tobytes()

    def _sample(self, batch: Batch) -> Result:
        sampling, wanted = batch.sampling, batch.wanted.tolist()
        tokens = np.zeros(len(wanted), np.int32)
        logprobs = np.zeros(len(wanted), np.float32)
        top = max([0, *sampling.logprobs.tolist()])
        top_tokens = np.zeros((len(wanted), top), np.int32)
        top_logprobs = np.zeros((len(wanted), top), np.float32)
        for row, flat in enumerate(wanted):
            s = int(np.searchsorted(batch.starts, flat, "right")) - 1
            end = int(batch.context[s]) + flat - int(batch.starts[s]) + 1
            self._require(int(sampling.position[row]) == end, "position of a drawn token")
            sequence = self._read(batch, s, end)
            token = int(sampling.forced[row])
            if token < 0:
                token = self._draw(sampling, row, sequence, end)
            tokens[row] = token
            logprobs[row] = score(sequence, token)
            for n in range(int(sampling.logprobs[row])):
                top_tokens[row, n] = n
                top_logprobs[row, n] = score(sequence, n)
        return Result(tokens, logprobs, top_tokens, top_logprobs)

    def _draw(self, sampling: Sampling, row: int, sequence: bytes, position: int) -> int:
        a, b = int(sampling.bias_start[row]), int(sampling.bias_start[row + 1])
        bias = dict(zip(sampling.bias_token[a:b].tolist(), sampling.bias_value[a:b].tolist(), strict=True))
        self._require(len(bias) == b - a, "a token has two biases")
        a, b = int(sampling.seen_start[row]), int(sampling.seen_start[row + 1])
        seen = sorted(zip(sampling.seen_token[a:b].tolist(), sampling.seen_count[a:b].tolist(), strict=True))
        self._require(len(dict(seen)) == b - a, "a token is seen twice")
        values = (sampling.repetition[row], sampling.presence[row], sampling.frequency[row])
        neutral = values == (1.0, 0.0, 0.0)
        masks = sampling.masks
        allowed = None
        if masks is not None and masks.row[row] >= 0:
            self._require(bool(masks.ready[0]), "the masks were not released")
            bits = masks.bits[masks.row[row]]
            allowed = {token for token in range(self.vocab) if bits[token // 32] >> token % 32 & 1}
        return draw(
            sequence,
            allowed=allowed,
            vocab=self.vocab,
            temperature=float(sampling.temperature[row]),
            seed=int(sampling.seed[row]),
            position=position,
            penalties=b"" if neutral else f"{[float(v) for v in values]} {seen}".encode(),
            bias=bias,
            period=self.period,
        )


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, *, vocab: int = 512, eos_ids: Sequence[int] = (), period: int = 0
) -> list[int]:
    """What the request gets alone, computed without any engine (stop strings apart)."""
    tokens = list(prompt)
    values = [np.float32(v) for v in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)]
    neutral = values == [1.0, 0.0, 0.0]
    ends = set(params.stop_ids) | (set() if params.ignore_eos else set(eos_ids))
    matcher = FakeMatcher(params.grammar.text, vocab) if params.grammar is not None else None
    while True:
        output = tokens[len(prompt) :]
        bias = {t: float(np.float32(v)) for t, v in params.logit_bias.items() if 0 <= t < vocab}
        if len(output) < params.min_tokens:
            bias |= {t: -np.inf for t in ends if 0 <= t < vocab}
        seen = sorted((t, output.count(t)) for t in set(tokens))
        token = draw(
            np.array(tokens, np.int32).tobytes(),
            vocab=vocab,
            temperature=float(np.float32(params.temperature)),
            seed=params.seed,
            position=len(tokens),
            penalties=b"" if neutral else f"{[float(v) for v in values]} {seen}".encode(),
            bias=bias,
            allowed=matcher.allowed() if matcher is not None else None,
            period=period,
        )
        tokens.append(token)
        if matcher is not None and token not in eos_ids:
            matcher.take(token)
        if token in ends or (matcher is not None and matcher.ended) or len(output) + 1 >= params.max_tokens:
            return tokens[len(prompt) :]


class Eager(MeasuredCost):
    """Takes loading to be the quicker one whatever it is told: stand-ins compute next to nothing."""

    def compute_seconds(self, tokens: int, after: int = 0) -> float:
        return float("inf")


class MemoryTier:
    """Implements `Tier` in a dictionary. `fail` is asked before every load and store: True loses the page, what it
    raises is raised. With `asked` it knows only of pages that it has been asked for (`known`)."""

    def __init__(self, fail: Callable[[], bool] = lambda: False, *, name: str = "disk", asked: bool = False) -> None:
        self.name = name
        self.asked = asked
        self.up = True
        self.batch = 1
        self.pages: dict[PageKey, bytes] = {}
        self.known: set[bytes] = set()
        self.loads: list[PageKey] = []  # that gave something
        self.questions = 0
        self.fail = fail

    def lookup(self, chain: PageChain, first: int, limit: int) -> int:
        return next((n for n in range(limit - first) if not self._has(key_at(chain, first + n))), limit - first)

    def _has(self, key: PageKey) -> bool:
        return key in self.pages and (not self.asked or key.digest in self.known)

    def holds(self, digest: bytes) -> bool:
        return any(key.digest == digest and self._has(key) for key in self.pages)

    def ask(self, digests: Sequence[bytes]) -> None:
        self.questions += 1
        self.known.update(digests)

    def tend(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def load(self, key: PageKey) -> memoryview | None:
        if self.fail():
            self.pages.pop(key, None)
        data = self.pages.get(key)
        if data is None:
            return None
        self.loads.append(key)
        return memoryview(data)

    def prepare(self, keys: Sequence[PageKey]) -> None:
        """Nothing to do."""

    def store_all(self, pages: Sequence[tuple[PageKey, bytes | bytearray | memoryview]]) -> None:
        for key, data in pages:
            self.store(key, data)

    def store(self, key: PageKey, data: bytes | bytearray | memoryview) -> bool:
        if self.fail():
            return False
        self.pages[key] = bytes(data)
        return True

    def stats(self) -> TierStats:
        return TierStats(pages=len(self.pages), loaded=len(self.loads))


class Driver:
    """An `EngineCore` over a `FakeBackend`, stepped by hand and checked after every step (or every so many); keeps
    all the news."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab: int = 512,
        eos_ids: Sequence[int] = (),
        clock: FakeClock | None = None,
        duration: Callable[[Batch], float] | None = None,
        fail: Callable[[Batch], Exception | None] | None = None,
        token_bytes: object = None,
        digest: Digest = page_digest,
        check_every: int = 1,
        publisher: Publisher | None = None,
        tier: Tier | Sequence[Tier] | None = None,
        cost: LoadCost | None = None,
        period: int = 0,
    ) -> None:
        self._check_every = check_every
        self._steps = 0
        self.clock = clock or FakeClock()
        self.backend = FakeBackend(
            config.pages,
            vocab,
            clock=self.clock,
            duration=duration,
            fail=fail,
            max_wanted=config.max_running
            + (max(0, config.draft_rows - 1) if config.draft_tokens else 0)
            + config.scored_rows,
            windows=list(zip(config.windows, config.sliding_pages, strict=True)),
            period=period,
        )
        tiers = list(tier) if isinstance(tier, Sequence) else [tier] if tier is not None else []
        self.transfers = Transfers(tiers, self.backend, cost=cost, clock=self.clock, thread=False) if tiers else None
        self.grammars = Grammars(lambda: FakeCompiler(vocab), clock=self.clock, thread=False)
        self.core = EngineCore(
            self.backend,
            config,
            eos_ids=eos_ids,
            vocab_size=vocab,
            token_bytes=token_bytes,  # type: ignore[arg-type]  # a stand-in will do
            identity=b"fake",
            clock=self.clock,
            digest=digest,
            publisher=publisher,
            transfers=self.transfers,
            grammars=self.grammars,
        )
        self.core.settle()
        self.vocab = vocab
        self.eos_ids = tuple(eos_ids)
        self.submitted: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}  # by request: the output that ended it
        self.first: dict[str, Output] = {}  # by request: the output with its first token
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.events: list[Event] = []

    def submit(self, request: str, prompt: Sequence[int], max_tokens: int = 8, **params: object) -> None:
        """Submits; `tenant`, `priority` and `deadline` go to the message, the rest to the sampling parameters."""
        outer = {name: params.pop(name) for name in ("tenant", "priority", "deadline") if name in params}
        params.setdefault("temperature", 0.0)
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.submitted[request] = Submit(request, list(prompt), sampling, **outer)  # type: ignore[arg-type]
        self.core.submit(self.submitted[request])

    def step(self, intake: Callable[[], None] | None = None) -> Tokens | None:
        news = self.core.step(intake)
        self._steps += 1
        if self._steps % self._check_every == 0:
            self.core.check_integrity()
        assert self.backend.violations == []
        waits = self.core.scheduler.loads or self.core.scheduler.awaiting or self.grammars.waiting
        assert self.core.running_step or self.core.idle or waits, "requests are held, nothing runs"
        for output in news.outputs if news else ():
            assert output.request not in self.last, "news of a request that has ended"
            self.tokens.setdefault(output.request, []).extend(output.tokens)
            self.logprobs.setdefault(output.request, []).extend(output.logprobs)
            if output.tokens:
                self.first.setdefault(output.request, output)
            if output.finish is not None:
                self.last[output.request] = output
        self.events += news.events if news else []
        return news

    def run(self, limit: int = 10_000) -> int:
        """Steps until there is nothing left to do; returns the number of steps, AssertionError beyond `limit`."""
        for count in range(limit):
            if not self.core.has_work and not self.transfer():
                return count
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.core.gauges}")

    def transfer(self, pages: int = 1 << 30) -> bool:
        """Lets the transfers' thread move so many pages, or all; False where it had nothing to do."""
        moved = 0
        while moved < pages and self.transfers is not None and self.transfers.work():
            moved += 1
        while self.grammars.work():
            moved += 1
        return moved > 0

    def finish_of(self, request: str) -> str | None:
        """How the request ended."""
        return self.last[request].finish

    def events_of(self, request: str, kind: EventKind | None = None) -> list[Event]:
        """The request's events, of one kind or of all."""
        return [e for e in self.events if e.request == request and kind in (None, e.kind)]

    def assert_alone(self, requests: Iterable[str] | None = None) -> None:
        """Each of these (by default all that ended by themselves) got what it gets alone."""
        for request in self.last if requests is None else requests:
            if self.finish_of(request) in ("stop", "length"):
                submit = self.submitted[request]
                want = expected_tokens(
                    submit.prompt, submit.params, vocab=self.vocab, eos_ids=self.eos_ids, period=self.backend.period
                )
                assert self.tokens[request] == want, request

    def assert_at_rest(self) -> None:
        """Nothing is held: every page is free or cached."""
        gauges = self.core.gauges
        assert self.core.idle
        assert (gauges.running, gauges.waiting, gauges.used_pages) == (0, 0, 0)
        self.core.check_integrity()
