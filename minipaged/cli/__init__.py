"""The `minipaged` command. It only calls the public API."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it, as some services do
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the whole life of the process)
    from minipaged.cli.app import app

    app()
