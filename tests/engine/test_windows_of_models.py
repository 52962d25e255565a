"""Models with windows through the real engine core on the real kernels: the bits are those of an engine that keeps
every page, whatever is let go, found again, preempted or aborted; and pools are as large as `tailrace info` says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tailrace.backends.cpu import CpuBackend
from tailrace.backends.groups import page_groups
from tailrace.engine import process
from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import Grammars
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import load, open_transfers, pool_sizes
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.spec import EngineSpec
from tailrace.models import describe, load_model, open_checkpoint
from tailrace.text.grammar import Grammar
from tests.fakes import FakeCompiler
from tests.models import random_llama

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ["qwen2-window", "mistral-window"]  # windows of 16 in two of three layers, and in all
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
CONTEXT = 320

Got = tuple[list[int], list[float]]


def requests() -> list[Submit]:
    """Long and short ones, some of which share a beginning; greedy and not."""
    rng = np.random.default_rng(4)
    made = []
    for number in range(14):
        stem = PROMPT[: int(rng.choice([0, 40, 100, 150]))]
        own = PROMPT[1000 + 50 * number :][: int(rng.integers(1, 60))]
        sampling = SamplingParams(
            max_tokens=int(rng.choice([2, 20, 90])), temperature=float(rng.choice([0.0, 0.8])), seed=number, logprobs=0
        )
        made.append(Submit(f"r{number}", [*stem, *own], sampling))
    return made


def formed() -> list[Submit]:
    """The same, two of three with long runs of tokens that a grammar forces."""
    forced = " ".join(str(20 + at) for at in range(40))
    grammar = Grammar("regex", f"? {forced} ? ? {forced}")
    return [replace_params(one, logprobs=-1, grammar=grammar if at % 3 else None) for at, one in enumerate(requests())]


def replace_params(submit: Submit, **changes: object) -> Submit:
    return structs.replace(submit, params=structs.replace(submit.params, **changes))


def served(
    name: str,
    config: EngineConfig,
    submits: Sequence[Submit],
    *,
    grouped: bool,
    abort: bool = False,
    disk: Path | None = None,
    found: Callable[[int], object] = lambda _: None,
) -> dict[str, Got]:
    """Each request's tokens and log-probabilities; books are checked after every step. `found` is told how many prompt
    tokens came from `disk`."""
    model = load_model(open_checkpoint(GOLDEN / "models" / name), max_context=CONTEXT)
    groups = page_groups(model.attentions, CONTEXT) if grouped else None
    backend = CpuBackend(
        model,
        pages=(config.pages, *config.sliding_pages) if grouped else config.pages,
        groups=groups,
        max_context=CONTEXT,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        threads=2,
    )
    transfers = open_transfers(EngineSpec("", kv_disk=str(disk) if disk else None), backend)
    grammars = Grammars(lambda: FakeCompiler(model.vocab), thread=False)
    core = EngineCore(
        backend, config, eos_ids=(), vocab_size=model.vocab, identity=b"m", transfers=transfers, grammars=grammars
    )
    core.settle()
    got: dict[str, Got] = {submit.request: ([], []) for submit in submits}
    waiting = list(submits)
    step = 0
    while waiting or core.has_work or not core.idle:
        if waiting and step % 3 == 0:
            core.submit(waiting.pop(0))
        if abort and step % 17 == 16:
            core.abort([f"r{step // 17}"])
        grammars.work()
        news = core.step()
        core.check_integrity()
        for output in news.outputs if news else ():
            assert output.finish in (None, "length", "stop", "abort"), output.error
            got[output.request][0].extend(output.tokens)
            got[output.request][1].extend(found.logprob for found in output.logprobs)
        step += 1
    if grouped and len(config.windows) and config.prefix_cache:
        assert core.scheduler.prefix_hits or abort or not config.max_preemptions
    gauges = core.gauges
    found(sum(core.scheduler.prefix_loads.values()))
    assert gauges.used_pages == 0
    assert all(window.used_pages == 0 for window in gauges.windows)
    core.close()
    return got


@pytest.fixture(scope="module", params=NAMES)
def alone(request: pytest.FixtureRequest) -> tuple[str, dict[str, Got]]:
    """What everybody gets where every page is kept and nothing is shared."""
    config = EngineConfig(kv_tokens=8192, max_context=CONTEXT, step_tokens=64, max_running=4, prefix_cache=False)
    return request.param, served(request.param, config, requests(), grouped=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_tokens": 4096, "step_tokens": 64},
        {"kv_tokens": 4096, "step_tokens": 17, "prefix_cache": False},
        {"kv_tokens": 640, "step_tokens": 33},  # preempts
        {"kv_tokens": 2048, "step_tokens": 48, "window_pages": (12,)},  # sides are evicted, hits shortened
    ],
)
def test_the_bits_are_those_of_an_engine_that_keeps_every_page(
    alone: tuple[str, dict[str, Got]], changes: dict[str, object]
) -> None:
    name, want = alone
    settings = {"max_context": CONTEXT, "max_running": 4, "windows": (16,), **changes}
    assert served(name, EngineConfig(**settings), requests(), grouped=True) == want  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_forced_tokens_get_the_same_bits_too(name: str) -> None:
    whole = EngineConfig(kv_tokens=8192, max_context=CONTEXT, step_tokens=64, max_running=4, prefix_cache=False)
    want = served(name, whole, formed(), grouped=False)
    assert max(len(tokens) for tokens, _ in want.values()) > 80
    for changes in (
        {"kv_tokens": 4096},
        {"kv_tokens": 320},  # preempts
        {"kv_tokens": 4096, "window_pages": (10,)},  # preempts for the windows
        {"kv_tokens": 640, "max_preemptions": 0},
    ):
        settings = {"max_context": CONTEXT, "step_tokens": 48, "max_running": 4, "windows": (16,), **changes}
        assert served(name, EngineConfig(**settings), formed(), grouped=True) == want  # type: ignore[arg-type]


def test_aborted_requests_leave_the_others_as_they_are(alone: tuple[str, dict[str, Got]]) -> None:
    name, want = alone
    config = EngineConfig(kv_tokens=1024, max_context=CONTEXT, step_tokens=40, max_running=4, windows=(16,))
    found = served(name, config, requests(), grouped=True, abort=True)
    for request, (tokens, logprobs) in found.items():
        assert tokens == want[request][0][: len(tokens)]
        assert logprobs == want[request][1][: len(logprobs)]
    assert any(len(tokens) < len(want[request][0]) for request, (tokens, _) in found.items())


def test_from_disk_too(alone: tuple[str, dict[str, Got]], tmp_path: Path) -> None:
    """What one engine has stored, another resumes from, also where its own windows have long moved on."""
    name, want = alone
    loaded: list[int] = []
    for tokens in (4096, 4096, 640):
        config = EngineConfig(kv_tokens=tokens, max_context=CONTEXT, step_tokens=48, max_running=4, windows=(16,))
        assert served(name, config, requests(), grouped=True, disk=tmp_path, found=loaded.append) == want
    assert loaded[1] > 300
    assert loaded[2] > 0


def folder(tmp_path: Path, name: str) -> Path:
    """A golden model, with a tokenizer that can be served."""
    made = random_llama.write(tmp_path / "made")
    shutil.copytree(GOLDEN / "models" / name, tmp_path / name)
    shutil.copy(made / "tokenizer.json", tmp_path / name / "tokenizer.json")
    return tmp_path / name


def test_a_disk_serves_models_with_windows(tmp_path: Path) -> None:
    path = folder(tmp_path, "qwen2-window")
    spec = EngineSpec(str(path), cache_dir=str(tmp_path / "cache"), kv_tokens=512, kv_disk=str(tmp_path / "kv"))
    loaded = load(spec)
    process.warm_up(loaded)
    assert loaded.core.idle
    loaded.core.close()


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral-window", "qwen3-biased-window"])
def test_info_and_the_engine_agree_to_the_byte(tmp_path: Path, name: str, tokens: int) -> None:
    path = folder(tmp_path, name)
    loaded = load(EngineSpec(str(path), cache_dir=str(tmp_path / "cache"), kv_tokens=tokens))
    try:
        info = describe(open_checkpoint(path))
        assert loaded.kv_bytes == sum(pool.bytes for pool in loaded.kv_pools) == info.pool_bytes(tokens)
        assert [pool.window for pool in loaded.kv_pools] == [group.window or 0 for group in info.groups]
    finally:
        loaded.core.close()


def test_a_budget_in_bytes_gives_a_model_with_windows_more_tokens() -> None:
    shape = replace(load_model(open_checkpoint(GOLDEN / "models" / "qwen2-window")).config, head_dim=16)
    token_bytes = 2 * 2 * shape.kv_heads * shape.head_dim * shape.layers
    spec = EngineSpec("m", max_context=512, step_tokens=64)
    sizes = {}
    for windows in ((None, 16, 16), (None, None, None)):
        sizes[windows] = pool_sizes(spec, replace(shape, windows=windows), 4 * 640 * token_bytes)
    assert sizes[None, None, None] == (640, 512)
    assert sizes[None, 16, 16][0] > 1.4 * 640
    assert sizes[None, 16, 16][1] == 512
