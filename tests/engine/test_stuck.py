"""A real engine whose thread is stopped in the midst of a step, while its heartbeats go on."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.engine.client import EngineClient
from tailrace.engine.protocol import Output, SamplingParams, Submit
from tailrace.engine.spec import EngineSpec
from tailrace.engine.supervisor import Bounds
from tailrace.terms import EngineDied

PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 7, 0x4206, 0x4207, 0x40000000

BOUNDS = Bounds(heartbeat=60.0)
"""So that a thread that was stopped while the others wait for it can be let go again."""


class Held:
    """Stops one thread of another process, as a debugger does, until that process ends: at a moment in which it does
    not keep the others from running, which is when `alive` goes on changing."""

    def __init__(self, thread: int, alive: Callable[[], object]) -> None:
        self.since = 0.0
        self._id = thread
        self._alive = alive
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes, self._ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
        self._tracer = threading.Thread(
            target=self._hold
        )  # whatever is asked of a thread that is traced, this one asks
        self._tracer.start()

    def _hold(self) -> None:
        asked = self._ask(PTRACE_SEIZE) and self._ask(PTRACE_INTERRUPT)
        while asked and self._stops():
            stopped = time.monotonic()
            if self._others_run():
                self.since = stopped
            else:
                asked = self._ask(PTRACE_CONT)
                time.sleep(0.003)  # to be stopped elsewhere
                asked = asked and self._ask(PTRACE_INTERRUPT)

    def _stops(self) -> bool:
        """Waits until it has stopped, or ended."""
        try:
            return os.WIFSTOPPED(os.waitpid(self._id, WALL)[1])
        except ChildProcessError:  # its parent was told first
            return False

    def _ask(self, request: int) -> bool:
        """False where it has ended."""
        done = self._ptrace(request, self._id, 0, 0) == 0
        assert done or ctypes.get_errno() == errno.ESRCH, os.strerror(ctypes.get_errno())
        return bool(done)

    def _others_run(self) -> bool:
        seen, news = self._alive(), 0
        end = time.monotonic() + 2.5
        while time.monotonic() < end and news < 2:
            time.sleep(0.02)
            if self._alive() is not seen:
                seen, news = self._alive(), news + 1
        return news == 2

    def end(self) -> None:
        self._tracer.join(30)


@pytest.mark.alone
@pytest.mark.parametrize("tokens", [1, 600])
def test_an_engine_that_is_stuck_in_a_step_is_replaced_within_five_seconds(smollm2: Path, tokens: int) -> None:
    reports: list[str] = []

    async def main() -> None:
        client = EngineClient(EngineSpec(str(smollm2), kv_tokens=4096, threads=2), bounds=BOUNDS, report=reports.append)
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 60)
            assert client.pid is not None
            prompt = [1000 + at for at in range(tokens)]
            running = client.generate(Submit("long", prompt, SamplingParams(max_tokens=2000, ignore_eos=True)))
            first: Output = await anext(running)
            assert first.tokens
            held = Held(
                client.pid, lambda: client._pulse.beat_at
            )  # the thread that runs the steps has the process's own id
            with pytest.raises(EngineDied, match="no progress in a step"):
                async for _ in running:
                    pass
            took = time.monotonic() - held.since
            held.end()
            assert took < 7  # five, on a machine that does nothing else
            await asyncio.wait_for(client.wait_ready(), 60)
            again = [one async for one in client.generate(Submit("after", prompt, SamplingParams(max_tokens=2)))]
            assert again[-1].finish == "length"
        finally:
            await client.close()

    asyncio.run(main())
    assert len(reports) == 2
    assert "1 requests were lost" in reports[0]
