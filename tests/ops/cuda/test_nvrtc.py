"""NVRTC takes every kernel file for every architecture, and ptxas keeps within the budgets that the files declare."""

from __future__ import annotations

import ctypes
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from minipaged.ops.cuda.nvrtc import Nvrtc, NvrtcError, find_toolkit
from minipaged.ops.cuda.ops import HEAD_DIMS
from tests.ops.cuda.kernels import ELEMENTS
from tests.ops.cuda.nvrtc import ARCHITECTURES, budgets, compile_for
from tests.ops.cuda.toolchain import CUDA

FILES = sorted(CUDA.glob("*.cu"))


def variants(source: str) -> list[list[str]]:
    """The options that a file is compiled with."""
    elements = [f"-DELEMENT={element}" for element in ELEMENTS if element != "float" or "mma" not in source]
    head_dims = [f"-DHEAD_DIM={head_dim}" for head_dim in HEAD_DIMS]
    options: list[list[str]] = [[]]
    if re.search(r"\bELEMENT\b", source):
        options = [[*others, element] for others in options for element in elements]
    if re.search(r"\bHEAD_DIM\b", source):
        options = [[*others, head_dim] for others in options for head_dim in head_dims]
    return options


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_resources(path: Path, architecture: int) -> None:
    source = path.read_text(encoding="utf-8")
    declared = budgets(source)
    for options in variants(source):
        for name, resources in compile_for(source, path.name, options, architecture).items():
            budget = next((budget for pattern, budget in declared.items() if fnmatch(name, pattern)), None)
            assert budget, f"{path.name} needs a line '// Budget: {name}: … registers, … bytes of shared memory'"
            where = f"{name} {options} on sm_{architecture}: {resources}"
            assert resources.spills == 0, where
            assert resources.registers <= budget.registers, where
            assert resources.shared <= budget.shared, where


def test_the_library_that_nvrtc_opens_by_name_is_loaded_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every wheel of NVRTC finds it otherwise."""
    loaded: list[str] = []
    load = ctypes.CDLL

    def note(path: str) -> ctypes.CDLL:
        loaded.append(Path(path).name)
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", note)
    toolkit = find_toolkit(12)
    version = Nvrtc(toolkit).version.split()[0]
    assert loaded == [f"libnvrtc-builtins.so.{version}", toolkit.library.name]


def test_an_error_is_nvrtcs_own() -> None:
    with pytest.raises(NvrtcError, match='identifier "no_such_function" is undefined'):
        compile_for('extern "C" __global__ void kernel() { no_such_function(); }', "kernel.cu", [], 80)


def test_a_spill_is_seen() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* x) {
        float values[64];
        for (int i = 0; i < 64; i++) values[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; i++) x[(63 - i) * 1024 + threadIdx.x] = values[i] * values[(i * 7) % 64];
    }
    """
    assert compile_for(source, "kernel.cu", [], 80)["kernel"].spills > 0
