"""Plans to the arrays that a backend runs. Every request that runs has a row (its slot) in arrays that last, so that a
step of decodes is a few gathers, whatever their parameters are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Batch, Ends, Masks, Sampling
from tailrace.engine.plan import Chunk, Plan
from tailrace.engine.request import Request
from tailrace.engine.steady import Steady

Int32 = NDArray[np.int32]
STATIC = (
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("presence_penalty", np.float32),
    ("frequency_penalty", np.float32),
    ("repetition_penalty", np.float32),
    ("seed", np.uint64),
    ("logprobs", np.int32),
)
"""Sampling parameters that stay the same over a request's life, with the type that `Sampling` gives them."""
SEED_MASK = (1 << 64) - 1
NO_TOKENS = np.zeros(0, np.int32)
NO_VALUES = np.zeros(0, np.float32)


class Seen:
    """Tokens of one request's prompt and output, each once, with how often it occurs in the output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        unique = np.unique(np.asarray(tokens, np.int32))
        self._place = {int(token): at for at, token in enumerate(unique)}
        room = 2 * len(unique) + 64
        self._tokens = np.zeros(room, np.int32)
        self._tokens[: len(unique)] = unique
        self._counts = np.zeros(room, np.int32)
        self.size = len(unique)
        self.length = len(tokens)  # tokens taken in

    @property
    def tokens(self) -> Int32:
        """[size]"""
        return self._tokens[: self.size]

    @property
    def counts(self) -> Int32:
        """[size]"""
        return self._counts[: self.size]

    def add(self, outputs: Sequence[int]) -> None:
        """More output tokens."""
        for token in outputs:
            at = self._place.get(token)
            if at is None:
                at = self._place[token] = self.size
                if at == len(self._tokens):
                    self._tokens = np.concatenate([self._tokens, np.zeros(at, np.int32)])
                    self._counts = np.concatenate([self._counts, np.zeros(at, np.int32)])
                self._tokens[at] = token
                self.size += 1
            self._counts[at] += 1
        self.length += len(outputs)


class Builder(Protocol):
    """Turns launched plans into what a backend runs; a request has its place from `seat` to `forget`."""

    def seat(self, request: Request) -> None:
        """The request has been admitted."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def build(self, plan: Plan) -> Batch:
        """What computes a plan whose tokens are all known."""
        ...

    def ahead(self, plan: Plan) -> tuple[Batch, Ends] | None:
        """What computes the plan that is to follow the one that was built last, all but its tokens, and what must not
        be drawn for that; None where the backend cannot begin it by itself."""
        ...

    def follow(self) -> None:
        """The step of `ahead` runs."""
        ...


class BatchBuilder:
    """Builds each step's `Batch`, which stays as it is until two more are built: one runs, one is to follow. While
    the same requests do nothing but decode, two batches take turns (`Steady`)."""

    def __init__(
        self, *, max_running: int, max_context: int, eos_ids: tuple[int, ...], vocab_size: int, windows: int = 0
    ) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._tables = np.zeros((max_running, -(-max_context // PAGE_SIZE)), np.int32)
        self._sliding = [np.zeros_like(self._tables) for _ in range(windows)]  # those of the sliding groups
        self._cleared = [[0] * max_running for _ in range(windows)]  # pages of each row let go so far, and copied
        self._slid = [[0] * max_running for _ in range(windows)]
        self._filled = [0] * max_running  # pages of each row copied so far
        self._static: dict[str, NDArray[Any]] = {name: np.zeros(max_running, kind) for name, kind in STATIC}
        self._special = [False] * max_running  # rows with a bias, a ban or penalties
        self._constrained: set[int] = set()  # rows that have a grammar
        self._biases: dict[str, tuple[list[int], list[float]]] = {}
        self._seen: dict[str, Seen] = {}
        self._rows: list[int] | None = None  # slots of the last batch's wanted rows, and what was gathered for them
        self._gathered: dict[str, NDArray[Any]] = {}
        self._counting = np.arange(max_running + 1, dtype=np.int32)
        self._steady: Steady | None = None

    def seat(self, request: Request) -> None:
        """The request has been admitted: fills its row."""
        slot, params = request.slot, request.params
        for name, values in self._static.items():
            values[slot] = getattr(params, name) if name != "seed" else params.seed & SEED_MASK
        self._filled[slot] = 0
        for cleared, slid in zip(self._cleared, self._slid, strict=True):
            cleared[slot] = slid[slot] = 0
        self._special[slot] = bool(params.logit_bias) or params.min_tokens > 0 or params.penalised
        self._rows = None
        self._steady = None
        if request.constraint is not None:
            self._constrained.add(slot)
        else:
            self._constrained.discard(slot)
        if params.logit_bias and request.id not in self._biases:
            named = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < self._vocab_size}
            self._biases[request.id] = (list(named), list(named.values()))

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._biases.pop(request.id, None)
        self._seen.pop(request.id, None)

    def build(self, plan: Plan) -> Batch:
        """The arrays of a plan whose tokens are all known."""
        chunks = list(plan.chunks.values())
        requests = [chunk.request for chunk in chunks]
        slots = [request.slot for request in requests]
        plain = plan.plain
        steady, self._steady = self._steady, None
        if steady is not None and plain and slots == steady.slots and steady.advance(chunks) is not None:
            self._steady = steady
            steady.turn()
            return steady.batch
        width = -(-max(chunk.begin + chunk.rows for chunk in chunks) // PAGE_SIZE)
        starts = self._starts(chunks, plan)
        tokens, wanted, forced = self._flat(chunks, plan, starts)
        batch = Batch(
            tokens=tokens,
            starts=starts,
            context=np.array([chunk.begin for chunk in chunks], np.int32),
            tables=self._block_tables(requests, slots, width),
            wanted=wanted,
            sampling=self._sampling(chunks, slots, forced),
            adapters=self._adapters(requests),
        )
        if plain and not any(self._special[slot] for slot in slots):
            self._steady = Steady(batch, slots, self._ends(requests), 1 + len(self._sliding))
            return self._steady.batch
        return batch

    def ahead(self, plan: Plan) -> tuple[Batch, Ends] | None:
        """The arrays of the plan that is to follow the step that was built last, all but its tokens, and what must not
        be drawn for that. None where the next step is not one more token for the same requests, or a request may end in
        other ways. `follow` says that it has been launched."""
        steady = self._steady
        if steady is None or steady.ends is None or not plan.plain:
            return None
        chunks = list(plan.chunks.values())
        if [chunk.request.slot for chunk in chunks] != steady.slots:
            return None
        batch = steady.advance(chunks, known=False)
        return (batch, steady.ends) if batch is not None else None

    def follow(self) -> None:
        """The step of `ahead` runs."""
        assert self._steady is not None
        self._steady.turn()

    def _ends(self, requests: list[Request]) -> Ends | None:
        """None where a request has stop strings or a grammar."""
        if any(request.params.stop or request.constraint is not None for request in requests):
            return None
        ends = [[*r.params.stop_ids, *(() if r.params.ignore_eos else self._eos_ids)] for r in requests]
        start = np.cumsum([0, *map(len, ends)], dtype=np.int32)
        return Ends(start, np.array([token for row in ends for token in row], np.int32))

    def _adapters(self, requests: list[Request]) -> Int32 | None:
        """The backend's number of each one's adapter, or -1; None where none has one."""
        if all(request.adapter is None for request in requests):
            return None
        return np.array([-1 if r.adapter is None else r.adapter.number for r in requests], np.int32)

    def _starts(self, chunks: list[Chunk], plan: Plan) -> Int32:
        if plan.tokens == len(chunks):
            return self._counting[: len(chunks) + 1]
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum([chunk.rows for chunk in chunks], out=starts[1:])
        return starts

    def _flat(self, chunks: list[Chunk], plan: Plan, starts: Int32) -> tuple[Int32, Int32, list[int] | None]:
        """Token ids, wanted rows, and the tokens forced on them (None: none is)."""
        if plan.plain:
            return np.array([c.request.tokens[c.begin] for c in chunks], np.int32), self._counting[: len(chunks)], None
        flat = array("i")
        for chunk in chunks:
            flat += chunk.request.tokens[chunk.begin : chunk.end]
            flat.extend(chunk.draft)
        tokens = np.frombuffer(flat, np.int32)
        if not plan.scored:
            wanted: list[int] = []
            for chunk, end in zip(chunks, starts[1:].tolist(), strict=True):
                wanted += range(end - len(chunk.drawn), end)
            return tokens, np.array(wanted, np.int32), None
        rows: list[int] = []
        forced: list[int] = []
        for chunk, first in zip(chunks, starts.tolist(), strict=False):
            scored = range(chunk.begin, chunk.begin + scored_rows(chunk)) if scores(chunk) else range(0)
            rows += [first + position - chunk.begin for position in scored]
            forced += [chunk.request.tokens[position + 1] for position in scored]
            rows += [first + position - 1 - chunk.begin for position in chunk.drawn]
            forced += [-1] * len(chunk.drawn)
        return tokens, np.array(rows, np.int32), forced

    def _block_tables(self, requests: list[Request], slots: list[int], width: int) -> Int32:
        tables, filled = self._tables, self._filled
        for request, slot in zip(requests, slots, strict=True):
            have, pages = filled[slot], request.pages
            if have != len(pages):
                tables[slot, have : len(pages)] = pages[have:]
                filled[slot] = len(pages)
        if self._sliding:
            self._fill_sliding(requests, slots)
            return np.concatenate([group[slots, :width] for group in (tables, *self._sliding)], axis=1)
        return np.ascontiguousarray(tables[slots, :width])

    def _fill_sliding(self, requests: list[Request], slots: list[int]) -> None:
        """Copies the pages that requests have got, and clears those that they have let go."""
        for at, (tables, cleared, slid) in enumerate(zip(self._sliding, self._cleared, self._slid, strict=True)):
            for request, slot in zip(requests, slots, strict=True):
                table = request.tables[at]
                have, pages, first = slid[slot], table.pages, table.first
                if have != len(pages):
                    tables[slot, have : len(pages)] = pages[have:]
                    slid[slot] = len(pages)
                if cleared[slot] != first:
                    tables[slot, cleared[slot] : first] = 0
                    cleared[slot] = first

    def _sampling(self, chunks: list[Chunk], slots: list[int], forced: list[int] | None) -> Sampling:
        if forced is None:
            owners = [chunk for chunk in chunks for _ in chunk.drawn]
            ends = [position for chunk in chunks for position in chunk.drawn]
            rows = slots if owners == chunks else [chunk.request.slot for chunk in owners]
            values = np.full(len(rows), -1, np.int32)
            asked = None
        else:
            owners, ends, asked = self._scored_rows(chunks)
            rows = [chunk.request.slot for chunk in owners]
            values = np.array(forced, np.int32)
        if rows != self._rows or asked is not None:
            self._gathered = {name: column[rows] for name, column in self._static.items()}
            self._rows = rows
        got = self._gathered
        logprobs = got["logprobs"]
        if asked is not None:
            logprobs = np.array(asked, np.int32)
            self._rows = None
        special = any(self._special[slot] for slot in rows)
        seen = self._seen_rows(owners, values) if special else (NO_TOKENS, NO_TOKENS, np.zeros(len(rows) + 1, np.int32))
        bias = self._bias_rows(owners, values) if special else (NO_TOKENS, NO_VALUES, np.zeros(len(rows) + 1, np.int32))
        return Sampling(
            temperature=got["temperature"],
            top_k=got["top_k"],
            top_p=got["top_p"],
            min_p=got["min_p"],
            presence=got["presence_penalty"],
            frequency=got["frequency_penalty"],
            repetition=got["repetition_penalty"],
            seed=got["seed"],
            position=np.array(ends, np.int32),
            forced=values,
            logprobs=logprobs,
            seen_start=seen[2],
            seen_token=seen[0],
            seen_count=seen[1],
            bias_start=bias[2],
            bias_token=bias[0],
            bias_value=bias[1],
            masks=self._masks(owners, rows, values) if self._constrained else None,
        )

    def _masks(self, owners: list[Chunk], slots: list[int], forced: Int32) -> Masks | None:
        """Room for the masks of the rows that have a grammar, in order; None where none has."""
        if self._constrained.isdisjoint(slots):
            return None
        row = np.full(len(owners), -1, np.int32)
        lines = words = 0
        for at, chunk in enumerate(owners):
            constraint = chunk.request.constraint
            if constraint is not None and forced[at] < 0:
                row[at] = lines
                lines += 1
                words = constraint.words
        return Masks(row, np.zeros((lines, words), np.uint32), np.zeros(1, np.int32)) if lines else None

    def _scored_rows(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[int], list[int]]:
        """Each wanted row's chunk, position and log-probabilities, where some rows score prompt tokens."""
        owners: list[Chunk] = []
        ends: list[int] = []
        asked: list[int] = []
        for chunk in chunks:
            params = chunk.request.params
            if scores(chunk):
                count = scored_rows(chunk)
                owners += [chunk] * count
                ends += range(chunk.begin + 1, chunk.begin + 1 + count)
                asked += [params.prompt_logprobs] * count
            owners += [chunk] * len(chunk.drawn)
            ends += chunk.drawn
            asked += [params.logprobs] * len(chunk.drawn)
        return owners, ends, asked

    def _seen_rows(self, owners: list[Chunk], forced: Int32) -> tuple[Int32, Int32, Int32]:
        tokens, counts, start = [], [], [0]
        total = 0
        for chunk, force in zip(owners, forced.tolist(), strict=True):
            request = chunk.request
            if force < 0 and request.params.penalised:
                seen = self._seen.get(request.id)
                if seen is None:
                    seen = self._seen[request.id] = Seen(request.tokens[: request.prompt_len])
                if seen.length < len(request.tokens):
                    seen.add(request.tokens[seen.length :])
                tokens.append(seen.tokens)
                counts.append(seen.counts)
                total += seen.size
            start.append(total)
        if not total:
            return NO_TOKENS, NO_TOKENS, np.array(start, np.int32)
        return np.concatenate(tokens), np.concatenate(counts), np.array(start, np.int32)

    def _bias_rows(self, owners: list[Chunk], forced: Int32) -> tuple[Int32, NDArray[np.float32], Int32]:
        tokens: list[int] = []
        values: list[float] = []
        start = [0]
        for chunk, force in zip(owners, forced.tolist(), strict=True):
            request = chunk.request
            if force < 0:
                banned = self._banned(request)
                named = self._biases.get(request.id)
                if named is not None:
                    kept = [at for at, token in enumerate(named[0]) if token not in banned]
                    tokens += [named[0][at] for at in kept]
                    values += [named[1][at] for at in kept]
                tokens += banned
                values += [-np.inf] * len(banned)
            start.append(len(tokens))
        return np.array(tokens, np.int32), np.array(values, np.float32), np.array(start, np.int32)

    def _banned(self, request: Request) -> list[int]:
        """Ids that would end the request before its `min_tokens`."""
        params = request.params
        if request.generated >= params.min_tokens:
            return []
        ends = set(params.stop_ids) | (set() if params.ignore_eos else set(self._eos_ids))
        return sorted(token for token in ends if 0 <= token < self._vocab_size)


def scores(chunk: Chunk) -> bool:
    """Whether the chunk computes prompt tokens whose log-probabilities are asked for."""
    return chunk.request.scoring and not chunk.decode


def scored_rows(chunk: Chunk) -> int:
    """Rows that such a chunk needs: each of its tokens scores the next prompt token, the prompt's last scores none."""
    return max(0, min(chunk.end, chunk.request.prompt_len - 1) - chunk.begin)
