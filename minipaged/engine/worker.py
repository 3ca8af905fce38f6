"""Worker: one thread that runs calls in order and hands their results to the event loop, under asyncio and trio alike.

The thread never waits for the event loop: it posts a result and goes on with the next call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import anyio

from minipaged.engine.event_loop import Post

T = TypeVar("T")

STACK_BYTES = 1 << 20
"""The least stack of a worker's thread: the CPU kernels take a third of it, as on the threads of cpu/team.c."""


class Worker:
    """A daemon thread with a queue of calls. Created on the event loop, which runs all callbacks.

    The thread also ends when the worker is lost to garbage collection.
    """

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        _start(self._thread)
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


def _start(thread: threading.Thread) -> None:
    """Start a thread with a stack of STACK_BYTES, even in a program that wants smaller ones for its own threads."""
    wanted = threading.stack_size()  # 0: the platform's own, which is large
    if 0 < wanted < STACK_BYTES:
        threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(wanted)


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
