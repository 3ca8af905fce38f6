"""CpuOps: the Ops protocol on this project's own kernels (the folder cpu/), compiled when the package is installed.

An operation is a command or two, which `CommandRunner` runs at once or records (cpu_commands.py).

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
from minipaged.ops.cpu.commands import CommandRunner, Function, Op, Quantised, address
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
        self._commands = CommandRunner(num_threads, instruction_set)
        self.instruction_set = self._commands.instruction_set
        self.kv_dtype: ElementType = "bfloat16" if self.instruction_set.endswith("bf16") else "float16"
        self._arena = Arena()
        self._scratch = np.empty(0, np.float32)

    @property
    def kernel_seconds(self) -> float:
        """Time spent inside the kernels so far."""
        return self._commands.kernel_seconds

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
        self._commands.close()

    # The forward pass

    def replay(self, function: Function, batch: Batch[Array]) -> Array:
        """`function(batch)`, recorded and run in one call."""
        return self._commands.replay(function, batch)

    def embed(self, token_ids: Array, table: PackedMatrix) -> Array:
        """Rows of the table, decoded."""
        output = self._commands.empty((len(token_ids), table.in_features))
        self._commands.emit(
            output,
            op=Op.EMBED,
            kind=table.kind,
            rows=len(token_ids),
            out=table.in_features,
            weight=address(table.data),
            batch=self._commands.header_with("token_ids", token_ids),
        )
        return output

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """The norm and, where a quantised product follows, quantisation."""
        return self._commands.emit_rows(
            self._commands.empty(x.shape),
            op=Op.RMS_NORM,
            rows=len(x),
            **{"in": x.shape[1]},
            eps=eps,
            input=self._commands.read(x),
            weight=address(weight),
        )

    def linear(self, x: Array, weight: PackedMatrix, bias: Array | None, residual: Array | None) -> Array:
        """Integer products for a quantised weight, else float32."""
        fields, _alive = self._factors(x, weight, bias)
        output = self._commands.empty((len(x), weight.out_features))
        second = 0 if residual is None else self._commands.read(residual)
        self._commands.emit(output, op=Op.LINEAR, out=weight.out_features, second=second, **fields)
        return output

    def logits(self, x: Array, head: PackedMatrix) -> Array:
        """A product like the others."""
        return self.linear(x, head, None, None)

    def gated_linear(self, x: Array, gate_up: PackedMatrix, bias: Array | None) -> Array:
        """Both products, the activation and, where a quantised product follows, quantisation."""
        width = gate_up.out_features // 2
        fields, _alive = self._factors(x, gate_up, bias)
        return self._commands.emit_rows(self._commands.empty((len(x), width)), op=Op.GATED_LINEAR, out=width, **fields)

    def _factors(self, x: Array, weight: PackedMatrix, bias: Array | None) -> tuple[dict[str, int], Quantised | None]:
        """Fields that describe a product, and what must live until its output has a place."""
        fields = {
            "kind": weight.kind,
            "rows": len(x),
            "in": weight.in_features,
            "weight": address(weight.data),
            "bias": 0 if bias is None else address(bias),
        }
        if not weight.is_quantised:
            return fields | {"input": self._commands.read(x), "in_stride": x.strides[0] // 4}, None
        quantised = self._commands.quantise(x)
        q, scale, total = quantised.addresses
        return fields | {"q": q, "q_scale": scale, "q_sum": total}, quantised

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
        self._commands.emit(
            qkv,
            op=Op.ROPE_CACHE,
            rows=len(qkv),
            num_query_heads=num_query_heads,
            eps=eps,
            second=address(rope),
            weight=0 if q_norm is None else address(q_norm),
            bias=0 if k_norm is None else address(k_norm),
            batch=self._commands.header(batch),
            **_cache_fields(cache, layer),
        )
        return qkv[:, : num_query_heads * head_dim].reshape(len(qkv), num_query_heads, head_dim)

    def paged_attention(
        self, query: Array, cache: KVPool[Array], layer: int, batch: Batch[Array], scale: float, window: int | None
    ) -> Array:
        """Online softmax over the blocks, in order of position; and quantisation of heads that are whole groups."""
        num_tokens, num_query_heads, head_dim = query.shape
        output = self._commands.empty((num_tokens, num_query_heads * head_dim))
        emit = self._commands.emit if head_dim % GROUP else self._commands.emit_rows
        emit(
            output,
            op=Op.ATTENTION,
            rows=num_tokens,
            in_stride=query.strides[0] // 4,
            num_query_heads=num_query_heads,
            window=window or 0,
            scale=scale,
            input=self._commands.read(query),
            batch=self._commands.header(batch),
            **_cache_fields(cache, layer),
        )
        self._commands.read(output)  # its sums are made there
        return output

    def take(self, x: Array, indices: Array) -> Array:
        """Rows of x; within a recorded function, those that sample."""
        if not self._commands.is_recording:
            taken: Array = x[indices]
            return taken
        output = self._commands.empty((len(indices), x.shape[1]))
        self._commands.emit(
            output,
            op=Op.TAKE,
            rows=len(indices),
            **{"in": x.shape[1]},
            input=self._commands.read(x),
            batch=self._commands.header_with("sampled", indices),
        )
        return output

    # Choosing tokens

    def sample(self, logits: Array, raw_logits: Array, batch: SamplingBatch[Array]) -> Sampled:
        """By the rules of `reference_sampling.sample`, a row at a time."""
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
        token_ids = np.empty(num_rows, np.int32)
        self._commands.emit(
            token_ids,
            op=Op.SAMPLE,
            rows=num_rows,
            **{"in": vocab_size},
            input=address(logits),
            second=address(batch.temperature),
            weight=address(batch.top_p),
            bias=address(batch.min_p),
            third=address(numbers),
            extra=address(batch.top_k),
            scratch=address(self._scratch),
        )
        if batch.num_logprobs < 0:
            return Sampled(token_ids, None, None, None)
        return Sampled(token_ids, *logprobs(float32(raw_logits), token_ids, batch.num_logprobs))


KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
"""Element types of the KV cache."""


def _cache_fields(cache: KVPool[Array], layer: int) -> dict[str, int]:
    """Where the layer's K and V are: `KVLayer` of cpu/command.h, and the sizes of a head."""
    layout = cache.layout
    keys, values, start = layout.keys, layout.values, address(cache.data) + layer * layout.layer_stride
    return {
        "kind": KINDS[keys.element_type],
        "num_kv_heads": keys.num_heads,
        "head_dim": keys.width,
        "block_size": layout.block_size,
        "keys": start + keys.offset,
        "values": start + values.offset,
        "block_stride": layout.bytes_per_block,
        "key_head_stride": keys.head_stride,
        "value_head_stride": values.head_stride,
    }
