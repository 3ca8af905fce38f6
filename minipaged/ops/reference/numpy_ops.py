"""NumpyOps: the part of Ops that is the same for all devices whose arrays are NumPy's: memory, blocks, choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import ConfigError
from minipaged.kv.layout import KVLayout, Plane
from minipaged.ops.base import (
    Batch,
    Bias,
    Dimensions,
    ElementTypes,
    HostArray,
    KVPool,
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

    def reserve(
        self, limits: StepLimits, layout: KVLayout, logits: Callable[[Batch[Array], KVPool[Array]], Array]
    ) -> None:
        """Nothing is done: arrays are allocated as they are needed."""

    def load_vector(self, tensors: Sequence[HostTensor]) -> Array:
        """float32, concatenated."""
        return np.concatenate([tensor.float32() for tensor in tensors])

    def load_gate_up_bias(self, gate: HostTensor, up: HostTensor) -> Array:
        """float32 [2 I], the gate's first."""
        return self.load_vector([gate, up])

    def allocate_cache(self, layout: KVLayout, num_blocks: int) -> KVPool[Array]:
        """Bytes [num_blocks, layout.bytes_per_block]."""
        return KVPool(layout, num_blocks, self.allocate_host_cache(layout, num_blocks))

    def allocate_host_cache(self, layout: KVLayout, num_blocks: int) -> NDArray[np.uint8]:
        """The blocks hold zeros."""
        return np.zeros((num_blocks, layout.bytes_per_block), np.uint8)

    def upload(self, array: HostArray) -> Array:
        """A copy, so that the caller may reuse its buffer."""
        return array.copy()

    def upload_together(self, arrays: Sequence[HostArray]) -> list[Array]:
        """Copies, so that the caller may reuse its buffers."""
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
        """Nothing is recorded: the function is called."""
        return function(batch)

    # Choosing tokens

    def adjust_logits(self, logits: Array, penalties: Penalties[Array] | None, bias: Bias[Array] | None) -> Array:
        """See `reference_sampling.adjust_logits`."""
        return reference_sampling.adjust_logits(float32(logits), penalties, bias)

    def sample(self, logits: Array, raw_logits: Array, batch: SamplingBatch[Array]) -> Sampled:
        """See `reference_sampling.sample`."""
        return reference_sampling.sample(float32(logits), float32(raw_logits), batch)

    # Blocks

    def fill_blocks(self, cache: KVPool[Array], blocks: Sequence[int], value: float) -> None:
        """Every element of every plane."""
        for layer in range(cache.layout.num_layers):
            for plane in cache.layout.planes:
                elements = plane_elements(cache, layer, plane)
                elements[list(blocks)] = np.float32(value).astype(elements.dtype)

    def copy_blocks(self, cache: KVPool[Array], pairs: Sequence[tuple[int, int]]) -> None:
        """Every source is read before any destination is written."""
        sources, destinations = _columns(pairs)
        cache.data[destinations] = cache.data[sources]

    def blocks_to_host(
        self, cache: KVPool[Array], host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """The copy is finished when the call returns."""
        device_blocks, host_blocks = _columns(pairs)
        host[host_blocks] = cache.data[device_blocks]
        return FinishedCopy()

    def blocks_from_host(
        self, host: NDArray[np.uint8], cache: KVPool[Array], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """The copy is finished when the call returns."""
        host_blocks, device_blocks = _columns(pairs)
        cache.data[device_blocks] = host[host_blocks]
        return FinishedCopy()


def float32(array: Array) -> NDArray[np.float32]:
    """The array itself if it is float32 already."""
    return array.astype(np.float32, copy=False)


def plane_elements(cache: KVPool[Array], layer: int, plane: Plane) -> Array:
    """One layer's plane of every block, [num_blocks, num_heads, block_size, width], a view of the pool.

    A backend that orders a head's elements otherwise finds its own order in the last two axes taken together.
    """
    layout, size = cache.layout, plane.element_bytes
    return np.ndarray(
        shape=(cache.num_blocks, plane.num_heads, layout.block_size, plane.width),
        dtype=_dtype(plane),
        buffer=cache.data.data,
        offset=layer * layout.layer_stride + plane.offset,
        strides=(layout.bytes_per_block, plane.head_stride, plane.width * size, size),
    )


def _dtype(plane: Plane) -> np.dtype[np.generic]:
    if plane.element_type == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(plane.element_type)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
