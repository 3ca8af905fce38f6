"""CUDA's errors, which CuPy raises as classes of its own, as DeviceError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minipaged.errors import DeviceError


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Raises `DeviceError` for an error of CUDA within; `what` completes "The GPU could not"."""
    try:
        yield
    except error_classes() as error:
        raise device_error(what, error) from error


def error_classes() -> tuple[type[Exception], ...]:
    """What CuPy raises when CUDA fails."""
    from cupy import cuda

    return cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError


def device_error(what: str, error: Exception) -> DeviceError:
    """With what to do. An error may come from work that was started earlier: GPUs report late."""
    if "out of memory" in str(error).lower():
        advice = (
            "Give a smaller kv_cache_memory, num_blocks or memory_fraction, fewer max_batched_tokens, or a smaller "
            "model; other programs may be using the GPU too (nvidia-smi lists them)"
        )
    else:
        advice = 'The GPU is of no more use to this process; start it anew. device="cpu" needs no GPU'
    return DeviceError(f"The GPU could not {what}: {error}. {advice}.")
