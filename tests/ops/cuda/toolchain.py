"""What the tests of CUDA code need on the machine: g++ on x86-64 Linux, and two wheels of the `test` extra."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

CUDA = Path(__file__).parents[3] / "cuda"
"""The folder of the kernels."""

EMULATOR = Path(__file__).parent / "emulator"


def missing() -> str | None:
    """Why CUDA code cannot be tested here; None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the emulator of CUDA needs x86-64 Linux; this is {platform.machine()} {sys.platform}"
    for tool in ("g++", "addr2line"):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH; install g++ (Debian, Ubuntu: apt install g++)"
    for package in ("cuda_runtime", "cuda_nvrtc"):
        if _folder(package) is None:
            wheel = f"nvidia-{package.replace('_', '-')}-cu12"
            return f"the wheel {wheel} is not installed; pip install 'minipaged[test]'"
    return None


def headers() -> Path:
    """NVIDIA's headers, such as cuda_fp16.h."""
    return _installed("cuda_runtime") / "include"


def _installed(package: str) -> Path:
    folder = _folder(package)
    if folder is None:
        raise FileNotFoundError(missing())
    return folder


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(f"nvidia.{package}")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
