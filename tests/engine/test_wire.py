"""Frames, however the stream is cut."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.wire import Line, Splitter, frame, pair


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_messages_come_out_whole_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, messages))
    splitter, came, at, turn = Splitter(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        came += [bytes(one) for one in splitter.split(memoryview(stream[at : at + size]))]
        at, turn = at + size, turn + 1
    assert came == messages


def test_messages_larger_than_the_sockets_buffer_arrive_and_senders_do_not_mix() -> None:
    ours, theirs = pair()
    near, far = Line(ours), Line(theirs)
    sent = [bytes([value]) * 300_000 for value in range(8)]
    senders = [threading.Thread(target=near.send, args=(message,)) for message in sent]
    for sender in senders:
        sender.start()
    came = [far.receive() for _ in sent]
    for sender in senders:
        sender.join()
    assert sorted(one or b"" for one in came) == sent
    near.close()
    assert far.receive() is None
    far.close()
