"""A progress bar on standard error while a model is downloaded and loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from minipaged.blocking.llm import LLM
from minipaged.config import EngineConfig
from minipaged.progress import Progress


class InterruptedWorkError(Exception):
    """Ends work on another thread whose result nobody waits for any more."""


def load(model: str | None, config: EngineConfig) -> LLM:
    """Load a model with a progress bar."""
    with loading_bar() as progress:
        return LLM(model, config=config, progress=progress)


@contextmanager
def loading_bar() -> Iterator[Progress]:
    """A `Progress` that draws, if standard error is a terminal. Leaving with an exception ends the reporting work."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Bars(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}
    interrupted = threading.Event()

    def report(what: str, done: int, total: int) -> None:
        if interrupted.is_set():
            raise InterruptedWorkError
        if not console.is_terminal:
            return
        if what not in tasks:
            for earlier in tasks.values():
                bars.update(earlier, visible=False)
            tasks[what] = bars.add_task(what, total=total)
            bars.start()
        bars.update(tasks[what], completed=done)

    try:
        yield report
    except BaseException:
        interrupted.set()
        raise
    finally:
        if tasks:
            bars.stop()
