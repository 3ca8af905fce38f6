"""CUDA's errors, which CuPy raises as classes of its own, as DeviceError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minipaged.errors import DeviceError

DEVICE_MEMORY = (
    "Give a smaller kv_cache_memory, num_blocks or memory_fraction, fewer max_batched_tokens, or a smaller model; "
    "other programs may be using the GPU too (nvidia-smi lists them)"
)
HOST_MEMORY = "Give a smaller swap_memory or swap_blocks; page-locked memory must be free memory of the host"


@contextmanager
def cuda_errors(what: str, where_memory_is_short: str = DEVICE_MEMORY) -> Iterator[None]:
    """Raises `DeviceError` for an error of CUDA within; `what` completes "The GPU could not"."""
    try:
        yield
    except error_classes() as error:
        raise device_error(what, error, where_memory_is_short) from error


def error_classes() -> tuple[type[Exception], ...]:
    """What CuPy raises when CUDA fails."""
    from cupy import cuda

    return cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU can still be used after this error of CUDA."""
    return "out of memory" in str(error).lower()


def device_error(what: str, error: Exception, where_memory_is_short: str = DEVICE_MEMORY) -> DeviceError:
    """A `DeviceError` that says what to do. An error may come from work that was started earlier: GPUs report late."""
    if is_out_of_memory(error):
        advice = where_memory_is_short
    else:
        advice = 'The GPU is of no more use to this process; start it anew. device="cpu" needs no GPU'
    return DeviceError(f"The GPU could not {what}: {error}. {advice}.")
