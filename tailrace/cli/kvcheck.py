"""The self-test of a server's KV cache: sends a prompt that nobody has sent before, sends it again, and says in words
whether what should have been found was.

It goes by what the server answers (`cached_tokens` of the usage) and by what `/metrics` counts; where both are silent,
so is the finding.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tailrace.cli.client import Client, CutOff, ServerError
from tailrace.terms import InvalidInput, TailraceError

Verdict = Literal["ok", "failed", "skipped", "note"]
WORDS = ("river", "turbine", "water", "channel", "power", "tail", "wheel", "gate", "mill", "dam", "weir", "sluice")
PATIENCE = 15.0
"""Seconds that pages may take to be stored in a tier."""
POLL = 0.05
FILLS = 3
"""Most pools' worth of other prompts that are sent to push the check's pages out."""
ENOUGH = 5000
"""Prompt tokens from which on it is worth a word that none was ever found."""
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MISSES: Mapping[str, str] = {
    "absent": "they had been deleted, or had made room for others",
    "size": "they were cut short",
    "stale": "they have another version's format",
    "foreign": "they belong to another model, to other kernels or to another length of context",
    "checksum": "they have been changed, or were written with another key (--kv-key-file)",
    "error": "they could not be read (the server's log says why)",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it went, and why."""

    about: str
    verdict: Verdict
    text: str


class Counters:
    """What `/metrics` said at one moment. A series that is not there is None."""

    def __init__(self, text: str) -> None:
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.splitlines():
            found = SAMPLE.fullmatch(line.strip()) if not line.startswith("#") else None
            if found is not None:
                self._values[found[1], frozenset(LABEL.findall(found[2] or ""))] = float(found[3])

    def get(self, name: str, **labels: str) -> float | None:
        """The sum of the series of that name with these labels."""
        found = [value for (known, having), value in self._values.items() if known == name and labels.items() <= having]
        return sum(found) if found else None

    def labels(self, name: str, label: str) -> list[str]:
        """The values of a label of that series."""
        return sorted(
            {dict(having)[label] for known, having in self._values if known == name and label in dict(having)}
        )


def risen(before: Counters, after: Counters, name: str, **labels: str) -> float:
    """How much a counter has risen; 0 where it is not there."""
    return (after.get(name, **labels) or 0.0) - (before.get(name, **labels) or 0.0)


@dataclass(frozen=True)
class Answer:
    """What the server said of a prompt: its tokens, and those of them that were cached; None where it did not say."""

    tokens: int
    cached: int | None


class Check:
    """The questions, in order; `run` yields a finding each. `other` is a client with another tenant's key. `evict`:
    push the pages out of the pool with other prompts, to see that tiers give them back."""

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        tokens: int = 256,
        other: Client | None = None,
        evict: bool = False,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._model = model
        self._tokens = tokens
        self._other = other
        self._evict = evict
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._first = self._counters()
        self._page = int(self._fact("block_size") or 0)
        self._pool = int(self._first.get("tailrace_kv_pages") or 0) * self._page
        self._shorten_to(self._longest())

    # --- what the server is

    @property
    def tiers(self) -> list[str]:
        """The tiers below the pool, nearest first (which is the order of their names)."""
        names = self._first.labels("tailrace_kv_hit_tokens_total", "tier")
        return [name for name in names if self._first.get(f"tailrace_kv_{name}_pages") is not None]

    def _counters(self) -> Counters:
        try:
            return Counters(self._client.text("/metrics"))
        except ServerError as error:
            if error.status != 404:
                raise
            return Counters("")  # another maker's server: its answers have to do

    def _fact(self, name: str) -> str | None:
        found = self._first.labels("tailrace_cache_config_info", name)
        return found[0] if found else None

    def _longest(self) -> int | None:
        """Most tokens of a prompt and an answer."""
        for card in self._client.get("/v1/models")["data"]:
            if card.get("id") == self._model and card.get("max_model_len"):
                return int(card["max_model_len"])
        return None

    def _shorten_to(self, longest: int | None) -> None:
        if longest is not None and self._tokens > longest - 8:
            self._tokens = max(1, longest - 8)

    # --- prompts

    def _prompt(self) -> str:
        """About `tokens` tokens of text that begins as no prompt before."""
        begin = f"{secrets.token_hex(8)} "
        words = begin + " ".join(secrets.choice(WORDS) for _ in range(self._tokens))
        try:
            count = int(self._client.post("/tokenize", {"model": self._model, "prompt": words})["count"])
        except (ServerError, KeyError, TypeError):
            return words
        return words[: max(len(begin), len(words) * self._tokens // max(count, 1))]

    def _ask(self, client: Client, prompt: str) -> Answer:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = client.post("/v1/completions", body).get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answer(int(usage.get("prompt_tokens", 0)), None if cached is None else int(cached))

    def _expected(self, answer: Answer) -> int:
        """Tokens of a prompt that a second request should find: whole pages, and never the last token."""
        return (answer.tokens - 1) // self._page * self._page if self._page else 0

    # --- the questions

    def run(self) -> Iterator[Finding]:
        """Every finding, as it is found."""
        yield from self._history()
        prompt = self._prompt()
        cold = self._ask(self._client, prompt)
        if cold.cached is None:
            yield Finding("ram", "failed", "the server's usage has no prompt_tokens_details.cached_tokens: whether "
                          "anything is found cannot be told")  # fmt: skip
            return
        if cold.cached:
            yield Finding("new", "failed", f"{cold.cached} of {cold.tokens} tokens of a prompt that nobody has sent "
                          "were said to be cached")  # fmt: skip
            return
        before = self._counters()
        warm = self._ask(self._client, prompt)
        yield self._ram(cold, warm, before)
        yield from self._tenant(prompt, cold)
        yield from self._below(prompt, cold)
        if not self.tiers:
            yield Finding("tiers", "skipped", "the server has no tier below memory (--kv-disk, --kv-valkey)")

    def _history(self) -> Iterator[Finding]:
        asked = self._first.get("tailrace_prefix_cache_queries_total") or 0.0
        found = self._first.get("tailrace_prefix_cache_hits_total") or 0.0
        if asked < ENOUGH:
            return
        text = f"since the start {found:,.0f} of {asked:,.0f} prompt tokens were found ({found / asked:.1%})"
        if not found:
            text += (
                ": do all prompts differ at their beginning (a time or a name in front of what they share), or has "
                "each client a key of its own?"
            )
        yield Finding("history", "note", text)
        for tier in self.tiers:
            held = self._first.get(f"tailrace_kv_{tier}_pages") or 0.0
            if held and not found:
                yield Finding(
                    "history",
                    "note",
                    f"the {tier} holds {held:,.0f} pages and none was ever found: those of another model, context "
                    "length (--max-context), KV type, kernels or version are not",
                )

    def _ram(self, cold: Answer, warm: Answer, before: Counters) -> Finding:
        """Whether the prompt was found in memory the second time."""
        expected, cached = self._expected(cold), warm.cached or 0
        after = self._counters()
        if not self._page:
            text = f"{cached} of {warm.tokens} tokens were found the second time"
            return Finding("ram", "ok" if cached else "failed", text)
        if not expected:
            return Finding("ram", "skipped", f"the prompt has {cold.tokens} tokens, and a page {self._page}: nothing "
                           "can be found of it (--tokens, --max-context)")  # fmt: skip
        if cached >= expected:
            counted = risen(before, after, "tailrace_kv_hit_tokens_total")
            if counted < cached:
                return Finding("ram", "failed", f"{cached} tokens were found, but /metrics counts {counted:.0f}")
            return Finding("ram", "ok", f"{cached} of {warm.tokens} tokens were found the second time")
        said = f"{cached} of the {expected} tokens in whole pages were found the second time: "
        return Finding("ram", "failed", said + self._why_not_ram(cold, after))

    def _why_not_ram(self, cold: Answer, after: Counters) -> str:
        if self._fact("enable_prefix_caching") == "False":
            return "the prefix cache is off (--no-prefix-cache)"
        if risen(self._first, after, "tailrace_engine_restarts_total"):
            return "the engine was started again in between"
        if self._pool and cold.tokens > self._pool // 2:
            return f"the pool has room for {self._pool} tokens (--kv-tokens), too few for a prompt of {cold.tokens}"
        for cause, why in (
            ("pressure", "other requests needed the room (--kv-tokens)"),
            ("ttl", "its time to live was over (--kv-ttl)"),
            ("quota", "this key's share of the pool was full (--kv-tenant-share)"),
            ("reset", "the cache was reset"),
        ):
            if risen(self._first, after, "tailrace_kv_evictions_total", cause=cause):
                return why
        return "nothing in /metrics says why; are there several servers behind this address?"

    def _tenant(self, prompt: str, cold: Answer) -> Iterator[Finding]:
        """Whether another key finds nothing of it."""
        if self._other is None:
            return
        if self._open():
            yield Finding("tenant", "skipped", "the server asks for no key, so everybody is one tenant")
            return
        answer = self._ask(self._other, prompt)
        if answer.cached:
            yield Finding("tenant", "failed", f"another key was given {answer.cached} tokens of this key's pages")
        else:
            yield Finding("tenant", "ok", f"another key found nothing of the {cold.tokens} tokens")

    def _open(self) -> bool:
        try:
            Client(self._client.address).models()
        except ServerError as error:
            return error.status != 401
        return True

    # --- a tier

    def _below(self, prompt: str, cold: Answer) -> Iterator[Finding]:
        """Whether each tier has got the pages, and gives them back."""
        if not self._expected(cold):
            return
        working = []
        for tier in self.tiers:
            stored = self._stored(tier, cold)
            yield stored
            if stored.verdict != "failed":
                working.append(tier)
        if working and self._evict:
            yield from self._back(working, prompt, cold)
            return
        for tier in working:
            yield Finding(f"{tier} back", "skipped", "whether it gives them back was not tried: --evict fills the pool "
                          "with other prompts first, which costs everybody what they have cached there")  # fmt: skip

    def _stored(self, tier: str, cold: Answer) -> Finding:
        wanted = self._expected(cold) // self._page
        about, series = f"{tier} stores", f"tailrace_kv_{tier}_"
        end = self._clock() + PATIENCE
        while True:
            now = self._counters()
            count = risen(self._first, now, f"{series}stored_total")
            if count >= wanted:
                return Finding(about, "ok", f"all full pages of the prompt were stored ({wanted})")
            if now.get(f"{series}up") == 0:
                return Finding(about, "failed", "its server does not answer (the log says why) and is tried again from "
                               "time to time")  # fmt: skip
            if now.get(f"{series}writable") == 0 and tier == "valkey":
                return Finding(about, "failed", "its server takes no pages (full: maxmemory, and a policy that makes "
                               "room?) and is tried again every few seconds")  # fmt: skip
            if now.get(f"{series}writable") == 0:
                return Finding(about, "failed", "it cannot be written (full, or read-only: the server's log says which)"
                               " and is only read from until the server is started again")  # fmt: skip
            if self._clock() > end:
                break
            self._sleep(POLL)
        said = f"{count:.0f} of {wanted} pages were stored within {PATIENCE:.0f} s: "
        if risen(self._first, now, f"{series}dropped_total"):
            return Finding(
                about, "failed", said + "the queue was full, so pages were dropped (a slow disk or network?)"
            )
        if now.get(f"{series}queued"):
            return Finding(about, "failed", said + f"{now.get(f'{series}queued'):.0f} wait (a busy server, or a slow "
                           "disk or network)")  # fmt: skip
        return Finding(about, "failed", said + "nothing in /metrics says why")

    def _back(self, tiers: Sequence[str], prompt: str, cold: Answer) -> Iterator[Finding]:
        """What each of the tiers gives back once the pages have left the pool."""
        said = "/metrics does not say how large the pool is"
        for turn in range(FILLS if self._pool else 0):
            before = self._fill(turn)
            again = self._ask(self._client, prompt)
            after = self._counters()
            if (again.cached or 0) < self._expected(cold) or any(
                risen(before, after, "tailrace_kv_hit_tokens_total", tier=tier) for tier in self.tiers
            ):
                break  # it was loaded, or is neither in memory nor loaded
            said = (
                f"the pages are still in memory after {FILLS} pools' worth of other prompts (pinned, or --kv-policy "
                "keeps what is used often)"
            )
        else:
            for tier in tiers:
                yield Finding(f"{tier} gives back", "skipped", said)
            return
        for tier in tiers:
            yield self._given(tier, cold, again, before, after)

    def _given(self, tier: str, cold: Answer, again: Answer, before: Counters, after: Counters) -> Finding:
        """What a tier has given of the pages that had left the pool."""
        about, series = f"{tier} gives back", f"tailrace_kv_{tier}_"
        loaded = risen(before, after, "tailrace_kv_hit_tokens_total", tier=tier)
        if loaded:
            text = f"{again.cached} of {again.tokens} tokens were found after they had left the pool"
            took, was = (risen(before, after, f"{series}{kind}_seconds_total") for kind in ("load", "predicted"))
            text += f"; {loaded:.0f} came from the {tier} in {took * 1000:.1f} ms (expected: {was * 1000:.1f} ms)"
            if (again.cached or 0) >= self._expected(cold):
                return Finding(about, "ok", text)
            return Finding(about, "failed", text + self._why_less(before, after, series))
        for near in self.tiers[: self.tiers.index(tier)]:
            if risen(before, after, f"tailrace_kv_{near}_loads_total"):
                return Finding(about, "skipped", f"the {near}, which is nearer, was asked for them, so it was not")
        if risen(before, after, f"{series}declined_total"):
            return Finding(about, "note", f"it has them, but computing {cold.tokens} tokens anew was expected to be "
                           "quicker than loading them (a longer prompt, --tokens, may be loaded)")  # fmt: skip
        said = "the pages had left the pool and were not found"
        return Finding(about, "failed", said + self._why_less(before, after, series))

    def _fill(self, turn: int) -> Counters:
        """Sends other prompts until their tokens would fill the pool; what /metrics said then."""
        self._say(f"Filling the pool ({self._pool:,} tokens) with other prompts{' once more' if turn else ''} ...")
        sent = 0
        while sent < self._pool + 2 * self._page:
            asked = self._ask(self._client, self._prompt()).tokens
            sent += max(1, (asked - 1) // max(1, self._page) * self._page)  # a page that is not full is not kept
        return self._counters()

    def _why_less(self, before: Counters, after: Counters, series: str) -> str:
        for cause, why in MISSES.items():
            if risen(before, after, f"{series}misses_total", cause=cause):
                return f": {why}"
        if risen(self._first, after, f"{series}evicted_total"):
            return ": it had no room for them any more (--kv-disk-bytes)"
        return ": nothing in /metrics says why"


def check(
    client: Client,
    model: str | None,
    *,
    tokens: int = 256,
    other: Client | None = None,
    evict: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """The findings about a server. TailraceError where it does not answer; InvalidInput where it does not serve the
    model."""
    try:
        served = client.models()
        if model is not None and model not in served:
            raise InvalidInput(f"the server has no model {model!r}; it has {', '.join(served)}", param="model")
        yield from Check(client, model or served[0], tokens=tokens, other=other, evict=evict, say=say).run()
    except (CutOff, KeyError, TypeError, ValueError) as error:
        raise TailraceError(f"The server's answer is not understood: {error!r}") from error
