"""Which machine an engine runs on."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

from minipaged.config import EngineConfig
from minipaged.errors import DeviceError
from minipaged.ops.base import Array, Ops, Weight
from minipaged.ops.reference import ReferenceOps
from minipaged.ops.threads import default_num_threads

logger = logging.getLogger(__name__)
Result_co = TypeVar("Result_co", covariant=True)


class UseOps(Protocol[Result_co]):
    """A function that works with the operations of any device, whatever its arrays are."""

    def __call__(self, ops: Ops[Array, Weight]) -> Result_co:
        """Work with them."""


def with_device(config: EngineConfig, use: UseOps[Result_co]) -> Result_co:
    """`use` with the operations of `config.device`. Raises `DeviceError` if it cannot be used here."""
    if config.device == "cuda":
        raise DeviceError(
            'device "cuda" is not in this version of minipaged yet; use "auto" or "cpu", which run on any machine.'
        )
    if config.device == "reference":
        return use(ReferenceOps())
    try:
        from minipaged.ops.cpu import CpuOps
    except ImportError as error:
        missing = (
            "the CPU kernels were not built (no C compiler when minipaged was installed?). "
            "Install a C compiler, then minipaged again"
        )
        if config.device == "cpu":
            raise DeviceError(
                f'device "cpu" cannot be used: {missing}, or use "auto", which falls back to the slower '
                "reference operations."
            ) from error
        logger.warning("Running on the slower reference operations: %s.", missing)
        return use(ReferenceOps())
    return use(CpuOps(config.num_threads or default_num_threads()))
