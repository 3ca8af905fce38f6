from __future__ import annotations

import anyio
import pytest

from minipaged.engine.event_loop import EventLoop, current_event_loop
from tests.conftest import RunAsync


def test_a_signal_wakes_all_that_wait_and_nobody_later(run: RunAsync) -> None:
    async def main() -> None:
        signal = current_event_loop().signal()
        woken: list[int] = []

        async def wait(number: int) -> None:
            await signal.wait()
            woken.append(number)

        signal.notify()  # nobody waits yet
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            assert woken == []
            signal.notify()
            await anyio.wait_all_tasks_blocked()
            assert sorted(woken) == [0, 1, 2]
            group.start_soon(wait, 3)
            await anyio.wait_all_tasks_blocked()
            assert len(woken) == 3
            signal.notify()
            signal.notify()
        assert woken[3:] == [3]

    run(main)


def test_a_cancelled_wait_leaves_the_others(run: RunAsync) -> None:
    async def main() -> None:
        signal = current_event_loop().signal()
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                await signal.wait()

        async with anyio.create_task_group() as group:
            for scope in scopes:
                group.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            scopes[1].cancel()
            signal.notify()  # before the cancelled task has run
        assert [scope.cancelled_caught for scope in (scopes[0], scopes[2])] == [True, False]

    run(main)


def test_a_loop_knows_whether_the_caller_is_on_it(run: RunAsync) -> None:
    loops: list[EventLoop] = []

    async def here() -> None:
        loops.append(current_event_loop())
        assert loops[0].is_here()
        assert not await anyio.to_thread.run_sync(loops[0].is_here)

    async def elsewhere() -> None:
        assert not loops[0].is_here()

    run(here)
    assert not loops[0].is_here()
    run(elsewhere)


def test_posting_to_a_closed_event_loop_does_nothing(run: RunAsync) -> None:
    loops: list[EventLoop] = []

    async def main() -> None:
        loops.append(current_event_loop())

    run(main)
    loops[0].post(lambda: pytest.fail("ran"))
