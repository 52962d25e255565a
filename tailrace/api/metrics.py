"""What /metrics shows: a fold over events and closed timelines, under `tailrace_` names and vLLM's.

Every label value comes from the server's own configuration or a fixed list, so no client can make a new series. The
prometheus library only renders, and is imported at the first scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from tailrace.engine.protocol import Gauges, Ready, TierGauges, WindowGauges
from tailrace.kv.prefix import CAUSES
from tailrace.ledger.timeline import Fold, Timeline
from tailrace.terms import Event, EventKind, Phase

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tailrace.api.generation import Choice

SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
TTFT = (*SHORT, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
TIER_COUNTERS = {
    "hits": "",
    "loaded": "KV pages loaded from {place}.",
    "stored": "KV pages stored {at}.",
    "evicted": "KV pages deleted from disk to make room.",
    "dropped": "KV pages not stored, since the queue was full.",
    "declined": "Loads not made, since computing was expected to be quicker.",
    "loads": "Loads from {place} that have ended, complete or not.",
    "load_seconds": "Time of the loads that have ended.",
    "predicted_seconds": "Time that they were expected to take.",
    "computing_seconds": "Time that computing what they gave was expected to take.",
    "requeued": "KV pages loaded while they still waited to be stored.",
    "refused": "KV pages that were not taken.",
    "lookups": "Questions which KV pages it has.",
    "lookup_seconds": "Time until they were answered.",
    "late_lookups": "Questions for whose answer a request has waited in vain.",
}
"""What `TierGauges` counts, with its description; hits have a family of their own."""
TIERS = {"disk": ("disk", "on disk"), "valkey": ("the Valkey server", "in the Valkey server")}
"""The tiers below the pool, with what their descriptions call them."""
TIER_LACKS = {"disk": {"lookups", "lookup_seconds", "late_lookups", "up"}, "valkey": {"evicted"}}
"""What says nothing of a tier."""
RESUMED = ("ram", "tier", "computed")
"""Where what a preempted request had computed comes from when it goes on (`Gauges.resumed`)."""
DRAFTS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
"""What `Gauges.drafts` counts."""
REASONS = ("stop", "length", "abort", "error", "timeout")
ENDPOINTS = (
    "chat",
    "messages",
    "completions",
    "responses",
    "files",
    "batches",
    "embeddings",
    "rerank",
    "score",
    "models",
    "tokenize",
    "detokenize",
    "health",
    "metrics",
    "version",
    "admin",
    "other",
    "openapi",
    "ui",
)
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 499, 500, 503, 507)
"""499: the client left before its answer was complete."""


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50... up to `most`: vLLM's buckets for token counts."""
    series = (m * 10**e for e in range(12) for m in (1, 2, 5))
    return tuple(value for value in series if value <= most) or (1,)


class Histogram:
    """Counts per bucket; the last one is +Inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds one sample."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, samples at most that), as the exposition format wants it."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, running))
        return rows


@dataclass
class Totals:
    """Everything counted since the server started; prompts count what was looked up, cached or not, once."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    http: dict[tuple[str, int], int] = field(default_factory=lambda: dict.fromkeys(product(ENDPOINTS, STATUSES), 0))
    phases: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))


class Metrics:
    """The fold. `observe` is a `Book` observer and `closed` its end; `end_step` follows each message of the engine."""

    def __init__(self, model_name: str, max_context: int = 131_072, *, prefix_cache: bool = True) -> None:
        self.model_name = model_name
        self.prefix_cache = prefix_cache
        self.totals = Totals()
        self.engine = _EngineTotals()
        tokens = one_two_five(max_context)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(TTFT),
            "inter_token_latency_seconds": Histogram(PER_TOKEN),
            "request_time_per_output_token_seconds": Histogram(PER_TOKEN),
            "e2e_request_latency_seconds": Histogram(LATENCY),
            "request_queue_time_seconds": Histogram(LATENCY),
            "request_inference_time_seconds": Histogram(LATENCY),
            "request_prefill_time_seconds": Histogram(LATENCY),
            "request_decode_time_seconds": Histogram(LATENCY),
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "request_max_num_generation_tokens": Histogram(tokens),
            "iteration_tokens_total": Histogram(STEP_TOKENS),
            "request_params_n": Histogram(CHOICES),
            "request_params_max_tokens": Histogram(tokens),
        }
        self._ttft = self.histograms["time_to_first_token_seconds"]
        self._itl = self.histograms["inter_token_latency_seconds"]
        self.limited: dict[tuple[str, str], int] = {}
        self.ledger: dict[str, int] = {}
        """Of the ledger, where there is one: `ledger.writer.Writer.numbers`."""
        self.content: dict[str, int] = {}
        """Of the content store, where there is one: bytes, limit_bytes, failures; and batch_lines that run."""
        self.slept = ("awake", 0, 0, 0.0)
        self.adapters: dict[str, tuple[int, int]] = {}
        """Requests that run and that wait, by the name of their adapter."""
        self.max_adapters = 0
        self._step_tokens = 0
        self._ready: Ready | None = None

    def observe(self, fold: Fold, event: Event, before: float) -> None:
        """A step computed something for a request."""
        self._step_tokens += event.computed
        if event.kind is not EventKind.TOKEN:
            return
        self.totals.generation_tokens += event.computed
        if before:
            self._itl.observe(event.at - before)
        else:
            self._ttft.observe(event.at - fold.received)
            self.totals.prompt_tokens += fold.computed + fold.cached

    def end_step(self) -> None:
        """The events of one step have been observed."""
        if self._step_tokens:
            self.histograms["iteration_tokens_total"].observe(self._step_tokens)
            self._step_tokens = 0

    def submitted(self, n: int, max_tokens: int) -> None:
        """A request of `n` choices was handed to the engine."""
        self.histograms["request_params_n"].observe(n)
        self.histograms["request_params_max_tokens"].observe(max_tokens)

    def produced(self, choices: Sequence[Choice], n: int) -> None:
        """An HTTP request has ended; the n choices of each of its prompts lie together."""
        for at in range(0, len(choices), n):
            group = choices[at : at + n]
            if all(choice.finish in ("stop", "length", "tool_calls") for choice in group):
                longest = max(choice.output_tokens for choice in group)
                self.histograms["request_max_num_generation_tokens"].observe(longest)

    def closed(self, timeline: Timeline) -> None:
        """A request has ended. Latencies are of the ones that ran to their end."""
        reason = timeline.finish if timeline.finish in REASONS else "error"
        self.totals.finished[reason] += 1
        for phase, seconds in timeline.phases.items():
            self.totals.phases[phase] += seconds
        if reason not in ("stop", "length"):
            return
        if not timeline.output_tokens:  # texts that were embedded or scored: no token has told of them
            self.totals.prompt_tokens += timeline.prompt_tokens
        inference = None if timeline.prefill is None or timeline.decode is None else timeline.prefill + timeline.decode
        for name, value in (
            ("e2e_request_latency_seconds", timeline.e2e),
            ("request_queue_time_seconds", timeline.queue),
            ("request_prefill_time_seconds", timeline.prefill),
            ("request_decode_time_seconds", timeline.decode),
            ("request_inference_time_seconds", inference),
            ("request_time_per_output_token_seconds", timeline.tpot),
            ("request_prompt_tokens", timeline.prompt_tokens),
            ("request_generation_tokens", timeline.output_tokens),
        ):
            if value is not None:
                self.histograms[name].observe(value)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request got its status."""
        key = (endpoint if endpoint in ENDPOINTS else "other", status if status in STATUSES else 500)
        self.totals.http[key] += 1

    def limits(self, refused: Mapping[tuple[str, str], int]) -> None:
        """Requests that limits have refused so far, by whose limit and which; the pairs are always the same."""
        self.limited = dict(refused)

    def sleep(self, state: str, sleeps: int, wakes: int, wake_seconds: float) -> None:
        """Whether the server sleeps (`api.sleep.State`), how often it has begun and ended to, and how long that took
        in all."""
        self.slept = (state, sleeps, wakes, wake_seconds)

    def gauges(self, gauges: Gauges, baseline: Gauges | None, incarnation: int) -> None:
        """The scheduler's state. Its counters start again with each engine, at `baseline`; ours keep rising."""
        self.engine.update(gauges, baseline or gauges, incarnation)

    def render(self, *, ready: Ready | None, healthy: bool, restarts: int) -> bytes:
        """The exposition text. Pure but for the import and the last `ready`, so it may run in a thread."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import generate_latest

        registry = CollectorRegistry(auto_describe=False)
        self._ready = ready or self._ready  # its series stay while there is no engine
        registry.register(_Families(self, self._ready, healthy, restarts))
        return generate_latest(registry)


@dataclass
class _EngineTotals:
    now: Gauges = field(default_factory=Gauges)
    incarnation: int = -1
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTS, 0))
    tiers: dict[str, dict[str, float]] = field(
        default_factory=lambda: {tier: dict.fromkeys(TIER_COUNTERS, 0.0) for tier in TIERS}
    )
    tier_misses: dict[str, dict[str, int]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    resumed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESUMED, 0))
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    kv_batches: int = 0
    kv_batches_dropped: int = 0

    def update(self, new: Gauges, baseline: Gauges, incarnation: int) -> None:
        old = self.now if incarnation == self.incarnation else baseline
        self.prefix_queries += max(0, new.prefix_queries - old.prefix_queries)
        self.prefix_hits += max(0, new.prefix_hits - old.prefix_hits)
        self.preemptions += max(0, new.preemptions - old.preemptions)
        self.steps += max(0, new.steps - old.steps)
        self.kv_batches += max(0, new.kv_batches - old.kv_batches)
        self.kv_batches_dropped += max(0, new.kv_batches_dropped - old.kv_batches_dropped)
        for tier, gauges in new.tiers.items():
            self._update_tier(tier, gauges, old.tiers.get(tier) or TierGauges())
        for source, count, counted in zip(RESUMED, new.resumed, old.resumed or [0] * len(RESUMED), strict=False):
            self.resumed[source] += max(0, count - counted)
        for name, count, counted in zip(DRAFTS, new.drafts, old.drafts or [0] * len(DRAFTS), strict=False):
            self.drafts[name] += max(0, count - counted)
        before = old.evictions or [0] * len(CAUSES)
        for cause, count, counted in zip(CAUSES, new.evictions, before, strict=False):
            self.evictions[cause] += max(0, count - counted)
        self.now, self.incarnation = new, incarnation

    def _update_tier(self, tier: str, new: TierGauges, old: TierGauges) -> None:
        counts, misses = self.tiers[tier], self.tier_misses[tier]
        for name in TIER_COUNTERS:
            counts[name] += max(0.0, getattr(new, name) - getattr(old, name))
        for cause, count in new.misses.items():
            misses[cause] = misses.get(cause, 0) + max(0, count - old.misses.get(cause, 0))


HELP = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be admitted.",
    "kv_cache_usage_perc": "Share of KV pages that requests hold; 1 is all of them.",
    "time_to_first_token_seconds": "Received until the first token.",
    "inter_token_latency_seconds": "Gap between consecutive tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time of each token after the first, per request.",
    "e2e_request_latency_seconds": "Received until the last byte was handed over.",
    "request_queue_time_seconds": "Queued until first admitted.",
    "request_inference_time_seconds": "First admitted until the last token.",
    "request_prefill_time_seconds": "First admitted until the first token.",
    "request_decode_time_seconds": "First token until the last.",
    "request_prompt_tokens": "Prompt tokens, per request.",
    "request_generation_tokens": "Output tokens, per request.",
    "request_max_num_generation_tokens": "Output tokens of the longest choice, per prompt.",
    "iteration_tokens_total": "Tokens computed in one engine step.",
    "request_params_n": "The n parameter, per request.",
    "request_params_max_tokens": "The max_tokens parameter, per request.",
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Output tokens generated.",
    "num_preemptions": "Preemptions.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Guesses at the tokens that follow, each of one or more.",
    "spec_decode_num_draft_tokens": "Tokens of those guesses.",
    "spec_decode_num_accepted_tokens": "Tokens of those guesses that came true.",
    "request_success": "Finished requests, by reason.",
}


class _Families:
    """Names the fold's numbers, twice: `tailrace_x` and `vllm:x`."""

    def __init__(self, metrics: Metrics, ready: Ready | None, healthy: bool, restarts: int) -> None:
        self._metrics = metrics
        self._ready = ready
        self._healthy = healthy
        self._restarts = restarts
        self._labels = {"model_name": metrics.model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for prefix in ("tailrace_", "vllm:"):
            yield from self._shared(prefix)
            yield from self._adapters(prefix)
            yield from self._config(prefix)
        yield from self._own()

    def _shared(self, prefix: str) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels = list(self._labels)
        values = list(self._labels.values())
        engine, totals = self._metrics.engine, self._metrics.totals
        pages = engine.now.pages
        held = engine.now.used_pages / pages if pages else 0.0
        for name, value in (
            ("num_requests_running", engine.now.running),
            ("num_requests_waiting", engine.now.waiting),
            ("kv_cache_usage_perc", held),
        ):
            gauge = GaugeMetricFamily(prefix + name, HELP[name], labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for name, value in (
            ("prompt_tokens", totals.prompt_tokens),
            ("generation_tokens", totals.generation_tokens),
            ("num_preemptions", engine.preemptions),
            ("prefix_cache_queries", engine.prefix_queries),
            ("prefix_cache_hits", engine.prefix_hits),
            *engine.drafts.items(),
        ):
            counter = CounterMetricFamily(prefix + name, HELP[name], labels=labels)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily(
            prefix + "request_success", HELP["request_success"], labels=[*labels, "finished_reason"]
        )
        for reason, count in totals.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, histogram in self._metrics.histograms.items():
            family = HistogramMetricFamily(prefix + name, HELP[name], labels=labels)
            family.add_metric(values, histogram.cumulative(), histogram.total)
            yield family

    def _adapters(self, prefix: str) -> Iterator[Metric]:
        """vLLM's: which adapters requests run and wait with, as labels of one series whose value is the time; and the
        numbers of requests, under our name alone."""
        from prometheus_client.core import GaugeMetricFamily

        adapters = self._metrics.adapters
        if not adapters:
            return
        labels = {
            "max_lora": str(self._metrics.max_adapters),
            "waiting_lora_adapters": ",".join(name for name, (_, waiting) in adapters.items() if waiting),
            "running_lora_adapters": ",".join(name for name, (running, _) in adapters.items() if running),
        }
        info = GaugeMetricFamily(
            prefix + "lora_requests_info", "Adapters that requests run and wait with.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), time.time())
        yield info
        if prefix == "vllm:":
            return
        requests = GaugeMetricFamily(
            prefix + "lora_requests", "Requests by their adapter and state.", labels=["adapter", "state"]
        )
        for name, (running, waiting) in adapters.items():
            requests.add_metric([name, "running"], running)
            requests.add_metric([name, "waiting"], waiting)
        yield requests

    def _config(self, prefix: str) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        if self._ready is None:
            return
        facts = {
            "block_size": str(self._ready.page_size),
            "num_gpu_blocks": str(self._ready.kv_tokens // self._ready.page_size),
            "enable_prefix_caching": str(self._metrics.prefix_cache),
            "engine": "0",
        }
        info = GaugeMetricFamily(prefix + "cache_config_info", "Sizes of the KV cache.", labels=list(facts))
        info.add_metric(list(facts.values()), 1.0)
        yield info

    def _tiers(self, now: dict[str, TierGauges]) -> Iterator[Metric]:
        """Prompt tokens found, by tier; and the numbers of the tiers that there are."""
        from prometheus_client.core import CounterMetricFamily

        engine = self._metrics.engine
        found = {tier: counts["hits"] for tier, counts in engine.tiers.items()}
        hits = CounterMetricFamily("tailrace_kv_hit_tokens", "Prompt tokens found, by tier.", labels=["tier"])
        hits.add_metric(["ram"], engine.prefix_hits - sum(found.values()))
        for tier, tokens in found.items():
            hits.add_metric([tier], tokens)
        yield hits
        resumed = CounterMetricFamily(
            "tailrace_kv_resumed_tokens",
            "Tokens that preempted requests had computed, by where they came from when those went on.",
            labels=["source"],
        )
        for source, count in engine.resumed.items():
            resumed.add_metric([source], count)
        yield resumed
        for tier, gauges in now.items():
            yield from self._tier(tier, gauges)

    def _tier(self, tier: str, now: TierGauges) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine = self._metrics.engine
        place, at = TIERS[tier]
        lacks = TIER_LACKS[tier]
        known = "" if tier == "disk" else ", as far as this engine knows"
        for name, text, value in (
            ("pages", f"KV pages {at}{known}.", now.pages),
            ("bytes", f"Bytes of the KV pages {at}{known}.", now.bytes),
            ("queued", "KV pages that wait to be stored.", now.queued),
            ("writable", "1 while it takes pages: 0 once one could not be written.", float(now.writable)),
            ("up", "1 while it answers.", float(now.up)),
        ):
            if name not in lacks:
                yield GaugeMetricFamily(f"tailrace_kv_{tier}_{name}", text, value=value)
        for name, text in TIER_COUNTERS.items():
            if text and name not in lacks:
                text = text.format(place=place, at=at)
                yield CounterMetricFamily(f"tailrace_kv_{tier}_{name}", text, value=engine.tiers[tier][name])
        for name, text in (("loaded", f"Bytes of KV loaded from {place}."), ("stored", f"Bytes of KV stored {at}.")):
            value = engine.tiers[tier][name] * now.page_bytes
            yield CounterMetricFamily(f"tailrace_kv_{tier}_{name}_bytes", text, value=value)
        misses = CounterMetricFamily(f"tailrace_kv_{tier}_misses", "Loads that gave nothing.", labels=["cause"])
        for cause, count in engine.tier_misses[tier].items():
            misses.add_metric([cause], count)
        yield misses

    def _groups(self, now: Gauges) -> Iterator[Metric]:
        """Pages and bytes by group of layers, where a model has layers with a window."""
        from prometheus_client.core import GaugeMetricFamily

        if not now.windows:
            return
        pages = GaugeMetricFamily(
            "tailrace_kv_group_pages", "KV pages by layers' window and state.", labels=["window", "state"]
        )
        full = WindowGauges(0, now.pages, now.used_pages, now.cached_pages, now.pinned_pages)
        for group in (full, *now.windows):
            taken = (("used", group.used_pages), ("cached", group.cached_pages), ("pinned", group.pinned_pages))
            free = group.pages - sum(count for _, count in taken)
            for state, count in (*taken, ("free", free)):
                pages.add_metric([str(group.window or "full"), state], count)
        yield pages
        size = GaugeMetricFamily("tailrace_kv_group_bytes", "Bytes of KV pages by layers' window.", labels=["window"])
        for pool in self._ready.kv_pools if self._ready else ():
            size.add_metric([str(pool.window or "full")], pool.bytes)
        yield size

    def _own(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, value: float) -> Any:
            return GaugeMetricFamily(f"tailrace_{name}", text, value=value)

        now = self._metrics.engine.now
        yield gauge("engine_up", "1 while the engine is ready, beating and making progress.", float(self._healthy))
        yield gauge("kv_pages", "KV pages of the pool.", now.pages)
        yield gauge("kv_pages_used", "KV pages that requests hold, those of pinned prefixes apart.", now.used_pages)
        yield gauge("kv_pages_cached", "KV pages that only the prefix cache holds.", now.cached_pages)
        yield from self._groups(now)
        yield from self._tiers(now.tiers)
        yield gauge("kv_pages_pinned", "KV pages of pinned prefixes, in use or not.", now.pinned_pages)
        evictions = CounterMetricFamily("tailrace_kv_evictions", "KV pages forgotten, by cause.", labels=["cause"])
        for cause, count in self._metrics.engine.evictions.items():
            evictions.add_metric([cause], count)
        yield evictions
        for name, text, count in (
            ("published", "Batches of KV events published.", self._metrics.engine.kv_batches),
            (
                "dropped",
                "Batches of KV events dropped before any subscriber could get them.",
                self._metrics.engine.kv_batches_dropped,
            ),
        ):
            yield CounterMetricFamily(f"tailrace_kv_event_batches_{name}", text, value=count)
        misses = self._metrics.engine.prefix_queries - self._metrics.engine.prefix_hits
        text = "Prompt tokens looked up in the prefix cache and not found."
        yield CounterMetricFamily("tailrace_prefix_cache_misses", text, value=misses)
        yield CounterMetricFamily("tailrace_engine_restarts", "Engines started again.", value=self._restarts)
        yield CounterMetricFamily("tailrace_engine_steps", "Engine steps.", value=self._metrics.engine.steps)
        http = CounterMetricFamily("tailrace_http_requests", "HTTP answers.", labels=["endpoint", "status"])
        for (endpoint, status), count in sorted(self._metrics.totals.http.items()):
            http.add_metric([endpoint, str(status)], count)
        yield http
        limited = CounterMetricFamily(
            "tailrace_limited_requests", "Requests that a limit of a key or tenant refused.", labels=["of", "limit"]
        )
        for (kind, what), count in sorted(self._metrics.limited.items()):
            limited.add_metric([kind, what], count)
        yield limited
        if content := self._metrics.content:
            yield gauge("content_bytes", "Bytes of the content store in use.", content["bytes"])
            yield gauge("content_limit_bytes", "Most bytes of the content store.", content["limit_bytes"])
            yield gauge("batch_lines_running", "Lines of batches that run.", content["batch_lines"])
            text = "What the content store could not do: it was full, or its database did not work."
            yield CounterMetricFamily("tailrace_content_failures", text, value=content["failures"])
        if ledger := self._metrics.ledger:
            yield CounterMetricFamily("tailrace_ledger_rows", "Rows written to the ledger.", value=ledger["rows"])
            text = "Requests that could be written nowhere, and are not in the ledger."
            yield CounterMetricFamily("tailrace_ledger_dropped", text, value=ledger["dropped"])
            text = "Times that the ledger or its spool could not be written."
            yield CounterMetricFamily("tailrace_ledger_failures", text, value=ledger["failures"])
            yield gauge("ledger_waiting", "Requests that are on their way into the ledger.", ledger["waiting"])
        phases = CounterMetricFamily("tailrace_phase_seconds", "Time of ended requests, by phase.", labels=["phase"])
        for phase, seconds in self._metrics.totals.phases.items():
            phases.add_metric([phase.value], seconds)
        yield phases
        state, sleeps, wakes, wake_seconds = self._metrics.slept
        yield gauge("asleep", "1 while the engine's memory is given back.", float(state == "asleep"))
        yield CounterMetricFamily("tailrace_sleeps", "Times that the server went to sleep.", value=sleeps)
        yield CounterMetricFamily("tailrace_wakes", "Times that it woke up.", value=wakes)
        text = "Time from being woken until the engine was ready."
        yield CounterMetricFamily("tailrace_wake_seconds", text, value=wake_seconds)
        startup = GaugeMetricFamily("tailrace_startup_seconds", "Start-up of the engine, by phase.", labels=["phase"])
        for name, seconds in (self._ready.phases if self._ready else {}).items():
            startup.add_metric([name], seconds)
        yield startup
