"""A terminal for tests: runs the command as a person would, types, and reads the screen."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

PATIENCE = 60.0
"""Seconds to wait for what must come; only a failing test waits so long."""

_COMMAND = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # make it the terminal whose Ctrl-C is ours
from minipaged.cli import main
main()
"""


class Terminal:
    """`minipaged ARGUMENTS` with a pseudo-terminal as its controlling terminal."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        self._seen = 0
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "100"},
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Press keys: "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> None:
        """Wait until `text` appears after what was expected before."""
        assert self._appears(text, PATIENCE), f"{text!r} did not appear. The screen:\n{self.screen}"

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` appears: readline misses one that comes just after its prompt."""
        for _ in range(int(PATIENCE)):
            self.type("\x03")
            if self._appears(text, 1.0):
                return
        self.expect(text)

    def wait(self) -> int:
        """Wait for the command to end; its exit status."""
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self._process.wait(timeout=PATIENCE)

    def _appears(self, text: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (found := self.screen.find(text, self._seen)) < 0:
            if not self._read(end):
                return False
        self._seen = found + len(text)
        return True

    def _read(self, end: float) -> bool:
        """Read what comes next. False: the command has closed the terminal, or time is over."""
        readable, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)
