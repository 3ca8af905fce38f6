"""What minipaged does on the NVIDIA GPU of this machine, in 6 minutes at most.

Each part is a process of its own with a limit of its own, so that a part that fails, hangs or leaves the card's context
broken harms no other; its error stands in the table. PyTorch and transformers take part if they are installed. Measured
is against a limit of the card, or against those, in the same run.

Run: python -m benchmarks.gpu [--only PART] [--docs]. The last line is one JSON object.
"""

from __future__ import annotations

import datetime
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu.machine import describe_machine
from benchmarks.gpu.measured_sizes import REAL, Sizes
from benchmarks.gpu.report import print_table, to_json, write_page
from benchmarks.gpu.rows import Row, row_from_json

PARTS = {
    "compile_time": 60,
    "kernel_errors": 60,
    "products": 75,
    "decode_attention": 75,
    "prefill_attention": 30,
    "end_to_end": 120,
    "swap": 30,
}
"""Seconds that each may take."""
TOTAL_SECONDS = 345
MARK = "row: "
"""What a part prints before each of its rows."""


def run_part(name: str, sizes: Sizes) -> Iterator[Row]:
    """In this process. An error ends it, and is its last row."""
    try:
        yield from importlib.import_module(f"benchmarks.gpu.parts.{name}").run(sizes)
    except Exception as error:
        yield Row(name, note=f"FAILED: {type(error).__name__}: {error}")


def run_in_process(name: str, seconds: float) -> list[Row]:
    """In a process of its own, which ends after so many seconds; the rows it has printed until then count."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds)
        end = f"FAILED: exit status {process.returncode}: {errors.strip()[-300:]}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = f"stopped after {seconds:.0f} s"
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    rows = [row_from_json(json.loads(line)) for line in lines]
    return [*rows, Row(name, note=end)] if end else rows


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Parts to run: {', '.join(PARTS)}.")] = None,
    docs: Annotated[bool, typer.Option(help="Write the results into docs/gpu-results.md.")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the CUDA backend."""
    if part is not None:
        for row in run_part(part, REAL):
            print(MARK + json.dumps(row.to_json()), flush=True)
        return
    unknown = set(only or ()) - PARTS.keys()
    if unknown:
        raise typer.BadParameter(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    started = time.perf_counter()
    machine, rows = describe_machine(), []
    for name, limit in PARTS.items():
        if only and name not in only:
            continue
        left = TOTAL_SECONDS - (time.perf_counter() - started)
        before = time.perf_counter()
        rows += run_in_process(name, min(limit, left)) if left > 1 else [Row(name, note="left out: no time left")]
        print(f"{name}: {time.perf_counter() - before:.0f} s", file=sys.stderr, flush=True)
    print_table(machine, rows, Console(width=200))
    if docs:
        write_page(machine, rows, datetime.date.today().isoformat())
    print(to_json(machine, rows, time.perf_counter() - started))


if __name__ == "__main__":
    typer.run(main)
