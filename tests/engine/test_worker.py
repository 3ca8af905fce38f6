from __future__ import annotations

import threading
import weakref
from functools import partial

import anyio
import pytest

from minipaged.engine.event_loop import current_event_loop
from minipaged.engine.worker import Worker
from tests.conftest import RunAsync
from tests.engine.engines import until


def unexpected(error: BaseException) -> None:
    raise error


def test_calls_run_in_order_on_one_other_thread(run: RunAsync) -> None:
    async def main() -> None:
        worker = Worker("test", current_event_loop().post)
        threads: list[int] = []
        results: list[int] = []

        def call(number: int) -> int:
            threads.append(threading.get_ident())
            return number

        for number in range(100):
            worker.submit(partial(call, number), results.append, unexpected)
        assert await worker.run(lambda: call(100)) == 100
        assert results == list(range(100))
        assert len(set(threads)) == 1
        assert threads[0] != threading.get_ident()
        await worker.close()
        assert not any(thread.name == "test" for thread in threading.enumerate())

    run(main)


def test_errors_travel(run: RunAsync) -> None:
    async def main() -> None:
        worker = Worker("test", current_event_loop().post)

        def fail() -> None:
            raise SystemExit("of any kind")

        with pytest.raises(SystemExit, match="of any kind"):
            await worker.run(fail)
        assert await worker.run(lambda: 5) == 5  # the thread goes on
        await worker.close()

    run(main)


def test_the_worker_does_not_wait_for_the_event_loop(run: RunAsync) -> None:
    async def main() -> None:
        worker = Worker("test", current_event_loop().post)
        second = threading.Event()
        results: list[int] = []
        worker.submit(lambda: 1, results.append, unexpected)
        worker.submit(second.set, lambda _: results.append(2), unexpected)
        assert second.wait(30)  # the event loop is held up here, and takes no result
        assert results == []
        await worker.close()
        assert results == [1, 2]

    run(main)


def test_cancelled_wait_leaves_the_call_to_run(run: RunAsync) -> None:
    async def main() -> None:
        worker = Worker("test", current_event_loop().post)
        release, ran = threading.Event(), threading.Event()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await worker.run(lambda: release.wait(30))
        worker.submit(ran.set, lambda _: None, unexpected)
        release.set()
        await worker.close()
        assert ran.is_set()

    run(main)


def test_an_idle_worker_keeps_nothing_alive(run: RunAsync) -> None:
    class Big:
        def use(self) -> None: ...

    async def main() -> None:
        worker = Worker("test", current_event_loop().post)
        big = Big()
        alive = weakref.ref(big)
        await worker.run(big.use)
        del big
        await until(lambda: alive() is None)  # at once, but the thread has to get there
        await worker.close()

    run(main)
