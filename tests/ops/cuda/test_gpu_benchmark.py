"""`python -m benchmarks.gpu`: every part runs to its end on the fake GPU, with tiny sizes and without PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gpu.__main__ import PARTS, TOTAL_SECONDS, run_in_process, run_part
from benchmarks.gpu.measured_sizes import TINY
from benchmarks.gpu.report import BEGIN, END, PAGE, print_table, to_json, write_page
from benchmarks.gpu.rows import Row, row_from_json
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import use_fake_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with use_fake_gpu(Gpu()) as gpu:
        yield gpu


EXPECTED = {
    "compile_time": 2,
    "kernel_errors": 2 * (3 + 2 * 3 + 2 * 4 + 3),
    "products": 4 * 2 * 2 + 2,
    "decode_attention": 2 * 2,
    "prefill_attention": 1,
    "end_to_end": 2 * 2 + 1,
    "swap": 2,
}
"""Rows of each part, with these sizes."""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", PARTS)
def test_a_part(name: str) -> None:
    rows = list(run_part(name, TINY))
    assert not [row.note for row in rows if "FAILED" in row.note]
    assert len(rows) == EXPECTED[name]
    assert all(row.value is not None and row.value >= 0 for row in rows)
    if name == "kernel_errors":
        assert all(row.share is not None and row.share < 3 for row in rows), rows
    if name in ("products", "prefill_attention", "end_to_end"):
        assert [row for row in rows if "not installed" in row.note]


ROWS = [
    Row("fast", 9000.0, "GB/s", "copy", 10000.0, 0.8),
    Row("slow", 5.0, "TFLOP/s", "cuBLAS", 10.0, 0.7),
    Row("alone", 0.25, "s", note="torch is not installed"),
    Row("broken", note="FAILED: RuntimeError: a | b"),
]


def test_shares_and_bars() -> None:
    assert [row.share for row in ROWS] == [0.9, 0.5, None, None]
    assert [row.verdict for row in ROWS] == ["reached", "MISSED", "", ""]
    assert [row_from_json(json.loads(json.dumps(row.to_json()))) for row in ROWS] == ROWS


def test_the_table_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"card": "Fake"}, ROWS, Console(width=200))
    table = capsys.readouterr().out
    assert "card: Fake" in table
    for shown in ("9,000", "0.8 reached", "0.7 MISSED", "torch is not installed", "FAILED: RuntimeError: a | b"):
        assert shown in table
    figures = json.loads(to_json({"card": "Fake"}, ROWS, 1.25))
    assert figures["rows"][0]["share"] == 0.9


def test_a_run_replaces_what_the_page_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{BEGIN}\nNo run.\n{END}\nAfter.\n")
    for date in ("2030-01-01", "2030-01-02"):
        write_page({"card": "Fake"}, ROWS, date, page)
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "No run" not in text
    assert "2030-01-01" not in text
    assert "| fast | 9,000 | GB/s | copy | 10,000 | 0.9 | 0.8 reached |  |" in text
    assert r"a \| b" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_page({}, ROWS, "2030-01-03", page)


def test_the_page_has_the_marks() -> None:
    text = PAGE.read_text()
    assert 0 < text.index(BEGIN) < text.index(END)


def test_a_part_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.parts.swap.run", lambda sizes: 1 / 0)
    [row] = run_part("swap", TINY)
    assert row.note == "FAILED: ZeroDivisionError: division by zero"


def test_parts_that_end_badly_are_rows() -> None:
    """There is no GPU, or it is none of this test's business: the process is stopped, or says what it lacks."""
    [row] = run_in_process("no_such_part", 60)
    assert "FAILED: ModuleNotFoundError" in row.note
    [row] = run_in_process("swap", 0.01)
    assert row.note == "stopped after 0 s"


def test_the_parts_fit_the_time() -> None:
    assert sum(PARTS.values()) <= 1.5 * TOTAL_SECONDS
    assert TOTAL_SECONDS < 360
