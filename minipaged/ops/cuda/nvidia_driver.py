"""The NVIDIA driver, through ctypes: whether there is a GPU, before the much larger CuPy is imported."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from minipaged.errors import DeviceError

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""
NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what cuInit says in a process forked from one that has called it."""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_..."""


class NoGpuError(DeviceError):
    """There is no GPU for this process to see. Nothing is broken."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that this process sees, and its driver."""

    name: str
    architecture: int
    """Compute capability, times ten."""
    memory: int
    """Size of its memory in bytes."""
    cuda: tuple[int, int]
    """The newest CUDA that the driver takes code of."""

    def __str__(self) -> str:
        return f"{self.name}, {self.memory / 2**30:.0f} GiB, compute capability {self.architecture / 10:.1f}"


def find_gpu() -> Gpu:
    """Ask the driver. Raises `NoGpuError`, or `DeviceError` if there is a driver that does not work."""
    driver = load_driver()
    status = driver.cuInit(0)
    count = ctypes.c_int()
    if status == 0:
        _check(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
    elif status != NO_DEVICE:
        _check(driver, status)
    if count.value == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" CUDA_VISIBLE_DEVICES is {visible!r}, which may hide it."
        raise NoGpuError(f"The NVIDIA driver finds no GPU.{hidden}")
    device, version, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), 0))
    _check(driver, driver.cuDriverGetVersion(ctypes.byref(version)))
    _check(driver, driver.cuDeviceGetName(name, len(name), device))
    _check(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    return Gpu(
        name=name.value.decode(errors="replace"),
        architecture=10 * _attribute(driver, CAPABILITY_MAJOR, device) + _attribute(driver, CAPABILITY_MINOR, device),
        memory=memory.value,
        cuda=(version.value // 1000, version.value % 1000 // 10),
    )


def load_driver() -> ctypes.CDLL:
    """Raises `NoGpuError`."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise NoGpuError(f"There is no NVIDIA driver ({error}).") from error


def _attribute(driver: ctypes.CDLL, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), which, device))
    return value.value


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode(errors="replace") if text.value else "unknown error"
        advice = "nvidia-smi may say more; a driver that was updated needs a restart of the machine."
        if status == NOT_INITIALIZED:
            advice = (
                "A process that was forked from one that has used CUDA cannot use it; "
                'start it by multiprocessing\'s "spawn", or use CUDA only after the fork.'
            )
        raise DeviceError(f"The NVIDIA driver does not work: {said} (error {status}). {advice}")
