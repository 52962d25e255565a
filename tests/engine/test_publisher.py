"""KV events over real sockets: who follows them knows the index, whatever was missed; and the engine never waits."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from tailrace.engine.config import EngineConfig
from tailrace.engine.publisher import MOST_ANSWERS, Publisher
from tailrace.engine.subscribers import Keys
from tailrace.terms import ModelError
from tests.engine.follower import Follower
from tests.fakes import Driver
from tests.kv.view import content

LOCAL = "tcp://127.0.0.1:0"


@contextmanager
def publishing(events: str = LOCAL, replay: str | None = LOCAL, keys: Keys | None = None, **bounds: Any) -> Iterator[
    Publisher
]:  # fmt: skip
    publisher = Publisher(events, replay, keys, **bounds)
    try:
        yield publisher
    finally:
        publisher.close()


def driver(publisher: Publisher, kv_tokens: int = 1024) -> Driver:
    config = EngineConfig(kv_tokens=kv_tokens, max_context=kv_tokens // 2, step_tokens=128, max_running=4)
    return Driver(config, publisher=publisher, check_every=20)


def number(publisher: Publisher) -> int:
    """Of the latest batch that was handed over."""
    return publisher._number


class Traffic:
    """Random requests: prompts that share beginnings, from two tenants, some aborted, some resets."""

    def __init__(self, driver: Driver, seed: int = 1) -> None:
        self.driver = driver
        self.random = random.Random(seed)
        self.count = 0

    def __call__(self, requests: int) -> None:
        for _ in range(requests):
            stem = self.random.randrange(4)
            own = [self.random.randrange(500) for _ in range(self.random.randrange(40))]
            prompt = [stem + 1] * (16 * self.random.randrange(8)) + own or [1]
            name, self.count = f"r{self.count}", self.count + 1
            tenant = self.random.choice(["", "a"])
            self.driver.submit(name, prompt, max_tokens=self.random.randrange(1, 40), ignore_eos=True, tenant=tenant)
            for _ in range(self.random.randrange(6)):
                self.driver.step()
            if self.random.random() < 0.1:
                self.driver.core.abort([name])
            if self.random.random() < 0.05:
                self.driver.core.reset_prefix()
        self.driver.step()  # tells of the last one


@contextmanager
def stepping(driver: Driver) -> Iterator[None]:
    """The engine's loop at rest, which is woken where somebody asks for the state."""
    woken, ended = threading.Event(), threading.Event()
    driver.core.wake = woken.set

    def rest() -> None:
        while woken.wait() and not ended.is_set():
            woken.clear()
            driver.core.step()

    thread = threading.Thread(target=rest)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        woken.set()
        thread.join()


@pytest.mark.parametrize("seed", range(3))
def test_who_hears_everything_knows_exactly_what_the_index_holds(seed: int) -> None:
    with publishing() as publisher, Follower(*publisher.addresses) as follower:
        heard = follower.hear()  # subscribed
        assert heard is not None
        follower.number = heard[0]
        engine = driver(publisher)
        traffic = Traffic(engine, seed)
        for _ in range(10):
            traffic(15)
            follower.follow(number(publisher))
            assert follower.view.pages == content(engine.core.scheduler.index)
        assert engine.core.gauges.kv_batches == publisher.published > 50
        assert engine.core.gauges.kv_batches_dropped == 0
        assert sum(engine.core.gauges.evictions) > 0


def test_the_first_batch_of_an_engine_clears_and_is_numbered_above_those_of_the_engine_before() -> None:
    numbers = []
    for _ in range(2):
        with publishing() as publisher, Follower(*publisher.addresses) as follower:
            heard = follower.hear()
            assert heard is not None
            assert heard[1] == [["AllBlocksCleared"]]
            numbers.append(heard[0])
            engine = driver(publisher)
            Traffic(engine)(20)
            numbers.append(number(publisher))
            time.sleep(0.002)
    assert numbers == sorted(numbers)
    assert numbers[2] > numbers[1] + 1
    assert numbers[-1] < 1 << 53


def test_who_joins_late_has_it_all_from_a_snapshot_and_goes_on_from_its_number() -> None:
    with publishing(kept=5) as publisher:
        engine = driver(publisher)
        traffic = Traffic(engine)
        traffic(60)
        with Follower(*publisher.addresses) as follower, stepping(engine):
            follower.follow(number(publisher))
            assert len(content(engine.core.scheduler.index)) > 20
            assert follower.view.pages == content(engine.core.scheduler.index)
        with Follower(*publisher.addresses) as follower:
            with stepping(engine):
                follower.take_snapshot()
            assert follower.number == number(publisher)
            traffic(30)
            follower.follow(number(publisher))
            assert follower.view.pages == content(engine.core.scheduler.index)


def test_a_gap_is_filled_by_replay() -> None:
    with publishing() as publisher, Follower(*publisher.addresses) as follower:
        heard = follower.hear()
        assert heard is not None
        follower.number = heard[0]
        engine = driver(publisher)
        traffic = Traffic(engine)
        traffic(20)
        while (heard := follower.hear()) is not None and heard[0] < number(publisher):
            pass  # lost
        missed = number(publisher)
        replayed = [found for found, _ in follower.ask((follower.number + 1).to_bytes(8, "big"))]
        assert replayed == list(range(follower.number + 1, missed + 1))
        traffic(5)
        follower.follow(number(publisher))
        assert follower.view.pages == content(engine.core.scheduler.index)
        assert follower.ask((number(publisher) + 1).to_bytes(8, "big")) == []


def test_what_is_no_longer_kept_is_not_replayed_and_the_snapshot_repairs_it() -> None:
    with publishing(kept=3) as publisher, Follower(*publisher.addresses) as follower:
        heard = follower.hear()
        assert heard is not None
        follower.number = heard[0]
        engine = driver(publisher)
        Traffic(engine)(40)
        while (heard := follower.hear()) is not None and heard[0] < number(publisher):
            pass
        replayed = follower.ask((follower.number + 1).to_bytes(8, "big"))
        assert [found for found, _ in replayed] == [number(publisher) - 2 + at for at in range(3)]
        with stepping(engine):
            follower.repair()
        assert follower.number == number(publisher)
        assert follower.view.pages == content(engine.core.scheduler.index)


def test_batches_for_which_there_is_no_room_are_dropped_counted_and_seen_as_a_gap() -> None:
    with publishing(queued=4) as publisher, Follower(*publisher.addresses) as follower:
        heard = follower.hear()
        assert heard is not None
        follower.number = heard[0]
        engine = driver(publisher)
        engine.submit("long", list(range(200)), max_tokens=2)  # eight pages in its first step
        engine.run()
        assert engine.core.gauges.kv_batches_dropped == publisher.dropped > 0
        Traffic(engine)(1)
        with stepping(engine):
            follower.follow(number(publisher))
        assert follower.view.pages == content(engine.core.scheduler.index)


def test_nobody_waits_for_a_subscriber_that_reads_nothing_and_it_sees_a_gap() -> None:
    """The slow one reads nothing until all is over: whoever waited for it would never get there."""
    with publishing(high_water=10, repeat=0.1) as publisher:
        events, replay = publisher.addresses
        with Follower(events, replay, high_water=1) as slow, Follower(events, replay) as quick:
            for one in (slow, quick):
                heard = one.hear()
                assert heard is not None
                one.number = heard[0]
            config = EngineConfig(kv_tokens=8192, step_tokens=4096, max_running=1)
            engine = Driver(config, vocab=1 << 20, publisher=publisher, check_every=100)
            for at in range(300):  # of 30 KB each, more in all than the sockets' buffers hold
                engine.submit(f"r{at}", [100_000 + at] * 4000, max_tokens=1)
                engine.run()
                quick.follow(number(publisher))
            assert publisher.dropped == 0
            assert quick.numbers == sorted(quick.numbers)
            assert set(range(quick.numbers[0], number(publisher))) <= set(quick.numbers)  # nothing was missed
            with stepping(engine):
                slow.follow(number(publisher))
            assert any(after - before > 1 for before, after in itertools.pairwise(slow.numbers))
            assert quick.view.pages == slow.view.pages == content(engine.core.scheduler.index)


def test_requests_that_are_none_are_answered_with_what_is_wrong() -> None:
    with publishing() as publisher, Follower(*publisher.addresses) as follower:
        for frames in ([b"", b"state"], [b"x", b"snapshot/1"], [b"snapshot/1"], [b"", b"1", b"2"], [b"", b""]):
            assert b"a request is" in follower.refused(frames)
        assert follower.ask((0).to_bytes(8, "big")) != []


def test_only_so_many_wait_for_an_answer_at_a_time() -> None:
    with publishing() as publisher, Follower(*publisher.addresses) as follower:
        for _ in range(MOST_ANSWERS):
            follower._ask.send_multipart([b"", b"snapshot/1"])
        assert b"too many" in follower.refused([b"", b"snapshot/1"])


def test_an_asker_that_leaves_or_takes_nothing_is_in_nobodys_way() -> None:
    with publishing() as publisher:
        engine = driver(publisher, 4096)
        Traffic(engine)(100)
        with stepping(engine):
            for _ in range(5):
                with Follower(*publisher.addresses) as gone:
                    gone._ask.send_multipart([b"", b"snapshot/1"])
                    gone._ask.send_multipart([b"", bytes(8)])
            with Follower(*publisher.addresses) as follower:
                follower.take_snapshot()
                assert follower.view.pages == content(engine.core.scheduler.index)


def curve() -> tuple[bytes, bytes]:
    return zmq.curve_keypair()


def test_only_subscribers_with_an_authorised_key_hear_anything() -> None:
    server, friend, stranger = curve(), curve(), curve()
    keys = Keys(server[1].decode(), frozenset([friend[0].decode()]))
    assert server[1].decode() not in repr(keys)
    with publishing(keys=keys) as publisher:
        addresses = publisher.addresses
        with (
            Follower(*addresses, (*friend, server[0])) as welcome,
            Follower(*addresses, (*stranger, server[0])) as other,
            Follower(*addresses) as plain,
            Follower(*addresses, (*friend, stranger[0])) as misled,
        ):
            refused = (other, plain, misled)
            for one in refused:
                one._ask.send_multipart([b"", bytes(8)])
            engine = driver(publisher)
            Traffic(engine)(20)
            with stepping(engine):
                welcome.follow(number(publisher))
            assert welcome.view.pages == content(engine.core.scheduler.index)
            assert all(one.hear(0.2) is None and not one._ask.poll(0) for one in refused)


def test_an_address_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for addresses in ((f"tcp://127.0.0.1:{port}", None), (LOCAL, f"tcp://localhost:{port}")):
            with pytest.raises(ModelError, match=f":{port}: Address already in use"):
                Publisher(*addresses)


def test_an_engine_that_is_closed_lets_go_of_its_addresses() -> None:
    with publishing() as publisher:
        addresses = publisher.addresses
    with publishing(*addresses):
        pass
