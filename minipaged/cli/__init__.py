"""The `minipaged` command. It only calls the public API."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from minipaged.cli.app import app

    app()
