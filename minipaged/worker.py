"""Worker: one thread that runs calls in order and hands their results to the event loop, under asyncio and trio alike.

The thread never waits for the event loop: it posts a result and goes on with the next call.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import anyio
from anyio.lowlevel import current_token

T = TypeVar("T")

Post = Callable[[Callable[[], None]], None]
"""Has the event loop call a function, soon and in order. Callable from any thread, and from finalizers."""


def event_loop_post() -> Post:
    """The `Post` of the running event loop. Once that loop is closed, posting does nothing: nobody is left to care."""
    loop = current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        return partial(_post_unless_closed, loop.call_soon_threadsafe)
    from trio.lowlevel import TrioToken  # asyncio programs need no trio

    assert isinstance(loop, TrioToken)
    return partial(_post_unless_closed, loop.run_sync_soon)


def event_loop_check() -> Callable[[], bool]:
    """Tells, whenever it is called, whether the event loop that runs now runs there too."""
    loop = current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        return lambda: asyncio._get_running_loop() is loop
    from trio.lowlevel import current_trio_token, in_trio_run

    return lambda: in_trio_run() and current_trio_token() is loop


class Worker:
    """A daemon thread with a queue of calls. Created on the event loop, which runs all callbacks.

    The thread also ends when the worker is lost to garbage collection.
    """

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """Queue a call. On the event loop, `done` receives what it returns, or `failed` what it raises."""
        self._calls.put(partial(_run_call, self._post, call, done, failed))

    async def run(self, call: Callable[[], T]) -> T:
        """Queue a call and wait for it. A cancelled wait leaves the call to run, and its result is dropped."""
        finished = anyio.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def done(result: T) -> None:
            results.append(result)
            finished.set()

        def failed(error: BaseException) -> None:
            errors.append(error)
            finished.set()

        self.submit(call, done, failed)
        await finished.wait()
        if errors:
            raise errors[0]
        return results[0]

    async def close(self) -> None:
        """Let queued calls finish, then end the thread. Once only; if the wait is cancelled, it ends all the same."""
        finished = anyio.Event()
        self._calls.put(partial(self._post, finished.set))
        self._calls.put(None)
        await finished.wait()
        self._thread.join()  # takes microseconds now


def _run_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # an idle thread keeps nothing alive


def _run_call(
    post: Post, call: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]
) -> None:
    try:
        result = call()
    except BaseException as error:  # whatever it is, it belongs to whoever submitted the call
        post(partial(failed, error))
    else:
        post(partial(done, result))


def _post_unless_closed(call_on_loop: Callable[[Callable[[], None]], object], callback: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # raised by both kinds of event loop once they are closed
        call_on_loop(callback)
