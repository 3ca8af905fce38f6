"""Figures in docs/performance.md: written by the benchmarks, never by hand."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def replace_block(name: str, text: str) -> None:
    """Put `text` between the comments <!-- name --> and <!-- end of name --> of docs/performance.md."""
    page = DOCS / "performance.md"
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page} has {count} blocks named {name!r}; expected one.")
    page.write_text(replaced, encoding="utf-8")
