"""The results as a table, as JSON, and as docs/gpu-results.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.docs import DOCS
from benchmarks.gpu.rows import Row

PAGE = DOCS / "gpu-results.md"
COLUMNS = ("", "measured", "", "against", "", "share", "bar", "")
BEGIN, END = "<!-- run -->", "<!-- end of run -->"


def cells(row: Row) -> list[str]:
    """One row of the table."""
    bar = "" if row.bar is None else f"{row.bar:g} {row.verdict}".strip()
    share = "" if row.share is None else f"{row.share:.3g}"
    return [row.what, _number(row.value), row.unit, row.against, _number(row.other), share, bar, row.note]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_table(machine: Mapping[str, str], rows: Sequence[Row], console: Console) -> None:
    console.print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row), style="red" if row.verdict == "MISSED" else None)
    console.print(table)


def to_json(machine: Mapping[str, str], rows: Sequence[Row], seconds: float) -> str:
    """One line."""
    return json.dumps({"machine": machine, "seconds": round(seconds, 1), "rows": [row.to_json() for row in rows]})


def write_page(machine: Mapping[str, str], rows: Sequence[Row], date: str, page: Path = PAGE) -> None:
    """Put a run between the two marks of the page."""
    lines = [f"Run on {date}.", "", *(f"* {name}: {value}" for name, value in machine.items()), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
