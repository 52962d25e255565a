"""Sleep: the engine ends and all of its memory goes back to the system; the HTTP server stays and can wake it.

One at a time: whoever wants to sleep or to wake waits for what goes on. Imported when somebody does so first.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from tailrace.api.errors import HttpError, unavailable
from tailrace.terms import EngineDied, Overloaded, TailraceError

if TYPE_CHECKING:
    from tailrace.api.service import Service

State = Literal["awake", "falling_asleep", "asleep", "waking"]
Cause = Literal["operator", "idle"]
Running = Literal["refuse", "finish", "abort"]
ABORTED = 5.0
"""Longest that requests which were aborted may take to be gone, in seconds."""
LOOK = 0.01


class Sleeper:
    """Puts one server's engine to sleep and wakes it. Owned by the loop."""

    def __init__(self, service: Service) -> None:
        self.state: State = "awake"
        self.cause: Cause = "operator"  # of the sleep that is, or was the last
        self.since = time.monotonic()  # when the state was entered
        self.wake_seconds = 0.0  # of all wakes together
        self.last_wake = 0.0
        self.sleeps = 0
        self.wakes = 0
        self.waiting = 0  # requests that wait for it to wake
        self._service = service
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def wakes_up(self) -> bool:
        """Whether a request ends this sleep."""
        policy = self._service.settings.wake_on_request
        return policy == "always" or (policy == "idle" and self.cause == "idle")

    async def sleep(self, running: Running, cause: Cause) -> bool:
        """Goes to sleep; False where it slept already (then an operator's sleep takes the place of an idle one's).
        Raises HttpError 409 where requests run that `running` does not end, 503 where there is no engine."""
        async with self._turn:
            service = self._service
            if self.state == "asleep":
                self.cause = "operator" if cause == "operator" else self.cause
                return False
            if service.draining:
                raise unavailable("the server is shutting down", 5.0)
            if service.client.state != "ready":
                raise unavailable(f"there is no engine that could sleep: it is {service.client.state}")
            if running == "refuse" and self._busy:
                raise self._conflict("requests run; give running as finish or abort to have them ended")
            self.cause = cause
            self._enter("falling_asleep")
            try:
                await self._alone(running)
                await service.client.sleep()
            except TailraceError:
                self._enter("awake")
                raise
            self.sleeps += 1
            self._enter("asleep")
            return True

    async def wake(self) -> bool:
        """Wakes up; False where it was awake. Raises EngineDied where the engine does not start; it is then started
        again with back-off, as one that died is."""
        async with self._turn:
            if self.state == "awake":
                return False
            begun = time.monotonic()
            self._enter("waking")
            self.wakes += 1
            try:
                await self._service.client.wake()
            finally:
                self.last_wake = time.monotonic() - begun
                self.wake_seconds += self.last_wake
                self._service.active_at = time.monotonic()
                self._enter("awake")
            return True

    async def gate(self) -> None:
        """Lets a request in once the server is awake. Raises HttpError 503 where it sleeps on, Overloaded where too
        many wait."""
        if self.state == "awake":
            return
        settings = self._service.settings
        if self.waiting >= settings.max_waiting:
            raise Overloaded(f"{self.waiting} requests wait for the server to wake up")
        self.waiting += 1
        try:
            async with asyncio.timeout(settings.timeouts.wake):
                while self._now() != "awake":
                    if self._service.draining:
                        raise unavailable("the server is shutting down", 5.0)
                    if self.state in ("falling_asleep", "asleep") and not self.wakes_up:
                        raise self.refusal()
                    if self.state == "asleep" and self._task is None:
                        self._task = asyncio.get_running_loop().create_task(self._wake_up(), name="wake")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise unavailable(f"the server did not wake up within {settings.timeouts.wake:g} s", 5.0) from None
        finally:
            self.waiting -= 1

    async def _wake_up(self) -> None:
        try:
            await self.wake()
        except EngineDied:
            pass  # whoever waits is told that there is no engine
        finally:
            self._task = None

    def _now(self) -> State:
        return self.state

    def refusal(self) -> HttpError:
        """What a request gets that does not end the sleep."""
        return HttpError(
            503,
            "the server sleeps until its operator wakes it",
            kind="service_unavailable",
            code="asleep",
            retry_after=5.0,
        )

    def tick(self, now: float) -> None:
        """Goes to sleep where nothing has been asked for long enough. Called now and then."""
        service, after = self._service, self._service.settings.timeouts.sleep_after
        if self.state != "awake" or self._busy or service.client.state != "ready" or service.draining:
            service.active_at = now if self.state == "awake" else service.active_at
        elif after and now - service.active_at >= after and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._doze(), name="sleep")

    async def _doze(self) -> None:
        try:
            if await self.sleep("refuse", "idle"):
                self._service.told("sleep", cause="idle")
        except TailraceError:
            pass  # a request came first
        finally:
            self._task = None
            self._changed.set()  # for those that came meanwhile

    def close(self) -> None:
        """The server drains: nobody is to wait any longer."""
        self._changed.set()

    @property
    def _busy(self) -> int:
        return max(self._service.inside, self._service.client.held)

    async def _alone(self, running: Running) -> None:
        """Waits until nothing runs. What came before the sleep began is let through."""
        limit = self._service.settings.timeouts.drain
        if running == "abort":
            limit = ABORTED
            self._service.abort(list(self._service.exchanges))
        try:
            async with asyncio.timeout(limit):
                while self._busy:
                    await asyncio.sleep(LOOK)
                    if running == "abort":  # those that were not far enough to be aborted before
                        self._service.abort(list(self._service.exchanges))
        except TimeoutError:
            raise self._conflict(f"requests still run after {limit:g} s") from None

    def _conflict(self, why: str) -> HttpError:
        return HttpError(409, f"{self._busy} {why}", param="running", code="busy")

    def _enter(self, state: State) -> None:
        self.state = state
        self.since = time.monotonic()
        self._changed.set()
