from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["stream_answer.py", "many_prompts.py", "batch.py"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), str(model)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert "Traceback" not in run.stderr
