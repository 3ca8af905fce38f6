"""Which machine an engine runs on."""

from __future__ import annotations

from minipaged.config import DeviceName
from minipaged.errors import DeviceError
from minipaged.ops.reference import ReferenceOps


def open_device(name: DeviceName) -> ReferenceOps:
    """The operations of a device. Raises `DeviceError` if it cannot be used here."""
    if name == "cuda":
        raise DeviceError(
            'device "cuda" is not in this version of minipaged yet; use "auto" or "cpu", which run on any machine.'
        )
    return ReferenceOps()


def kv_dtype(name: str) -> str:
    """The element type of the KV cache for `EngineConfig.kv_dtype`: what the device computes in, unless told."""
    return "float32" if name == "auto" else name
