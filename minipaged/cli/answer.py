"""Writing an answer while it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer

from minipaged.output import Token


class Answer:
    """The text written so far, also after an interruption."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, tokens: Iterator[Token]) -> None:
        """Write each token's text to standard output at once, and end the line, also after an interruption."""
        finish_reason = None
        try:
            for token in tokens:
                self.text += token.text
                finish_reason = token.finish_reason
                sys.stdout.write(token.text)
                sys.stdout.flush()
        finally:
            if self.text and not self.text.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
        if finish_reason == "length" and sys.stderr.isatty():
            typer.secho("(cut off: --max-tokens or the model's context length is reached)", dim=True, err=True)
