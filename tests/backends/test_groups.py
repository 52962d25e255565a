"""Page groups: what each layer keeps, how large pools are, and that no kernel reads what a window has let go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.backends import PAGE_SIZE, Attention, Backend
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.groups import (
    PIECE,
    affordable_pages,
    first_page,
    most_pages,
    page_groups,
    plan_pages,
    pool_bytes,
)
from tailrace.backends.reference import ReferenceBackend
from tailrace.models import load_model, open_checkpoint
from tests.batches import batch
from tests.models import random_llama

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
NAMES = ["qwen2-window", "mistral-window", "qwen3-biased-window"]
CONTEXT, PAGES = 512, 40


def layer(at: int, window: int | None) -> Attention:
    return Attention(at, 4, 2, 16, 0.25, window)


def test_layers_with_one_window_are_one_group_and_full_attention_comes_first() -> None:
    groups = page_groups([layer(0, 64), layer(1, None), layer(2, 16), layer(3, 64), layer(4, 4096)], 4096)
    assert [(g.window, [spec.layer for spec in g.layers]) for g in groups] == [
        (None, [1, 4]),  # a window of the whole context hides nothing
        (16, [2]),
        (64, [0, 3]),
    ]


def test_a_model_without_full_attention_has_its_group_all_the_same() -> None:
    full, sliding = page_groups([layer(0, 64)], 4096)
    assert (full.window, full.layers, full.page_bytes()) == (None, (), 0)
    assert sliding.page_bytes() == 2 * 16 * 2 * 16 * 2


@given(window=st.integers(1, 600), chunk=st.integers(1, 300), tokens=st.integers(1, 2000), data=st.data())
def test_no_step_needs_more_pages_than_the_most(window: int, chunk: int, tokens: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, tokens - 1))
    end = min(tokens, begin + chunk)
    first = first_page(window, begin)
    assert first * PAGE_SIZE <= max(0, begin - window + 1)  # the first position that is seen has its page
    assert first * PAGE_SIZE % PIECE == 0
    assert -(-end // PAGE_SIZE) - first <= most_pages(window, tokens, chunk)


@given(
    windows=st.lists(st.integers(1, 5000), max_size=3),
    pages=st.integers(2, 2000),
    context=st.integers(1, 20_000),
    chunk=st.integers(2, 600),
)
def test_every_pool_holds_one_request_and_none_is_larger_than_that_of_full_attention(
    windows: list[int], pages: int, context: int, chunk: int
) -> None:
    context = min(context, pages * PAGE_SIZE)
    for window, planned in zip(windows, plan_pages(windows, pages, context, chunk), strict=True):
        assert most_pages(window, context, chunk) <= planned <= pages


def test_pools_fill_up_together_where_requests_are_of_every_length_alike() -> None:
    (planned,) = plan_pages([4096], 8192, 32768, 512)
    most = most_pages(4096, 32768, 512)
    lengths = range(1, 2049)
    share = sum(min(n, most) for n in lengths) / sum(lengths)
    assert planned == -(-8192 * share // 1)
    assert 0.25 < share < 0.28


@settings(max_examples=30)
@given(size=st.integers(100_000, 1 << 30), context=st.integers(64, 40_000), window=st.sampled_from([None, 128, 4096]))
def test_a_budget_in_bytes_is_kept_and_used(size: int, context: int, window: int | None) -> None:
    groups = page_groups([layer(0, None), layer(1, window), layer(2, window)], context)
    pages = affordable_pages(groups, size, context, 512)
    assert pool_bytes(groups, pages, context, 512) <= size
    assert pool_bytes(groups, pages + 1, context, 512) > size


@pytest.fixture(scope="module")
def whole_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32, which matrix instructions take."""
    folder = random_llama.write(tmp_path_factory.mktemp("models") / "m")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 40}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def made(kind: str, path: Path, kernels: str | None, grouped: bool) -> tuple[Backend, int]:
    """The backend, and the number of its groups."""
    model = load_model(open_checkpoint(path), max_context=CONTEXT)
    groups = page_groups(model.attentions, CONTEXT) if grouped else None
    pages = (PAGES,) * len(groups) if groups else PAGES
    if kind == "reference":
        return ReferenceBackend(model, pages=pages, groups=groups), len(groups or (None,))
    sizes = {"max_context": CONTEXT, "step_tokens": 96, "max_running": 4}
    backend = CpuBackend(model, pages=pages, groups=groups, threads=2, kernels=kernels, **sizes)
    return backend, len(groups or (None,))


def poison(backend: Backend, page: int, group: int, groups: int) -> None:
    """Fills a group's page with NaN."""
    nothing = bytearray(b"\xff" * backend.page_bytes)
    backend.write_page(tuple(page if at == group else -1 for at in range(groups)), nothing)


@pytest.mark.parametrize("chunk", [96, 7, 1])
@pytest.mark.parametrize(
    ("kind", "kernels"), [("reference", None), *(("cpu", kernels) for kernels in available_kernels())]
)
@pytest.mark.parametrize("name", [*NAMES, "whole tiles"])
def test_pages_that_a_window_has_let_go_are_never_read(
    name: str, kind: str, kernels: str | None, chunk: int, whole_tiles: Path
) -> None:
    """Every page that a step may not see any more is overwritten with NaN before it, and its entry is that of a page
    full of them: the logits are those of a backend that keeps every page."""
    path = whole_tiles if name == "whole tiles" else GOLDEN / "models" / name
    plain, _ = made(kind, path, kernels, grouped=False)
    backend, groups = made(kind, path, kernels, grouped=True)
    model = load_model(open_checkpoint(path), max_context=CONTEXT)
    windows = [group.window for group in page_groups(model.attentions, CONTEXT)]
    tokens = [token % model.vocab for token in PROMPT[:210]]
    full = list(range(1, 1 + -(-len(tokens) // PAGE_SIZE)))
    tables = [list(full) for _ in windows]
    for group, window in enumerate(windows):
        if window is not None:
            poison(backend, 0, group, groups)
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        for group, window in enumerate(windows):
            for gone in range(first_page(window, begin) if window is not None else 0):
                if tables[group][gone]:
                    poison(backend, tables[group][gone], group, groups)
                    tables[group][gone] = 0
        wanted = range(len(part)) if chunk > 1 or begin % 31 == 0 or begin > 200 else range(1)
        want = plain.run(batch([(part, begin, full)], wanted)).logits
        got = backend.run(batch([(part, begin, [page for table in tables for page in table])], wanted)).logits
        assert want is not None
        assert got is not None
        assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_a_page_of_all_groups_is_one_block_and_can_be_put_back_in_part(kind: str) -> None:
    backend, _ = made(kind, GOLDEN / "models" / "qwen2-window", None, grouped=True)
    table = [3, 4, 5, 6]
    backend.run(batch([(PROMPT[:64], 0, [*table, *table])], [63]))
    page = backend.read_page((3, 4))
    assert len(page) == backend.page_bytes
    backend.write_page((20, 21), page)
    assert backend.read_page((20, 21)) == page
    before = backend.read_page((22, 23))
    backend.write_page((22, -1), page)
    assert backend.read_page((22, 21)) == page
    assert backend.read_page((23, 23))[len(page) // 3 :] == before[len(page) // 3 :]  # one of three layers is full
    with pytest.raises(ValueError, match=r"bytes|size"):
        backend.write_page((1, 1), page[:-1])


def test_pools_and_groups_have_to_agree() -> None:
    model = load_model(open_checkpoint(GOLDEN / "models" / "qwen2-window"), max_context=CONTEXT)
    with pytest.raises(ValueError, match="1 pools for 2 groups"):
        ReferenceBackend(model, pages=PAGES, groups=page_groups(model.attentions, CONTEXT))


def test_a_table_that_is_not_as_wide_for_each_group_is_refused() -> None:
    backend, _ = made("cpu", GOLDEN / "models" / "qwen2-window", None, grouped=True)
    with pytest.raises(ValueError, match="as wide for each group"):
        backend.run(batch([(PROMPT[:16], 0, [1, 2, 3])], [15]))
    with pytest.raises(ValueError, match="too short"):
        backend.run(batch([(PROMPT[:64], 0, [1, 2, 3, 4])], [63]))
    with pytest.raises(ValueError, match="past the pool"):
        backend.run(batch([(PROMPT[:16], 0, [1, PAGES])], [15]))
