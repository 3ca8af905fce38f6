"""What this runs on, in words."""

from __future__ import annotations

import importlib.metadata
import subprocess

from minipaged.errors import DeviceError
from minipaged.ops.cuda.nvidia_driver import find_gpu

PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch", "transformers")


def describe_machine() -> dict[str, str]:
    """Card, driver and versions, in the order in which they are shown."""
    found = {}
    try:
        gpu = find_gpu()
        found["card"] = str(gpu)
        found["CUDA of the driver"] = ".".join(map(str, gpu.cuda))
    except DeviceError as error:
        found["card"] = f"none: {error}"
    found["driver"] = _driver()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    """Its own version, which only its kernel module and nvidia-smi tell."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown (no nvidia-smi)"
