"""CudaOps: the Ops protocol on an NVIDIA GPU, through CuPy, with this project's own kernels (the folder cuda/).

Weights and activations are float16 or bfloat16, sums float32. All kernels run on one stream, in the order of the calls.
The arrays of a step lie in a workspace that is allocated once, so that a forward pass allocates nothing, and a decode
can be captured into a CUDA graph and launched as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.errors import ConfigError, UnsupportedModelError
from minipaged.kv.layout import ElementType, KVLayout
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
from minipaged.ops.cuda import launches
from minipaged.ops.cuda.batch import StepBuffer, aligned, device_part, put
from minipaged.ops.cuda.errors import cuda_errors, error_classes
from minipaged.ops.cuda.graphs import Graphs, graph_size
from minipaged.ops.cuda.kernels import CudaKernels
from minipaged.ops.cuda.launches import GATED, LINEAR, LOGITS, Tile, tile_for
from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.modules import CudaModules
from minipaged.ops.cuda.sampling import Sampler
from minipaged.ops.cuda.staging import Staging
from minipaged.ops.cuda.transfers import BlockTransfers
from minipaged.ops.cuda.weights import DEVICE_TYPES, WeightLoader
from minipaged.ops.cuda.workspace import NO_MEMORY, Workspace
from minipaged.ops.tensor import HostTensor
from minipaged.ops.workspace import WorkspaceFullError
from minipaged.progress import Progress

if TYPE_CHECKING:
    import cupy

HEAD_DIMS = (64, 80, 96, 128, 256)
STAGING_BYTES = 4 << 20
STAGING_BUFFERS = 8
"""So many that what a step uploads beside its description does not wait for its kernels."""
UPLOAD_BYTES = 4 << 20
"""Memory for what `upload` returns: settings and penalties of the sequences that run. More comes from CuPy's pool."""
MOST_PARTIALS = 1024
"""Splits of sequences that one launch of attention takes: some waves of blocks for any GPU; more need more launches."""


class CudaOps:
    """Implements `Ops[cupy.ndarray, cupy.ndarray]`; what its methods compute is described there.

    All of them raise `DeviceError` when CUDA fails.
    """

    name = "cuda"
    max_batched_tokens = 2048

    def __init__(self, *, graphs: bool = True) -> None:
        import cupy

        self._cupy = cupy
        self._use_graphs = graphs
        self.kv_dtype: ElementType = "float16"
        with cuda_errors("be used"):
            self._memory = CudaMemory()
            self._stream: cupy.cuda.Stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace = Workspace(self._memory)
        self._uploads = Workspace(self._memory)
        self._graphs = Graphs(self._stream, self._workspace)
        self._transfers = BlockTransfers(self._stream)
        self._scratch_bytes = 0

    # Loading

    def prepare(self, dimensions: Dimensions, types: ElementTypes, progress: Progress) -> None:
        """Compiles the kernels, or finds them compiled."""
        stored: ElementType = "bfloat16" if types.stored == "BF16" else "float16"
        element = stored if types.weights == "auto" else types.weights
        _check(dimensions, element, types.cache)
        self.kv_dtype = self._element = element
        self._dtype = np.dtype(DEVICE_TYPES[element])
        device = self._cupy.cuda.Device()
        architecture, self._multiprocessors = int(device.compute_capability), device.attributes["MultiProcessorCount"]
        modules = CudaModules(architecture, progress)
        self._kernels = CudaKernels(modules, self._stream, element=element, head_dim=dimensions.head_dim)
        self._sampler = Sampler(self._memory, self._kernels, self._stream)
        self._staging = Staging(self._memory, self._stream, num_bytes=STAGING_BYTES, num_buffers=STAGING_BUFFERS)
        self._weights = WeightLoader(self._memory, self._staging, element)

    def cache_memory(self, fraction: float) -> int:
        """What is left of that fraction of the GPU's memory, without the block behind the pool."""
        free, total = self._memory.available()
        return max(0, int(fraction * total) - (total - free) - self._scratch_bytes)

    def load_matrix(self, tensors: Sequence[HostTensor]) -> cupy.ndarray:
        """An array [sum of out_i, in]."""
        return self._weights.stacked(tensors)

    def load_vector(self, tensors: Sequence[HostTensor]) -> cupy.ndarray:
        """float32, concatenated."""
        return self._keep(np.concatenate([tensor.float32() for tensor in tensors]), f"the weight {tensors[0].name}")

    def load_gate_up(self, gate: HostTensor, up: HostTensor) -> cupy.ndarray:
        """An array [2 I, in]: gate and up row by row in turn, so that one thread computes both."""
        return self._weights.interleaved(gate, up)

    def load_gate_up_bias(self, gate: HostTensor, up: HostTensor) -> cupy.ndarray:
        """An array [2 I], in the order of `load_gate_up`'s rows."""
        return self._keep(np.stack([gate.float32(), up.float32()], axis=1).reshape(-1), f"the weight {gate.name}")

    def load_rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> cupy.ndarray:
        """float32 [max_model_len, head_dim / 2, 2]"""
        return self._keep(np.stack([cos, sin], axis=2), "the rotation table")

    def _keep(self, array: NDArray[np.float32], what: str) -> cupy.ndarray:
        """On the device until `close`."""
        kept = self._memory.allocate(array.shape, array.dtype, what)
        self._staging.send_array(kept.data.ptr, array)
        return kept

    def reserve(
        self,
        limits: StepLimits,
        layout: KVLayout,
        logits: Callable[[Batch[cupy.ndarray], KVPool[cupy.ndarray]], cupy.ndarray],
    ) -> None:
        """The forward passes of a step with the most tokens and of a decode with the most sequences are tried out."""
        self._step_buffer = StepBuffer(self._memory, self._kernels, self._stream, limits, layout.block_size)
        nothing = self._memory.array(NO_MEMORY, (1, self._block_elements(layout)), self._dtype, None)
        cache = KVPool(layout, 1, nothing)

        def run(num_tokens: int) -> None:
            batch = self._step_buffer.of_size((num_tokens, limits.max_sequences, limits.max_sequences))
            result = logits(batch, cache)
            self._take(result.shape, result.dtype)  # where they are adjusted

        self._kernels.is_counting = True
        try:
            sizes = (limits.max_tokens, limits.max_sequences)
            needed = [self._workspace.count(partial(run, size)) for size in sizes]
        finally:
            self._kernels.is_counting = False
        self._scratch_bytes = layout.bytes_per_block
        self._workspace.allocate(max(needed), "the arrays of a step")
        self._uploads.allocate(UPLOAD_BYTES, "settings of requests")

    def allocate_cache(self, layout: KVLayout, num_blocks: int) -> KVPool[cupy.ndarray]:
        """Elements [num_blocks, elements of a block]; one block more for the tokens that fill up a decode."""
        dimensions = (num_blocks + 1, self._block_elements(layout))
        blocks = self._memory.allocate(dimensions, self._dtype, f"{num_blocks} KV blocks")
        with cuda_errors("clear the KV blocks"):
            self._cupy.cuda.runtime.memsetAsync(blocks.data.ptr, 0, blocks.nbytes, self._stream.ptr)
        self._step_buffer.use_scratch_block(num_blocks)
        return KVPool(layout, num_blocks, blocks[:num_blocks])

    def allocate_host_cache(self, layout: KVLayout, num_blocks: int) -> NDArray[np.uint8]:
        """The memory is page-locked."""
        size = num_blocks * layout.bytes_per_block
        pool = self._memory.allocate_pinned(size, f"{num_blocks} swapped KV blocks")
        return pool.reshape(num_blocks, layout.bytes_per_block)

    def _block_elements(self, layout: KVLayout) -> int:
        return layout.bytes_per_block // self._dtype.itemsize

    def upload(self, array: HostArray) -> cupy.ndarray:
        """A copy that is on its way; the caller may reuse its buffer."""
        return self.upload_together([array])[0]

    def upload_together(self, arrays: Sequence[HostArray]) -> list[cupy.ndarray]:
        """The copies lie side by side in one span of memory, which is free again when none of them is referenced."""
        starts = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
        packed = np.empty(starts[-1], np.uint8)
        span = self._take_from(self._uploads, packed.shape, packed.dtype)
        uploaded = []
        for start, array in zip(starts, arrays, strict=False):
            put(packed, start, array)
            uploaded.append(self._memory.array(span.data.ptr + start, array.shape, array.dtype, span))
        self._staging.send_array(span.data.ptr, packed)
        return uploaded

    def upload_batch(self, batch: Batch[HostArray], changed: NDArray[np.int64]) -> Batch[cupy.ndarray]:
        """One copy; a decode is filled up to the size of a graph."""
        self._workspace.reset()
        padded_size = None
        if self._use_graphs and len(batch.token_ids) == len(batch.rows) == len(batch.sampled):
            padded_size = min(graph_size(len(batch.rows)), self._step_buffer.limits.max_sequences)
        return self._step_buffer.send(batch, changed, padded_size)

    def download(self, array: cupy.ndarray) -> NDArray[np.float32]:
        """Waits until all that was launched is done."""
        with cuda_errors("copy from its memory"):
            # With CUPY_ENABLE_UMP=1, CuPy would hand out some memory of the device itself, without waiting.
            host: NDArray[np.float32] = array.get(stream=self._stream, out=np.empty(array.shape, array.dtype))
            return host

    def close(self) -> None:
        """Waits for what is running. Idempotent.

        Errors are not raised: the call that met one did so, and of a GPU that has failed the driver frees everything.
        """
        for step in (self._stream.synchronize, self._transfers.close, self._graphs.close, self._memory.close):
            with suppress(*error_classes()):
                step()

    # Running

    def replay(
        self, function: Callable[[Batch[cupy.ndarray]], cupy.ndarray], batch: Batch[cupy.ndarray]
    ) -> cupy.ndarray:
        """A decode by its graph, if it has one; all else kernel by kernel."""
        padded = device_part(batch).padded
        if padded is not None:
            result = self._graphs.run(function, padded, len(batch.rows))
            if result is not None:
                return result
        return function(batch)

    def _take(self, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """An array that is valid in this step, its content undefined."""
        return self._take_from(self._workspace, shape, dtype)

    def _take_from(self, space: Workspace, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """What is more than was planned for comes from CuPy's pool, but a graph's addresses must remain its own."""
        try:
            return space.take(shape, dtype)
        except WorkspaceFullError:
            if self._graphs.is_capturing:
                raise
        with self._stream, cuda_errors(f"allocate an array of {shape}"):
            return self._cupy.empty(shape, dtype)

    # The forward pass

    def embed(self, token_ids: cupy.ndarray, table: cupy.ndarray) -> cupy.ndarray:
        """Rows of the table."""
        size = table.shape[1]
        out = self._take((len(token_ids), size), self._dtype)
        self._kernels.start("embed", launches.embed(len(token_ids)), (table, token_ids, out, np.int32(size)))
        return out

    def rms_norm(self, x: cupy.ndarray, weight: cupy.ndarray, eps: float) -> cupy.ndarray:
        """A block of threads for each row."""
        num_tokens, size = x.shape
        out = self._take(x.shape, self._dtype)
        arguments = (x, weight, out, np.int32(size), np.float32(eps))
        self._kernels.start("rms_norm", launches.rms_norm(num_tokens, size), arguments)
        return out

    def linear(
        self, x: cupy.ndarray, weight: cupy.ndarray, bias: cupy.ndarray | None, residual: cupy.ndarray | None
    ) -> cupy.ndarray:
        """The sum is rounded to the element type once."""
        out = self._take((len(x), len(weight)), self._dtype)
        self._multiply(LINEAR, x, weight, (bias, residual), out)
        return out

    def logits(self, x: cupy.ndarray, head: cupy.ndarray) -> cupy.ndarray:
        """The sum is not rounded."""
        out = self._take((len(x), len(head)), np.float32)
        self._multiply(LOGITS, x, head, (None,), out)
        return out

    def gated_linear(self, x: cupy.ndarray, gate_up: cupy.ndarray, bias: cupy.ndarray | None) -> cupy.ndarray:
        """One kernel computes both products and multiplies them before they are rounded."""
        out = self._take((len(x), len(gate_up) // 2), self._dtype)
        self._multiply(GATED, x, gate_up, (bias,), out)
        return out

    def _multiply(
        self,
        tiles: tuple[Tile, Tile, Tile],
        x: cupy.ndarray,
        weight: cupy.ndarray,
        added: tuple[cupy.ndarray | None, ...],
        out: cupy.ndarray,
    ) -> None:
        num_columns, depth = weight.shape
        tile = tile_for(len(x), num_columns, tiles, self._multiprocessors)
        arguments = (x, weight, *added, out, np.int32(len(x)), np.int32(num_columns), np.int32(depth))
        self._kernels.start(tile.kernel, tile.launch(len(x), num_columns), arguments)

    def rope_and_cache(
        self,
        qkv: cupy.ndarray,
        rope: cupy.ndarray,
        cache: KVPool[cupy.ndarray],
        layer: int,
        batch: Batch[cupy.ndarray],
        num_query_heads: int,
        norms: tuple[cupy.ndarray, cupy.ndarray, float] | None,
    ) -> cupy.ndarray:
        """The rotated q, [T, num_query_heads, head_dim]."""
        keys = cache.layout.keys
        num_kv_heads, head_dim = keys.num_heads, keys.width
        num_tokens, num_heads = len(qkv), num_query_heads + 2 * num_kv_heads
        query = self._take((num_tokens, num_query_heads, head_dim), self._dtype)
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        arrays = (qkv, rope, batch.positions, batch.slots, q_norm, k_norm, query, cache.data)
        sizes = map(np.int32, (num_query_heads, num_kv_heads, cache.layout.block_size))
        arguments = (*arrays, *sizes, *launches.kv_strides(cache.layout, layer), np.float32(eps))
        self._kernels.start("rope_and_cache", launches.rope_and_cache(num_tokens, num_heads), arguments)
        return query

    def paged_attention(
        self,
        query: cupy.ndarray,
        cache: KVPool[cupy.ndarray],
        layer: int,
        batch: Batch[cupy.ndarray],
        scale: float,
        window: int | None,
    ) -> cupy.ndarray:
        """Launched for so many sequences at a time that the results of their splits do not take too much memory."""
        num_tokens, num_query_heads, head_dim = query.shape
        num_kv_heads = cache.layout.keys.num_heads
        part, is_decode = device_part(batch), num_tokens == len(batch.rows)
        tile = self._kernels.attention_decode if is_decode else self._kernels.attention_any
        group, num_splits, num_sequences = num_query_heads // num_kv_heads, part.num_splits, len(batch.rows)
        most_partials = max(MOST_PARTIALS, self._step_buffer.most_splits)
        most = most_partials // num_splits

        out = self._take((num_tokens, num_query_heads * head_dim), self._dtype)
        partials = None
        if num_splits > 1:
            count = min(most_partials, num_sequences * num_splits)
            partials = self._take((count, num_query_heads, head_dim + 4), np.float32)
        for first in range(0, num_sequences, most):
            end = min(first + most, num_sequences)
            starts, count = batch.cu_seqlens[first : end + 1], end - first
            launched_tokens = int(part.cu_seqlens[end] - part.cu_seqlens[first])
            launch = tile.launch(launched_tokens, count, num_kv_heads, group, num_splits)
            tables = batch.block_tables
            arrays = (query, cache.data, batch.kv_extents, starts, batch.rows[first:end], tables, out, partials)
            sizes = (count, num_query_heads, num_kv_heads, cache.layout.block_size, tables.shape[1])
            numbers = map(np.int32, (*sizes, window or 0, num_splits))
            strides = launches.kv_strides(cache.layout, layer)
            self._kernels.start(tile.kernel, launch, (*arrays, *numbers, *strides, np.float32(scale)))
            if partials is not None:
                numbers = map(np.int32, (num_query_heads, window or 0, num_splits))
                merged = (partials, batch.kv_extents, starts, out, *numbers)
                launch = launches.attention_combine(count, num_query_heads, head_dim)
                self._kernels.start("attention_combine", launch, merged)
        return out

    def take(self, x: cupy.ndarray, indices: cupy.ndarray) -> cupy.ndarray:
        """Rows of x."""
        out = self._take((len(indices), x.shape[1]), x.dtype)
        words = x.shape[1] * x.itemsize // 4
        arguments = (x.view(np.int32), indices, out.view(np.int32), np.int32(words))
        self._kernels.start("take", launches.take(len(indices), words), arguments)
        return out

    # Choosing tokens

    def adjust_logits(
        self, logits: cupy.ndarray, penalties: Penalties[cupy.ndarray] | None, bias: Bias[cupy.ndarray] | None
    ) -> cupy.ndarray:
        """The kernels follow `reference_sampling.adjust_logits`."""
        adjusted = self._take(logits.shape, np.float32)
        self._copy(adjusted.data.ptr, logits.data.ptr, logits.nbytes)
        self._sampler.adjust(adjusted, penalties, bias)
        return adjusted

    def sample(self, logits: cupy.ndarray, raw_logits: cupy.ndarray, batch: SamplingBatch[cupy.ndarray]) -> Sampled:
        """The kernels follow `reference_sampling.sample`."""
        return self._sampler.sample(logits, raw_logits, batch, self._take)

    # Blocks

    def fill_blocks(self, cache: KVPool[cupy.ndarray], blocks: Sequence[int], value: float) -> None:
        """One kernel fills all of them."""
        vectors = cache.layout.bytes_per_block // 16
        arguments = (cache.data, self.upload(np.array(blocks, np.int32)), np.float32(value), np.int32(vectors))
        self._kernels.start("fill_blocks", launches.kv_blocks(len(blocks), vectors), arguments)

    def copy_blocks(self, cache: KVPool[cupy.ndarray], pairs: Sequence[tuple[int, int]]) -> None:
        """One kernel copies all of them."""
        vectors = cache.layout.bytes_per_block // 16
        arguments = (cache.data, self.upload(np.array(pairs, np.int32)), np.int32(vectors))
        self._kernels.start("copy_blocks", launches.kv_blocks(len(pairs), vectors), arguments)

    def blocks_to_host(
        self, cache: KVPool[cupy.ndarray], host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """The copy runs beside the kernels that are launched later."""
        return self._transfers.to_host(cache.data, host, pairs)

    def blocks_from_host(
        self, host: NDArray[np.uint8], cache: KVPool[cupy.ndarray], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """Kernels that are launched later wait for it."""
        return self._transfers.from_host(host, cache.data, pairs)

    def _copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy bytes within the device's memory."""
        runtime = self._cupy.cuda.runtime
        with cuda_errors("copy within its memory"):
            runtime.memcpyAsync(destination, source, num_bytes, runtime.memcpyDeviceToDevice, self._stream.ptr)


def _check(dimensions: Dimensions, element: str, cache_type: str) -> None:
    """Raise `ConfigError` for settings, and `UnsupportedModelError` for a model, that the kernels do not take."""
    if cache_type not in ("auto", element):
        raise ConfigError(
            f'kv_dtype is {cache_type!r}, but on device="cuda" the KV cache has the type of the activations, '
            f'{element!r}; give kv_dtype="auto", or dtype={cache_type!r} if it is float16 or bfloat16.'
        )
    if dimensions.head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(
            f"The model's head_dim is {dimensions.head_dim}; the CUDA kernels take {', '.join(map(str, HEAD_DIMS))}. "
            'device="cpu" works.'
        )
    for name in ("hidden_size", "intermediate_size"):
        size: int = getattr(dimensions, name)
        if size % 8:
            raise UnsupportedModelError(
                f'The model\'s {name} is {size}; the CUDA kernels take multiples of 8. device="cpu" works.'
            )
