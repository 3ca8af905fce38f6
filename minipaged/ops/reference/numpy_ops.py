"""NumpyOps: the part of Ops that is the same for all devices whose arrays are NumPy's: memory, blocks, choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.errors import ConfigError
from minipaged.ops.base import (
    Batch,
    Bias,
    CacheShape,
    Dimensions,
    ElementTypes,
    HostArray,
    Penalties,
    PendingCopy,
    Sampled,
    SamplingBatch,
    StepLimits,
)
from minipaged.ops.reference import sampling as reference_sampling
from minipaged.ops.tensor import HostTensor
from minipaged.progress import Progress

Array = NDArray[np.generic]


class FinishedCopy:
    """A copy that was made before the call returned."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Return at once."""


class NumpyOps:
    """What its methods compute is described in `Ops`."""

    max_batched_tokens = 512

    # Memory

    def prepare(self, dimensions: Dimensions, types: ElementTypes, progress: Progress) -> None:
        """Any sizes will do; weights keep their own type."""
        if types.weights != "auto":
            raise ConfigError(
                f'dtype is {types.weights!r}, but only device="cuda" converts weights; here they are computed with as '
                'they are stored. Give dtype="auto".'
            )

    def cache_memory(self, fraction: float) -> int:
        """1 GiB, whatever the machine has."""
        return 2**30

    def reserve(self, limits: StepLimits, shape: CacheShape, logits: Callable[[Batch[Array], Array], Array]) -> None:
        """Nothing: arrays are allocated as they are needed."""

    def load_vector(self, tensors: Sequence[HostTensor]) -> Array:
        """float32, concatenated."""
        return np.concatenate([tensor.float32() for tensor in tensors])

    def load_gate_up_bias(self, gate: HostTensor, up: HostTensor) -> Array:
        """float32 [2 I], the gate's first."""
        return self.load_vector([gate, up])

    def allocate_cache(self, shape: CacheShape, dtype: str) -> Array:
        """Zeros [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return np.zeros(_dimensions(shape), _kv_dtype(dtype))

    def allocate_host_cache(self, shape: CacheShape, dtype: str) -> NDArray[np.uint8]:
        """Zeros [num_blocks, bytes per block]."""
        num_blocks, *block = _dimensions(shape)
        return np.zeros((num_blocks, int(np.prod(block)) * _kv_dtype(dtype).itemsize), np.uint8)

    def upload(self, array: HostArray) -> Array:
        """A copy, so that the caller may reuse its buffer."""
        return array.copy()

    def upload_together(self, arrays: Sequence[HostArray]) -> list[Array]:
        """Copies as well."""
        return [array.copy() for array in arrays]

    def upload_batch(self, batch: Batch[HostArray], changed: NDArray[np.int64]) -> Batch[Array]:
        """The batch itself: a step has read it when the next is prepared."""
        return cast(Batch[Array], batch)

    def download(self, array: Array) -> NDArray[np.float32]:
        """A copy, so that the caller may write to it."""
        return float32(array).copy()

    def close(self) -> None:
        """Nothing is held here: arrays are freed with their last reference."""

    def replay(self, function: Callable[[Batch[Array]], Array], batch: Batch[Array]) -> Array:
        """Just the function."""
        return function(batch)

    # Choosing tokens

    def adjust_logits(self, logits: Array, penalties: Penalties[Array] | None, bias: Bias[Array] | None) -> Array:
        """See `reference_sampling.adjust_logits`."""
        return reference_sampling.adjust_logits(float32(logits), penalties, bias)

    def sample(self, logits: Array, raw_logits: Array, batch: SamplingBatch[Array]) -> Sampled:
        """See `reference_sampling.sample`."""
        return reference_sampling.sample(float32(logits), float32(raw_logits), batch)

    # Blocks

    def fill_blocks(self, cache: Array, blocks: Sequence[int], value: float) -> None:
        """cache[blocks] = value."""
        cache[list(blocks)] = np.float32(value).astype(cache.dtype)

    def copy_blocks(self, cache: Array, pairs: Sequence[tuple[int, int]]) -> None:
        """Every source is read before any destination is written."""
        sources, destinations = _columns(pairs)
        cache[destinations] = cache[sources]

    def blocks_to_host(self, cache: Array, host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]) -> PendingCopy:
        """Done when it returns."""
        device_blocks, host_blocks = _columns(pairs)
        host[host_blocks] = _bytes(cache)[device_blocks]
        return FinishedCopy()

    def blocks_from_host(self, host: NDArray[np.uint8], cache: Array, pairs: Sequence[tuple[int, int]]) -> PendingCopy:
        """Done when it returns."""
        host_blocks, device_blocks = _columns(pairs)
        _bytes(cache)[device_blocks] = host[host_blocks]
        return FinishedCopy()


def float32(array: Array) -> NDArray[np.float32]:
    """The array itself if it is float32 already."""
    return array.astype(np.float32, copy=False)


def _dimensions(shape: CacheShape) -> tuple[int, ...]:
    return (shape.num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)


def _kv_dtype(name: str) -> np.dtype[np.generic]:
    kinds: dict[str, DTypeLike] = {"float32": np.float32, "float16": np.float16}
    if name == "bfloat16":
        import ml_dtypes

        kinds["bfloat16"] = ml_dtypes.bfloat16
    return np.dtype(kinds[name])


def _bytes(cache: Array) -> NDArray[np.uint8]:
    """The pool itself as [num_blocks, bytes per block]."""
    return cache.reshape(len(cache), -1).view(np.uint8)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
