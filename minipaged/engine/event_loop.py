"""EventLoop: what an engine needs of the event loop that it lives on, be it asyncio's or trio's.

Which of the two it is, is found out once. anyio would find it out again for every event that it makes, which took more
time than waiting and waking did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from trio.lowlevel import ParkingLot, TrioToken

Post = Callable[[Callable[[], None]], None]
"""Has the event loop call a function, soon and in order. Callable from any thread, and from finalizers."""


class Signal(Protocol):
    """Wakes the tasks that wait for a change. Used on the event loop's thread."""

    def wait(self) -> Awaitable[None]:
        """Wait until the next `notify`. Any number of tasks may wait, and each of them can be cancelled."""

    def notify(self) -> None:
        """Wake every task that waits now."""


class EventLoop(Protocol):
    """An event loop that runs."""

    def post(self, callback: Callable[[], None]) -> None:
        """A `Post`. Once the loop is closed, posting does nothing: nobody is left to care."""

    def is_here(self) -> bool:
        """Whether the caller runs on this very loop."""

    def signal(self) -> Signal:
        """A new signal for tasks on this loop."""


def current_event_loop() -> EventLoop:
    """That of the task that runs."""
    native = current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        return _AsyncioLoop(native)
    from trio.lowlevel import TrioToken  # asyncio programs need no trio

    assert isinstance(native, TrioToken)
    return _TrioLoop(native)


class _AsyncioLoop:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def post(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(callback)

    def is_here(self) -> bool:
        return asyncio._get_running_loop() is self._loop

    def signal(self) -> Signal:
        return _AsyncioSignal(self._loop)


class _AsyncioSignal:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> Awaitable[None]:
        woken = self._loop.create_future()
        self._waiting.append(woken)
        return woken

    def notify(self) -> None:
        for woken in self._waiting:
            if not woken.done():  # cancelled with its task
                woken.set_result(None)
        self._waiting.clear()


class _TrioLoop:
    def __init__(self, token: TrioToken) -> None:
        self._token = token

    def post(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            self._token.run_sync_soon(callback)

    def is_here(self) -> bool:
        from trio.lowlevel import current_trio_token, in_trio_run

        return in_trio_run() and current_trio_token() is self._token

    def signal(self) -> Signal:
        from trio.lowlevel import ParkingLot

        return _TrioSignal(ParkingLot())


class _TrioSignal:
    def __init__(self, waiting: ParkingLot) -> None:
        self._waiting = waiting

    def wait(self) -> Awaitable[None]:
        return self._waiting.park()

    def notify(self) -> None:
        if self._waiting:
            self._waiting.unpark_all()
