"""EngineThread: an engine on an event loop in a thread of its own."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future

import anyio
from anyio.from_thread import BlockingPortal

from minipaged.engine.engine import Engine
from minipaged.engine.event_loop import Post, current_event_loop
from minipaged.errors import EngineDeadError


class EngineThread:
    """Loads the engine, and closes it when told to, or when the program ends. Usable from any thread.

    Nothing keeps it alive but its own thread, and that only until `stop`, which a finalizer may call.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises what `Engine.start` raises. Interrupted by Ctrl-C, it ends the thread before it returns."""
        opened: Future[tuple[BlockingPortal, Post, Callable[[], None]]] = Future()
        self._thread = threading.Thread(
            target=anyio.run, args=(_serve, engine, opened), name="minipaged-llm", daemon=True
        )
        self._thread.start()
        self._portal, self._post, self._stop = opened.result()
        atexit.register(self.close)
        try:
            self._portal.call(engine.start)
        except BaseException:
            self.close()
            raise

    @property
    def portal(self) -> BlockingPortal:
        """The way to call functions on the event loop. Raises `EngineDeadError` if nobody is there."""
        if not self._thread.is_alive():
            raise EngineDeadError(
                "This LLM has no thread: it was closed, or this is a child process that was forked from the LLM's own. "
                "Make an LLM in the process that uses it."
            )
        return self._portal

    def post(self, call: Callable[[], None]) -> None:
        """Have the event loop call a function soon. Never blocks; does nothing once the thread has ended."""
        self._post(call)

    def stop(self) -> None:
        """Abort what is running, free all memory, end the thread, soon. Never blocks; idempotent.

        Garbage collection may call this on any thread, those that closing waits for included.
        """
        atexit.unregister(self.close)
        self._post(self._stop)

    def close(self) -> None:
        """Abort what is running, free all memory, end the thread, and wait until that is done."""
        self.stop()
        self._thread.join()


async def _serve(engine: Engine, opened: Future[tuple[BlockingPortal, Post, Callable[[], None]]]) -> None:
    stopped = anyio.Event()
    async with BlockingPortal() as portal:
        opened.set_result((portal, current_event_loop().post, stopped.set))
        await stopped.wait()
        await engine.close()
