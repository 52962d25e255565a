"""The real model through the real engine core: the same bits however a request is computed.

Each request's tokens and log-probabilities are taken alone first; then batched, chunked, cached, preempted, on one
thread and on two, in every order of arrival, they must be equal to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.cpu import CpuBackend
from tailrace.engine.config import EngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import open_transfers
from tailrace.engine.protocol import SamplingParams, Submit, TokenLogprob
from tailrace.engine.spec import EngineSpec
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.terms import EventKind
from tests.fakes import Eager
from tests.valkey import Server, needs_server, running

Got = tuple[list[int], list[TokenLogprob]]
VOCAB = 49_152
CONTEXT = 512


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(200, 48_000, length)]


SHARED = prompt(99, 70)
REQUESTS = {
    "greedy": Submit("greedy", prompt(1, 40), SamplingParams(max_tokens=10, temperature=0.0, logprobs=2)),
    "one": Submit("one", prompt(2, 1), SamplingParams(max_tokens=10, temperature=0.9, seed=7, logprobs=0)),
    "nucleus": Submit(
        "nucleus", prompt(3, 130), SamplingParams(max_tokens=10, temperature=1.2, top_p=0.9, seed=2**63, logprobs=0)
    ),
    "penalised": Submit(
        "penalised",
        prompt(4, 25),
        SamplingParams(
            max_tokens=10, temperature=0.7, top_k=40, seed=3, presence_penalty=0.5, repetition_penalty=1.3, logprobs=0
        ),
    ),
    "shared": Submit("shared", SHARED + prompt(5, 9), SamplingParams(max_tokens=10, temperature=0.0, logprobs=1)),
    "shared too": Submit(
        "shared too", SHARED + prompt(6, 20), SamplingParams(max_tokens=10, temperature=0.8, seed=1, logprobs=1)
    ),
}


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load_model(open_checkpoint(smollm2), max_context=CONTEXT)


class Engine:
    """An engine core over the cpu backend, stepped by hand."""

    def __init__(
        self,
        model: Model,
        cache: Path,
        *,
        threads: int = 2,
        kv_tokens: int = 2048,
        tiers: EngineSpec | None = None,
        **config: object,
    ) -> None:
        settings = {"step_tokens": 256, "max_context": CONTEXT, **config}
        self.config = EngineConfig(kv_tokens=kv_tokens, **settings)  # type: ignore[arg-type]
        backend = CpuBackend(
            model,
            pages=self.config.pages,
            max_context=CONTEXT,
            step_tokens=self.config.step_tokens,
            max_running=self.config.max_running,
            threads=threads,
            cache_dir=cache,
        )
        transfers = open_transfers(tiers or EngineSpec(""), backend, Eager())
        self.core = EngineCore(backend, self.config, eos_ids=(2,), vocab_size=VOCAB, transfers=transfers)
        self.core.settle()
        self.events: list[EventKind] = []

    def run(self, requests: Iterable[Submit], stagger: int = 0) -> dict[str, Got]:
        """All of them, `stagger` steps apart; every step is checked for leaks."""
        left, got = list(requests), {}
        while left or self.core.has_work or not self.core.idle:  # it has nothing to do while all of them load
            for _ in range(1 if stagger else len(left)):
                if left:
                    request = left.pop(0)
                    got[request.request] = ([], [])
                    self.core.submit(request)
            for _ in range(max(1, stagger)):
                news = self.core.step()
                self.core.check_integrity()
                for output in news.outputs if news else ():
                    assert output.error == ""
                    got[output.request][0].extend(output.tokens)
                    got[output.request][1].extend(output.logprobs)
                self.events += [event.kind for event in news.events] if news else []
        gauges = self.core.gauges
        assert (gauges.running, gauges.waiting, gauges.used_pages) == (0, 0, 0)
        return got


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@pytest.fixture(scope="module")
def alone(model: Model, cache: Path) -> dict[str, Got]:
    """What each request gets from an engine that has nothing else to do and remembers nothing."""
    engine = Engine(model, cache, prefix_cache=False)
    return {name: engine.run([request])[name] for name, request in REQUESTS.items()}


def test_each_request_answers(alone: dict[str, Got]) -> None:
    for name, (tokens, logprobs) in alone.items():
        assert 1 <= len(tokens) <= REQUESTS[name].params.max_tokens
        assert [entry.token for entry in logprobs] == tokens
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(alone)


@pytest.mark.parametrize("step_tokens", [33, 64, 512])
def test_batched_and_chunked(model: Model, cache: Path, alone: dict[str, Got], step_tokens: int) -> None:
    engine = Engine(model, cache, step_tokens=step_tokens, max_running=8, prefix_cache=False)
    assert engine.run(REQUESTS.values()) == alone


def test_chunks_of_sixteen(model: Model, cache: Path, alone: dict[str, Got]) -> None:
    names = ["nucleus", "shared"]
    engine = Engine(model, cache, step_tokens=16, max_running=2, prefix_cache=False)
    assert engine.run(REQUESTS[name] for name in names) == {name: alone[name] for name in names}


def test_cached(model: Model, cache: Path, alone: dict[str, Got]) -> None:
    engine = Engine(model, cache)
    assert engine.run(REQUESTS.values(), stagger=2) == alone
    before = engine.core.gauges.prefix_hits
    again = [Submit(f"{name} again", r.prompt, r.params) for name, r in REQUESTS.items()]
    assert engine.run(again) == {f"{name} again": got for name, got in alone.items()}
    assert engine.core.gauges.prefix_hits > before + 128


def test_from_disk(model: Model, cache: Path, alone: dict[str, Got], tmp_path: Path) -> None:
    """Whatever is loaded, with others computed meanwhile and pages evicted, is what would have been computed."""
    disk = EngineSpec("", kv_disk=str(tmp_path))
    engine = Engine(model, cache, tiers=disk)
    assert engine.run(REQUESTS.values(), stagger=2) == alone
    engine.core.close()
    stored = engine.core.gauges.tiers["disk"]
    assert stored.stored >= 12
    tight = Engine(model, cache, tiers=disk, kv_tokens=192, max_context=160)
    for _ in range(2):
        assert tight.run(REQUESTS.values(), stagger=2) == alone
    tight.core.close()
    found = tight.core.gauges.tiers["disk"]
    assert found.hits >= 128
    assert found.loaded > found.stored
    assert not any(found.misses.values())


LONG = {
    name: Submit(name, REQUESTS[name].prompt, SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True))
    for name in ("greedy", "penalised", "one")
}
"""Answers that grow in a pool that holds only one of them."""


@pytest.fixture(scope="module")
def long_alone(model: Model, cache: Path) -> dict[str, Got]:
    return {name: Engine(model, cache).run([request])[name] for name, request in LONG.items()}


def test_preempted(model: Model, cache: Path, long_alone: dict[str, Got]) -> None:
    tight = Engine(model, cache, kv_tokens=192, max_context=160)
    assert tight.run(LONG.values()) == long_alone
    assert EventKind.PREEMPTED in tight.events


@pytest.mark.parametrize(
    ("policy", "tiers"),
    [
        ("lru", "disk"),
        ("lfu", "disk"),
        ("cost", "disk"),
        ("ttl", ""),
        pytest.param("lru", "valkey", marks=needs_server),
        pytest.param("cost", "disk valkey", marks=needs_server),
    ],
)
def test_preempted_into_tiers_under_every_policy(
    model: Model,
    cache: Path,
    alone: dict[str, Got],
    long_alone: dict[str, Got],
    tmp_path: Path,
    policy: str,
    tiers: str,
) -> None:
    """What comes back from a tier after a preemption, or after an eviction that the policy chose, has the same bits."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    with running(Server, tmp_path) if "valkey" in tiers else nullcontext() as valkey:
        spec = EngineSpec(
            "",
            kv_disk=str(tmp_path / "kv") if "disk" in tiers else None,
            kv_valkey=valkey.url if valkey else None,
            kv_key_file=str(secret),
        )
        ttl = 3600.0 if policy == "ttl" else 0.0
        tight = Engine(model, cache, tiers=spec, kv_tokens=192, max_context=160, kv_policy=policy, kv_ttl=ttl)
        deadline = time.monotonic() + 20
        while not all(tier.up for tier in tight.core.gauges.tiers.values()):  # its thread has to connect first
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert tight.run(LONG.values()) == long_alone
        assert EventKind.PREEMPTED in tight.events
        assert tight.run(REQUESTS.values(), stagger=2) == alone
        assert tight.run(LONG.values()) == long_alone
        tight.core.close()
        gauges = tight.core.gauges
        assert (gauges.resumed[1] > 0) == bool(tiers)
        assert not any(sum(tier.misses.values()) for tier in gauges.tiers.values())


def test_one_thread(model: Model, cache: Path, alone: dict[str, Got]) -> None:
    assert Engine(model, cache, threads=1).run(REQUESTS.values()) == alone


def test_more_threads_than_cores(model: Model, cache: Path, alone: dict[str, Got]) -> None:
    names = ["greedy", "shared"]
    assert Engine(model, cache, threads=5).run(REQUESTS[n] for n in names) == {n: alone[n] for n in names}


@pytest.mark.parametrize("order", list(permutations(["greedy", "one", "shared"])), ids=" ".join)
def test_every_order_of_arrival(model: Model, cache: Path, alone: dict[str, Got], order: Sequence[str]) -> None:
    engine = Engine(model, cache)
    assert engine.run([REQUESTS[name] for name in order], stagger=3) == {name: alone[name] for name in order}


def test_a_seeded_request_keeps_its_seed_beside_unseeded_ones(model: Model, cache: Path, alone: dict[str, Got]) -> None:
    others = [
        Submit(f"other {i}", prompt(50 + i, 12), SamplingParams(max_tokens=10, temperature=0.9, seed=1000 + i))
        for i in range(5)
    ]
    got = Engine(model, cache).run([*others[:3], REQUESTS["one"], *others[3:]])
    assert got["one"] == alone["one"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(60, temperature=0.0, logprobs=1),
        SamplingParams(60, temperature=1.0, seed=5, logit_bias={500: 40.0, 501: 37.5}, logprobs=0),
    ],
    ids=["greedy", "sampled"],
)
def test_drafted(model: Model, cache: Path, params: SamplingParams) -> None:
    """Text that goes in a loop: what is computed along with its drafts has the bits of one token at a time."""
    loop = [Submit("loop", prompt(7, 11) * 6, params)]
    beside = [*loop, REQUESTS["nucleus"], REQUESTS["penalised"]]
    plain, quick = Engine(model, cache, draft_tokens=0), Engine(model, cache, prefix_cache=False)
    truth = plain.run(loop)
    assert quick.run(loop) == truth
    drafts, drafted, accepted = quick.core.gauges.drafts
    assert 0 < accepted <= drafted
    assert quick.core.steps == plain.core.steps - accepted
    assert quick.run(beside)["loop"] == truth["loop"]
    assert quick.core.gauges.drafts[0] > drafts
