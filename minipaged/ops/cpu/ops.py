"""CpuOps: the Ops protocol on this project's own kernels (the folder cpu/), compiled when the package is installed.

An operation is a node of a graph, which `CommandRunner` runs at once or records.

Activations are float32. Before a product with a quantised matrix they are quantised to 8 bits per group of 32, by the
thread that made them. K is kept transposed within its block, [head_dim, block_size]; in bfloat16 two neighbours, which
one instruction multiplies, lie together (cpu/rows.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import ConfigError
from minipaged.kv.layout import ElementType, KVLayout
from minipaged.ops.base import Batch, Dimensions, ElementTypes, KVPool, Sampled, SamplingBatch
from minipaged.ops.cpu.commands import CommandRunner, Function
from minipaged.ops.cpu.graph import Node, address
from minipaged.ops.cpu.packing import GROUP, Arena, Kind, PackedMatrix, pack, pack_gate_up
from minipaged.ops.philox import uniforms
from minipaged.ops.reference.numpy_ops import Array, NumpyOps, float32
from minipaged.ops.reference.sampling import logprobs
from minipaged.ops.tensor import HostTensor
from minipaged.progress import Progress

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 64


class CpuOps(NumpyOps):
    """Implements `Ops[Array, PackedMatrix]`; what its methods compute is described there.

    Raises `DeviceError` if the threads cannot be started or the instruction set is not supported.
    """

    name = "cpu"

    def __init__(self, num_threads: int, instruction_set: str | None = None) -> None:
        self._runner = CommandRunner(num_threads, instruction_set)
        self.instruction_set = self._runner.instruction_set
        self.kv_dtype: ElementType = "bfloat16" if self.instruction_set.endswith("bf16") else "float16"
        self._arena = Arena()
        self._scratch = np.empty(0, np.float32)

    @property
    def kernel_seconds(self) -> float:
        """Time spent inside the kernels so far."""
        return self._runner.kernel_seconds

    # Loading

    def prepare(self, dimensions: Dimensions, types: ElementTypes, progress: Progress) -> None:
        """Nothing is compiled for a model. Raises `ConfigError`."""
        super().prepare(dimensions, types, progress)
        if dimensions.head_dim > MAX_HEAD_DIM or dimensions.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(
                f"head_dim is {dimensions.head_dim} and block_size {dimensions.block_size}; the CPU kernels take at "
                f'most {MAX_HEAD_DIM} and {MAX_BLOCK_SIZE}. Give a smaller block_size, or device="reference".'
            )

    def load_matrix(self, tensors: Sequence[HostTensor]) -> PackedMatrix:
        """Packed in its own precision."""
        return pack(tensors, self._arena)

    def load_gate_up(self, gate: HostTensor, up: HostTensor) -> PackedMatrix:
        """Packed in its own precision, the gate's rows first."""
        return pack_gate_up(gate, up, self._arena)

    def load_rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> Array:
        """float32 [max_model_len, head_dim]: a row's cosines, then its sines."""
        return np.ascontiguousarray(np.concatenate([cos, sin], axis=1), np.float32)

    def allocate_cache(self, layout: KVLayout, num_blocks: int) -> KVPool[Array]:
        """Bytes [num_blocks, layout.bytes_per_block], with room behind them: the kernels read whole vectors."""
        size = num_blocks * layout.bytes_per_block
        with_room = np.zeros(size + MAX_BLOCK_SIZE * layout.keys.element_bytes, np.uint8)
        return KVPool(layout, num_blocks, with_room[:size].reshape(num_blocks, layout.bytes_per_block))

    def close(self) -> None:
        """Forget the recorded passes; threads end when the last reference to this object does."""
        self._runner.close()

    # The forward pass

    def replay(self, function: Function, batch: Batch[Array]) -> Array:
        """`function(batch)`, recorded and run in one call."""
        return self._runner.replay(function, batch)

    def embed(self, token_ids: Array, table: PackedMatrix) -> Array:
        """Rows of the table, decoded."""
        output = self._runner.empty((len(token_ids), table.in_features))
        numbers: dict[str, float] = {
            "kind": table.kind,
            "width": table.in_features,
            "table": address(table.data),
            "batch": self._runner.header(token_ids=token_ids),
        }
        return self._runner.add(Node("Embed", output, {}, numbers))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """The norm and, where a quantised product follows, quantisation."""
        numbers = {"width": x.shape[1], "eps": eps}
        node = Node("RmsNorm", self._runner.empty(x.shape), {"input": x, "weight": weight}, numbers)
        return self._runner.add(_or_quantised(node))

    def linear(self, x: Array, weight: PackedMatrix, bias: Array | None, residual: Array | None) -> Array:
        """Integer products for a quantised weight, else float32."""
        node = self._product("Linear", x, weight, bias, weight.out_features)
        node.reads["residual"] = residual
        return self._runner.add(node)

    def logits(self, x: Array, head: PackedMatrix) -> Array:
        """A product like the others."""
        return self.linear(x, head, None, None)

    def gated_linear(self, x: Array, gate_up: PackedMatrix, bias: Array | None) -> Array:
        """Both products, the activation and, where a quantised product follows, quantisation."""
        return self._runner.add(
            _or_quantised(self._product("GatedLinear", x, gate_up, bias, gate_up.out_features // 2))
        )

    def _product(self, record: str, x: Array, weight: PackedMatrix, bias: Array | None, width: int) -> Node:
        numbers: dict[str, float] = {
            "kind": weight.kind,
            "in": weight.in_features,
            "out": width,
            "stride": x.strides[0] // 4,
            "weight": address(weight.data),
        }
        reads = {"input": None if weight.is_quantised else x, "bias": bias}
        output = self._runner.empty((len(x), width))
        return Node(record, output, reads, numbers, rows_of_bytes=x if weight.is_quantised else None)

    def rope_and_cache(
        self,
        qkv: Array,
        rope: Array,
        cache: KVPool[Array],
        layer: int,
        batch: Batch[Array],
        num_query_heads: int,
        norms: tuple[Array, Array, float] | None,
    ) -> Array:
        """Rotates q and k in place; the result is a view of qkv."""
        head_dim = cache.layout.keys.width
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
        numbers = {
            "num_query_heads": num_query_heads,
            "eps": eps,
            "batch": self._runner.header(positions=batch.positions, slots=batch.slots),
            **_cache_fields(cache, layer),
        }
        self._runner.add(Node("RopeAndCache", qkv, {"rope": rope, "q_norm": q_norm, "k_norm": k_norm}, numbers))
        return qkv[:, : num_query_heads * head_dim].reshape(len(qkv), num_query_heads, head_dim)

    def paged_attention(
        self, query: Array, cache: KVPool[Array], layer: int, batch: Batch[Array], scale: float, window: int | None
    ) -> Array:
        """Online softmax over the blocks, in order of position; and quantisation of heads that are whole groups."""
        num_tokens, num_query_heads, head_dim = query.shape
        header = self._runner.header(
            kv_extents=batch.kv_extents,
            cu_seqlens=batch.cu_seqlens,
            rows=batch.rows,
            block_tables=batch.block_tables,
        )
        numbers = {
            "num_query_heads": num_query_heads,
            "stride": query.strides[0] // 4,
            "window": window or 0,
            "scale": scale,
            "batch": header,
            **_cache_fields(cache, layer),
        }
        output = self._runner.empty((num_tokens, num_query_heads * head_dim))
        return self._runner.add(
            Node("Attention", output, {"input": query}, numbers, can_quantise=head_dim % GROUP == 0)
        )

    def take(self, x: Array, indices: Array) -> Array:
        """Rows of x; within a recorded function, those that sample."""
        if not self._runner.is_recording:
            taken: Array = x[indices]
            return taken
        numbers = {"width": x.shape[1], "batch": self._runner.header(sampled=indices)}
        return self._runner.add(Node("Take", self._runner.empty((len(indices), x.shape[1])), {"input": x}, numbers))

    # Choosing tokens

    def sample(self, logits: Array, raw_logits: Array, batch: SamplingBatch[Array]) -> Sampled:
        """The kernel follows `reference_sampling.sample` and takes a row at a time."""
        num_rows, vocab_size = logits.shape
        if self._scratch.size < logits.size:
            self._scratch = np.empty(logits.size, np.float32)
        numbers = np.zeros(num_rows)  # greedy rows draw nothing
        if not batch.all_greedy:
            numbers = uniforms(
                batch.seeds.astype(np.uint64, copy=False),
                batch.sample_index.astype(np.uint32, copy=False),
                batch.positions.astype(np.uint32, copy=False),
            )
        reads: dict[str, Array | None] = {
            "logits": logits,
            "temperature": batch.temperature,
            "top_p": batch.top_p,
            "min_p": batch.min_p,
            "top_k": batch.top_k,
            "uniforms": numbers,
            "scratch": self._scratch,
        }
        token_ids = np.empty(num_rows, np.int32)
        self._runner.add(Node("Sample", token_ids, reads, {"vocab_size": vocab_size}))
        if batch.num_logprobs < 0:
            return Sampled(token_ids, None, None, None)
        return Sampled(token_ids, *logprobs(float32(raw_logits), token_ids, batch.num_logprobs))


def _or_quantised(node: Node) -> Node:
    """Let rows that are whole groups be made as floats, quantised, or both, as they are read."""
    if node.output.shape[1] % GROUP == 0:
        node.can_quantise, node.needs_floats = True, False
    return node


KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
"""Element types of the KV cache."""


def _cache_fields(cache: KVPool[Array], layer: int) -> dict[str, float]:
    """`KVCache` of cpu/command.h: where the layer's K and V are."""
    layout = cache.layout
    keys, values, start = layout.keys, layout.values, address(cache.data) + layer * layout.layer_stride
    return {
        "cache.keys": start + keys.offset,
        "cache.values": start + values.offset,
        "cache.block_stride": layout.bytes_per_block,
        "cache.key_head_stride": keys.head_stride,
        "cache.value_head_stride": values.head_stride,
        "cache.kind": KINDS[keys.element_type],
        "cache.num_kv_heads": keys.num_heads,
        "cache.head_dim": keys.width,
        "cache.block_size": layout.block_size,
    }
