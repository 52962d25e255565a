"""Pages that are copied out of one pool and into another carry everything that a sequence needs to go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends import PAGE_SIZE, Backend
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.reference import ReferenceBackend
from tailrace.models import describe, load_model, open_checkpoint
from tests.batches import batch, logits_of
from tests.fakes import FakeBackend

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.name for path in (GOLDEN / "models").iterdir() if not path.name.startswith("rope-"))
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
PAGES = 24


def on_cpu(name: str, kernels: str | None = None) -> CpuBackend:
    model = load_model(open_checkpoint(GOLDEN / "models" / name), max_context=128)
    return CpuBackend(model, pages=PAGES, max_context=128, step_tokens=64, max_running=4, threads=2, kernels=kernels)


def on_reference(name: str) -> ReferenceBackend:
    return ReferenceBackend(load_model(open_checkpoint(GOLDEN / "models" / name), max_context=128), pages=PAGES)


def goes_on(source: Backend, target: Backend) -> None:
    """A prompt's first 64 tokens on the source's pages 0 to 3, the rest on the target's pages 9, 5, 7, 6 and 2."""
    truth = logits_of(source, PROMPT[:80], range(64, 80), chunk=64)
    table = [9, 5, 7, 6, 2]
    for page, to in enumerate(table[:4]):
        data = source.read_page(page)
        assert len(data) == source.page_bytes
        target.write_page(to, data)
        assert target.read_page(to) == data
        assert target.read_page(to, out := bytearray(len(data))) is out
        assert out == data
    found = target.run(batch([(PROMPT[64:80], 64, table)], range(16))).logits
    assert found is not None
    assert np.array_equal(found, truth)


@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize("name", NAMES)
def test_another_pool_goes_on_where_the_first_stopped(name: str, kernels: str) -> None:
    goes_on(on_cpu(name, kernels), on_cpu(name, kernels))


@pytest.mark.parametrize("name", NAMES)
def test_so_does_the_references(name: str) -> None:
    goes_on(on_reference(name), on_reference(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_takes_what_info_says(name: str) -> None:
    info = describe(open_checkpoint(GOLDEN / "models" / name))
    assert on_cpu(name).page_bytes == PAGE_SIZE * info.kv_bytes_per_token


@pytest.mark.parametrize("make", [on_cpu, on_reference])
def test_data_of_another_size_is_refused(make: Callable[[str], Backend]) -> None:
    backend = make("llama")
    data = backend.read_page(0)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match=r"bytes|size"):
            backend.write_page(0, wrong)


def test_a_page_past_the_pool_is_refused() -> None:
    backend = on_cpu("llama")
    data = backend.read_page(PAGES - 1)
    for page in (-1, PAGES):
        with pytest.raises(ValueError, match="past the pool"):
            backend.read_page(page)
        with pytest.raises(ValueError, match="past the pool"):
            backend.write_page(page, data)


def test_pages_may_be_copied_while_a_step_runs_on_others() -> None:
    backend = on_cpu("llama")
    truth = logits_of(backend, PROMPT[:64], range(64))
    mine = [backend.read_page(page) for page in range(4)]
    step = batch([(PROMPT[:64], 0, [8, 9, 10, 11])], range(64))
    for _ in range(20):
        backend.launch(step)
        for page, data in enumerate(mine):
            backend.write_page(20 + page, data)
            assert backend.read_page(page) == data
        logits = backend.wait().logits
        assert logits is not None
        assert np.array_equal(logits, truth)
    assert [backend.read_page(20 + page) for page in range(4)] == mine
    assert [backend.read_page(8 + page) for page in range(4)] == mine


def test_numerics_name_the_kernels_and_the_build() -> None:
    names = {on_cpu("llama", kernels).numerics for kernels in available_kernels()}
    assert len(names) == len(available_kernels())
    assert on_cpu("llama").numerics == on_cpu("llama").numerics
    kinds = {
        on_reference("llama").numerics,
        ReferenceBackend(load_model(open_checkpoint(GOLDEN / "models" / "llama")), pages=1, kv_dtype="bf16").numerics,
        FakeBackend(1).numerics,
    }
    assert len(kinds) == 3
