"""The page pool counts holders, and a page is free exactly when it has none."""

import pytest

from tailrace.kv.pages import PagePool


def test_pages_are_handed_out_once() -> None:
    pool = PagePool(8)
    taken = pool.take(5)
    assert len(set(taken)) == 5
    assert pool.free == 3
    pool.check_integrity([taken])


def test_more_pages_than_are_free_cannot_be_taken() -> None:
    pool = PagePool(4)
    pool.take(3)
    with pytest.raises(ValueError, match="2 pages asked for, 1 free"):
        pool.take(2)
    assert pool.free == 1


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    assert pool.free == 1
    pool.release([page])
    assert pool.free == 2
    pool.check_integrity([])


def test_a_page_cannot_be_released_twice() -> None:
    pool = PagePool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(taken)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="is free"):
        PagePool(2).share([0])


def test_taking_nothing_takes_nothing() -> None:
    pool = PagePool(2)
    assert pool.take(0) == []
    assert pool.free == 2


def test_a_lost_page_is_noticed() -> None:
    pool = PagePool(4)
    taken = pool.take(2)
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([taken[:1]])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
