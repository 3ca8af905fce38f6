"""A fake NVIDIA driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import pytest

from minipaged.ops.cuda import nvidia_driver


class Reference(Protocol):
    """What ctypes.byref gives."""

    _obj: ctypes.c_int


@dataclass
class FakeDriver:
    """libcuda.so.1, as far as `find_gpu` asks it."""

    version: int = 12090
    """As cuDriverGetVersion says it."""
    capability: tuple[int, int] = (8, 0)
    num_gpus: int = 1
    init_status: int = 0

    def cuInit(self, flags: int) -> int:
        return self.init_status

    def cuDeviceGetCount(self, count: Reference) -> int:
        count._obj.value = self.num_gpus
        return 0

    def cuDeviceGet(self, device: Reference, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDriverGetVersion(self, version: Reference) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], size: int, device: ctypes.c_int) -> int:
        name.value = b"NVIDIA Fake"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Reference, device: ctypes.c_int) -> int:
        memory._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, value: Reference, which: int, device: ctypes.c_int) -> int:
        value._obj.value = self.capability[which - 75]
        return 0

    def cuGetErrorString(self, status: int, text: Reference) -> int:
        if status == 803:
            ctypes.cast(ctypes.byref(text._obj), ctypes.POINTER(ctypes.c_char_p))[0] = b"system has unsupported driver"
        return 0


def use_fake_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Let minipaged find it."""
    monkeypatch.setattr(nvidia_driver, "load_driver", lambda: driver)
