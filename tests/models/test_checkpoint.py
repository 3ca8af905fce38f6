"""Checkpoint: what it keeps in memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from minipaged.models.checkpoint import Checkpoint
from minipaged.models.files.safetensors_checkpoint import open_safetensors


def resident_file_bytes() -> int:
    """Of mapped files in this process."""
    match = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    large = np.arange(1 << 22, dtype=np.float32).reshape(1 << 11, -1)
    save_file({"before": large[:3], "large": large, "after": large[-3:]}, tmp_path / "model.safetensors")
    return open_safetensors(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_tensors_leave_memory(checkpoint: Checkpoint) -> None:
    large = checkpoint.tensor("large")
    before = resident_file_bytes()
    large.float32().sum()
    assert resident_file_bytes() - before > large.rows.nbytes // 2
    checkpoint.release("large")
    assert resident_file_bytes() - before < large.rows.nbytes // 8


def test_released_tensors_can_be_read_again(checkpoint: Checkpoint) -> None:
    before = {name: checkpoint.tensor(name).float32().copy() for name in checkpoint.tensors}
    for name in before:
        checkpoint.release(name)
    for name, values in before.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), values)
