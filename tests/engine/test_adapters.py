"""Adapters in a running engine: answers are those that each request gets alone, pages are never another adapter's, and
what is loaded or unloaded meanwhile disturbs nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.adapters import CpuAdapter
from tailrace.engine.adapters import Adapters
from tailrace.engine.config import EngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.protocol import Adapted, Output, SamplingParams, Submit
from tailrace.engine.spec import AdapterSpec
from tailrace.engine.transfer import Transfers
from tailrace.kv.events import BlockStored, Changes, events_of
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.models.adapters import ReadAdapter, read_adapter
from tailrace.terms import ModelError
from tests.fakes import MemoryTier
from tests.models import random_llama, random_lora

CONTEXT = 256
PROMPT = [(7 * at + at // 5) % random_llama.VOCAB for at in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = random_llama.write(tmp_path_factory.mktemp("models") / "llama")
    return load_model(open_checkpoint(folder), max_context=CONTEXT)


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By id; 3 is a copy of 1."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        1: random_lora.make(root / "1", model, 1),
        2: random_lora.make(root / "2", model, 2, rank=20, targets=("q_proj", "v_proj", "down_proj")),
        3: random_lora.make(root / "3", model, 1),
    }


class Engine:
    """A core over the cpu backend, stepped by hand and checked after every step."""

    def __init__(
        self,
        model: Model,
        folders: dict[int, Path],
        loaded: Sequence[int] = (1, 2),
        *,
        most: int = 4,
        tier: MemoryTier | None = None,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {"kv_tokens": 2048, "max_context": CONTEXT, "step_tokens": 64, **config}
        self.config = EngineConfig(**settings)
        self.folders = folders
        self.backend = Counting(
            model,
            pages=self.config.pages,
            max_context=CONTEXT,
            step_tokens=self.config.step_tokens,
            max_running=self.config.max_running,
            threads=2,
        )
        self.adapters = Adapters(self.backend, lambda path: read_adapter(path, model), most, thread=False)
        self.transfers = Transfers([tier], self.backend, thread=False) if tier is not None else None
        self.core = EngineCore(
            self.backend,
            self.config,
            eos_ids=(),
            vocab_size=random_llama.VOCAB,
            identity=b"it",
            transfers=self.transfers,
            adapters=self.adapters,
        )
        self.told: list[Adapted] = []
        self.core.on_adapted = self.told.append
        self.adapters.load_now([self.spec(adapter) for adapter in loaded])
        self.core.settle()
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}
        self.cached: dict[str, int] = {}

    def spec(self, adapter: int) -> AdapterSpec:
        return AdapterSpec(adapter, f"adapter {adapter}", str(self.folders[adapter]))

    def submit(
        self, name: str, adapter: int, prompt: Sequence[int] = PROMPT, max_tokens: int = 12, **params: object
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
        self.core.submit(Submit(name, list(prompt), sampling, adapter=adapter))

    def step(self) -> None:
        news = self.core.step()
        self.core.check_integrity()
        for output in news.outputs if news else ():
            self.tokens.setdefault(output.request, []).extend(output.tokens)
            if output.tokens:
                self.cached.setdefault(output.request, output.cached)
            if output.finish is not None:
                self.last[output.request] = output

    def run(self) -> None:
        while self.core.has_work or (self.transfers is not None and self.transfers.work()):
            self.step()
        gauges = self.core.gauges
        assert (gauges.running, gauges.waiting, gauges.used_pages) == (0, 0, 0)

    def ask(self, name: str, adapter: int, prompt: Sequence[int] = PROMPT, **params: object) -> tuple[list[int], int]:
        """One request by itself: its tokens, and how many of its prompt's were cached."""
        self.submit(name, adapter, prompt, **params)
        self.run()
        assert self.last[name].error == ""
        return self.tokens[name], self.cached[name]


class Counting(CpuBackend):
    """Knows which numbers have an adapter."""

    def __init__(self, model: Model, **options: object) -> None:
        super().__init__(model, **options)
        self.numbers: set[int] = set()

    def set_adapter(self, number: int, adapter: object) -> None:
        assert adapter is None or isinstance(adapter, CpuAdapter)
        super().set_adapter(number, adapter)
        (self.numbers.discard if adapter is None else self.numbers.add)(number)


@pytest.fixture
def engine(model: Model, folders: dict[int, Path]) -> Callable[..., Engine]:
    def make(*loaded: int, **options: object) -> Engine:
        return Engine(model, folders, loaded or (1, 2), **options)

    return make


@pytest.fixture(scope="module")
def alone(model: Model, folders: dict[int, Path]) -> dict[int, list[int]]:
    """What PROMPT gets with each adapter, and with none, where nothing else runs and nothing is cached."""
    engine = Engine(model, folders, prefix_cache=False, draft_tokens=0)
    found = {adapter: engine.ask(str(adapter), adapter)[0] for adapter in (0, 1, 2)}
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found


@pytest.mark.parametrize("options", [{}, {"draft_tokens": 0, "step_tokens": 17}])
def test_many_in_one_batch_get_what_they_get_alone(
    engine: Callable[..., Engine], alone: dict[int, list[int]], options: dict[str, int]
) -> None:
    busy = engine(**options)
    for at in range(9):
        busy.submit(str(at), at % 3)
        busy.step()
    busy.run()
    assert busy.tokens == {str(at): alone[at % 3] for at in range(9)}


def test_those_that_are_preempted_go_on_with_their_adapter(engine: Callable[..., Engine]) -> None:
    roomy = engine(prefix_cache=False)
    small = engine(prefix_cache=False, kv_tokens=272, step_tokens=512)
    for at in range(9):
        small.submit(str(at), at % 3, max_tokens=40)
    small.run()
    assert small.core.gauges.preemptions > 0
    for adapter in (0, 1, 2):
        truth, _ = roomy.ask(str(adapter), adapter, max_tokens=40)
        assert all(small.tokens[str(at)] == truth for at in range(adapter, 9, 3))


def test_cached_pages_are_never_those_of_another_adapter_or_of_none(
    engine: Callable[..., Engine], alone: dict[int, list[int]]
) -> None:
    busy = engine()
    for adapter in (0, 1, 2):
        assert busy.ask(f"first {adapter}", adapter) == (alone[adapter], 0)
    for adapter in (0, 1, 2):
        assert busy.ask(f"again {adapter}", adapter) == (alone[adapter], 64)


def test_the_same_files_have_the_same_pages_and_others_have_not(
    engine: Callable[..., Engine], alone: dict[int, list[int]]
) -> None:
    """What counts is what is in the files, not what they are called."""
    busy = engine()
    assert busy.ask("a", 1) == (alone[1], 0)
    busy.core.unload_adapter(1)
    busy.core.load_adapter(busy.spec(3))
    busy.adapters.work()
    busy.run()
    assert busy.ask("copy", 3) == (alone[1], 64)
    busy.core.unload_adapter(3)
    busy.folders = {**busy.folders, 4: busy.folders[2]}
    busy.core.load_adapter(busy.spec(4))
    busy.adapters.work()
    busy.run()
    assert busy.ask("other", 4) == (alone[2], 0)


def test_tiers_below_the_pool_tell_adapters_apart(engine: Callable[..., Engine], alone: dict[int, list[int]]) -> None:
    tier = MemoryTier()
    first = engine(tier=tier)
    for adapter in (0, 1):
        first.ask(str(adapter), adapter)
    held = len(tier.pages)
    assert held == 2 * (len(PROMPT) + 11) // 16 == 2 * 5
    second = engine(tier=tier)
    assert second.transfers is not None
    second.transfers.cost.computed(1, 1000.0)  # so slow that whatever is in a tier is loaded
    for adapter, cached in ((2, 0), (1, 64), (0, 64)):
        second.submit(str(adapter), adapter)
        while str(adapter) not in second.last:
            second.step()
            assert second.transfers is not None
            second.transfers.work()
        assert (second.tokens[str(adapter)], second.cached[str(adapter)]) == (alone[adapter], cached)


def test_unloading_lets_what_runs_end_and_then_frees_it(
    engine: Callable[..., Engine], alone: dict[int, list[int]]
) -> None:
    busy = engine()
    assert busy.backend.numbers == {0, 1}
    busy.submit("runs", 1)
    for _ in range(4):
        busy.step()
    busy.core.unload_adapter(1)
    busy.submit("late", 1)
    busy.submit("plain", 0)
    busy.step()
    assert busy.last["late"].error.startswith("adapter_not_loaded: ")
    assert busy.backend.numbers == {0, 1}
    assert busy.core.gauges.adapters == {1: (1, 0), 2: (0, 0)}
    busy.run()
    assert busy.tokens == {"runs": alone[1], "plain": alone[0], "late": []}
    assert len(busy.backend.numbers) == 1
    assert busy.core.gauges.adapters == {2: (0, 0)}


def test_an_aborted_request_holds_its_adapter_as_long_as_its_step_runs(engine: Callable[..., Engine]) -> None:
    busy = engine()
    busy.submit("runs", 1, max_tokens=100)
    busy.submit("other", 2, max_tokens=40)
    for _ in range(6):
        busy.step()
    assert busy.core.running_step
    busy.core.unload_adapter(1)
    busy.core.abort(["runs"])
    assert busy.backend.numbers == {0, 1}
    busy.run()
    assert len(busy.backend.numbers) == 1
    assert len(busy.tokens["other"]) == 40


def test_one_is_loaded_beside_steps_that_follow_by_themselves(
    engine: Callable[..., Engine], alone: dict[int, list[int]]
) -> None:
    busy = engine(2, draft_tokens=0)
    busy.submit("runs", 0, max_tokens=150)
    for _ in range(8):
        busy.step()
    busy.core.load_adapter(busy.spec(1))
    busy.step()
    assert busy.told == []
    assert busy.adapters.work()
    while not busy.told:
        busy.step()
    (told,) = busy.told
    assert (told.id, told.error, told.rank, len(told.digest)) == (1, "", 8, 64)
    assert told.bytes > 0
    assert "runs" not in busy.last
    busy.submit("new", 1)
    busy.run()
    assert busy.tokens["new"] == alone[1]
    assert len(busy.tokens["runs"]) == 150


def test_what_cannot_be_loaded_is_told_and_takes_no_room(engine: Callable[..., Engine], tmp_path: Path) -> None:
    busy = engine(1, most=2)
    for _ in range(3):
        busy.core.load_adapter(AdapterSpec(9, "nine", str(tmp_path / "none")))
        busy.adapters.work()
        busy.run()
    assert ["no such directory" in told.error for told in busy.told] == [True] * 3
    busy.core.load_adapter(busy.spec(2))
    busy.core.load_adapter(busy.spec(3))
    busy.adapters.work()
    busy.run()
    errors = {told.id: told.error for told in busy.told[3:]}
    assert errors[2] == ""
    assert "there are 2 adapters already" in errors[3]
    busy.submit("no", 3)
    busy.run()
    assert busy.last["no"].error.startswith("adapter_not_loaded: ")


def test_one_that_is_unloaded_before_it_has_been_read_never_comes(engine: Callable[..., Engine]) -> None:
    busy = engine(1)
    busy.core.load_adapter(busy.spec(2))
    busy.core.unload_adapter(2)
    busy.adapters.work()
    busy.run()
    assert busy.backend.numbers == {0}
    busy.core.load_adapter(busy.spec(2))
    busy.adapters.work()
    busy.run()
    assert busy.ask("now", 2)[0]


def test_events_name_the_adapter_of_pages(engine: Callable[..., Engine]) -> None:
    busy = engine()
    for adapter in (0, 2):
        busy.ask(str(adapter), adapter)
    events = events_of(Changes(False, list(busy.core.scheduler.index.nodes())))
    stored = {event.lora_id: len(event.block_hashes) for event in events if isinstance(event, BlockStored)}
    assert stored == {None: 5, 2: 5}


def test_pinned_prefixes_are_those_of_the_model_without_adapters(engine: Callable[..., Engine]) -> None:
    busy = engine(kv_pin=(tuple(PROMPT[:48]),))
    for adapter in (1, 2, 0):
        busy.ask(str(adapter), adapter)
    assert busy.core.gauges.pinned_pages == 3
    busy.core.reset_prefix()
    assert busy.ask("again", 1)[1] == 0
    assert busy.ask("kept", 0)[1] == 48


class Stuck:
    """Reads adapters; those of a directory called "gone" only when it is let."""

    def __init__(self, model: Model) -> None:
        self.free = threading.Event()
        self._model = model

    def __call__(self, path: Path) -> ReadAdapter:
        if path.name == "gone":
            assert self.free.wait(60)
            raise ModelError("it is gone")
        return read_adapter(path, self._model)


def loaded(adapters: Adapters, count: int = 1) -> list[Adapted]:
    """What becomes of so many."""
    told: list[Adapted] = []
    end = time.monotonic() + 30
    while len(told) < count:
        assert time.monotonic() < end
        told += adapters.settle()
    return told


def test_a_file_that_never_comes_holds_up_no_other_adapter(model: Model, folders: dict[int, Path]) -> None:
    engine, read = Engine(model, folders, ()), Stuck(model)
    adapters = Adapters(engine.backend, read, 2)
    adapters.load(AdapterSpec(1, "a", "/gone"))
    adapters.load(AdapterSpec(2, "b", str(folders[2])))
    assert adapters.settle() == []
    adapters.unload(1)  # whoever wanted it has waited long enough
    (news,) = loaded(adapters)
    assert (news.id, news.error) == (2, "")
    adapters.load(AdapterSpec(3, "c", str(folders[1])))
    assert "there are 2 adapters already" in loaded(adapters)[0].error  # its number is not free while it may yet come
    read.free.set()
    (news,) = loaded(adapters)
    assert (news.id, news.error) == (1, "it is gone")
    assert adapters.find(1) is None
    adapters.load(AdapterSpec(4, "d", str(folders[1])))
    assert loaded(adapters)[0].error == ""
    adapters.check_integrity({})
    adapters.close()


def test_a_start_waits_for_an_adapter_only_so_long(model: Model, folders: dict[int, Path]) -> None:
    engine, read = Engine(model, folders, ()), Stuck(model)
    adapters = Adapters(engine.backend, read, 3, seconds=0.2)
    specs = [AdapterSpec(1, "a", "/gone"), AdapterSpec(2, "b", str(folders[2]))]
    told = {news.id: news.error for news in adapters.load_now(specs)}
    assert told == {1: "/gone: its files could not be read within 0.2 s (--lora-timeout)", 2: ""}
    read.free.set()
    adapters.close()
