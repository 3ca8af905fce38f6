from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import anyio
import hypothesis
import pytest

from minipaged.ops.cuda import nvidia_driver
from minipaged.ops.cuda.nvidia_driver import NoGpuError
from tests.tiny import write_tiny_model

BACKENDS: dict[str, tuple[str, dict[str, bool]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}

# Nothing here is a test of speed, least of all on a machine that others use too.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


class RunAsync(Protocol):
    def __call__(self, main: Callable[[], Awaitable[None]]) -> None: ...


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> RunAsync:
    """Runs an async function to its end, on each kind of event loop in turn. It fails if that takes a minute."""
    backend, options = BACKENDS[request.param]

    def run_async(main: Callable[[], Awaitable[None]]) -> None:
        async def within_a_minute() -> None:
            with anyio.fail_after(60):
                await main()

        anyio.run(within_a_minute, backend=backend, backend_options=options)

    return run_async


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell ignores Ctrl-C for what runs in the background, tests and their child processes included; undo that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let device "auto" mean the same on every machine that runs these tests; tests/gpu does without this."""

    def no_driver() -> None:
        raise NoGpuError("There is no NVIDIA driver (hidden from the tests).")

    monkeypatch.setattr(nvidia_driver, "load_driver", no_driver)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model as a Hugging Face folder; read it, do not change it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
