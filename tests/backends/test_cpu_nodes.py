"""Threads and memory are placed by NUMA node where there are several; elsewhere nothing is touched."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.cpu import CpuBackend, nodes
from tailrace.backends.cpu.nodes import Node, find, layout, seats
from tailrace.models import load_model, open_checkpoint
from tests.batches import logits_of

MODEL = Path(__file__).parent.parent / "golden" / "models" / "llama"
PROMPT = np.load(Path(__file__).parent.parent / "golden" / "prompt.npy").tolist()[:40]
ALLOWED = frozenset(os.sched_getaffinity(0))


@pytest.fixture
def unbound() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, ALLOWED)


def tree(root: Path, has_memory: str | None, *cpulists: str) -> Path:
    for n, cpus in enumerate(cpulists):
        (root / f"node{n}").mkdir()
        (root / f"node{n}" / "cpulist").write_text(cpus + "\n")
    if has_memory is not None:
        (root / "has_memory").write_text(has_memory + "\n")
    return root


def test_nodes_are_those_that_have_allowed_cpus(tmp_path: Path) -> None:
    root = tree(tmp_path, "0,2-3", "0-3,8", "4-7,9", "", "10-11")  # node 1 has no memory, node 2 only memory
    assert find(root, {0, 1, 2, 3, 8, 4, 5, 99}) == [
        Node(0, frozenset({0, 1, 2, 3, 8})),
        Node(1, frozenset({4, 5}), memory=False),
    ]
    assert find(root, {10}) == [Node(3, frozenset({10}))]


@pytest.mark.parametrize("cpulists", [("0-1", "2-x"), ()])
def test_a_system_that_does_not_say_has_no_nodes(tmp_path: Path, cpulists: tuple[str, ...]) -> None:
    assert find(tree(tmp_path, None, *cpulists), {0, 1, 2}) == []
    assert find(tmp_path / "missing", {0}) == []


class Threads:
    """A program that only notes what its threads are bound to."""

    def __init__(self, threads: int, error: int = 0) -> None:
        self.threads = threads
        self.error = error
        self.bound: list[tuple[int, list[int]]] = []

    def bind(self, thread: int, cpus: list[int]) -> int:
        self.bound.append((thread, cpus))
        return self.error


def test_threads_have_a_core_each_where_there_are_as_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 2, 4})
    all_of_them, fewer, more, refused = Threads(3), Threads(2), Threads(4), Threads(3, errno.EINVAL)
    for program in (all_of_them, fewer, more, refused):
        nodes.spread(program)  # type: ignore[arg-type]
    assert all_of_them.bound == [(1, [4]), (2, [7])]  # the calling thread is free
    assert fewer.bound == more.bound == []
    assert refused.bound == [(1, [4])]
    assert "a thread could not be kept on one core: Invalid argument" in caplog.text


def test_threads_fill_the_nodes_in_order_and_in_proportion() -> None:
    two = [Node(0, frozenset({0, 1, 2, 3})), Node(2, frozenset({4, 5}))]
    assert seats(two, 6) == [0, 0, 0, 0, 1, 1]
    assert seats(two, 3) == [0, 0, 1]
    assert seats(two, 1) == [0]
    assert seats(two, 12) == [0] * 8 + [1] * 4
    assert seats(two[:1], 3) == [0, 0, 0]
    assert seats([Node(n, frozenset({n})) for n in range(4)], 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_page_lies_with_the_node_that_reads_it(count: int) -> None:
    chairs = [t * count // 4 for t in range(4)]
    reads = [(t, 1000 + 100 * t, 100) for t in range(4)]
    share = 400 // count
    assert layout(reads, chairs, 1000, 1400, 10) == [(1000 + share * n, share, n) for n in range(count)]
    # only what is inside counts, and what a page's end leaves over goes with the page
    assert layout(reads, chairs, 1050, 1350, 10)[0] == (1050, min(share - 50, 300), 0)
    assert layout(reads, chairs, 5000, 6000, 10) == []


def test_more_threads_than_tiles_leave_the_rest_where_it_is() -> None:
    assert layout([(0, 100, 10), (1, 110, 10)], [0, 0, 1, 1], 0, 200, 10) == [(100, 20, 0)]


def test_matrices_smaller_than_pages_are_shared_out_evenly() -> None:
    reads = [(t, 40 * m + 20 * t, 20) for m in range(100) for t in range(2)]
    runs = layout(reads, [0, 1], 0, 4000, 400)
    given = [sum(size for _, size, node in runs if node == n) for n in range(2)]
    assert given == [2000, 2000]
    assert sorted(a for a, _, _ in runs) == [a for a, _, _ in runs]


def program_of(threads: int, cache: Path | None = None, placed: list[Node] | None = None) -> CpuBackend:
    model = load_model(open_checkpoint(MODEL), max_context=64)
    return CpuBackend(
        model, pages=8, max_context=64, step_tokens=64, max_running=2, threads=threads, cache_dir=cache, nodes=placed
    )


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_lanes_read_every_byte_of_the_products_once(threads: int) -> None:
    backend = program_of(threads)
    reads = backend._program.reads()
    assert {t for t, _, _ in reads} <= set(range(threads))
    spans = sorted((address, address + size) for _, address, size in reads)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    products = [tile for name, tile in backend._store._tiles.items() if "embed" not in name]
    assert sum(end - begin for begin, end in spans) == sum(tile.nbytes for tile in products)


def policies(begin: int, size: int) -> set[str]:
    """Of /proc/self/numa_maps: the policies of the mappings that [begin, begin + size) lies in."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    known = sorted((int(words[0], 16), words[1]) for words in lines)
    first = max(at for at, _ in known if at <= begin)
    return {policy for at, policy in known if first <= at < begin + size}


def may_place() -> bool:
    page = np.zeros(1 << 16, np.uint8)
    try:
        nodes.set_policy(-(-page.ctypes.data // 4096) * 4096, 4096, 0, [])
    except OSError:
        return False
    return Path("/proc/self/numa_maps").exists()


@pytest.mark.skipif(not may_place(), reason="this system lets nobody say where memory lies")
def test_weights_and_pools_get_their_policy_and_the_same_bits(tmp_path: Path, unbound: None) -> None:
    truth = logits_of(program_of(2, tmp_path, []), PROMPT, range(40))
    first, last = min(ALLOWED), max(ALLOWED)
    backend = program_of(2, tmp_path, [Node(0, frozenset({first})), Node(0, frozenset({last}))])
    assert policies(*backend._store.copy) == {"prefer:0"}
    assert {policy for pool in backend._program.pools() for policy in policies(*pool)} == {"interleave:0"}
    assert os.sched_getaffinity(0) == {first}
    assert np.array_equal(logits_of(backend, PROMPT, range(40)), truth)
    bound = [Path(f"/proc/self/task/{t}/status").read_text() for t in os.listdir("/proc/self/task")]
    assert any(re.search(rf"^Cpus_allowed_list:\t{last}$", status, re.MULTILINE) for status in bound)
    del backend
    assert os.sched_getaffinity(0) == ALLOWED


def test_what_the_system_refuses_is_said_once_and_changes_nothing(
    tmp_path: Path, unbound: None, caplog: pytest.LogCaptureFixture
) -> None:
    truth = logits_of(program_of(2, tmp_path, []), PROMPT, range(40))
    backend = program_of(2, tmp_path, [Node(1000, ALLOWED), Node(1001, ALLOWED)])
    assert np.array_equal(logits_of(backend, PROMPT, range(40)), truth)
    assert len([message for message in caplog.messages if "NUMA" in message]) == 1


def test_one_node_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "set_policy", None)
    program_of(2, tmp_path, [Node(0, frozenset({min(ALLOWED)}))])
    assert os.sched_getaffinity(0) == ALLOWED
