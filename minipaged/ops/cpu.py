"""CpuOps: the Ops protocol on this project's own kernels (the folder cpu/), compiled when the package is installed.

An operation is a `Command`, a record of addresses and sizes. Called alone it runs at once. Inside `replay` the commands
of a whole forward pass are recorded and run in one call, without the GIL; a step of a size seen before runs the same
commands again, so that Python's share of a step does not grow with the number of layers.

Activations are float32. Before a product with a quantised matrix they are quantised to 8 bits per group of 32, by the
thread that made them. K is kept transposed within its block, [head_dim, block_size]; in bfloat16 two neighbours, which
one instruction multiplies, lie together (cpu/rows.h).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.errors import ConfigError, DeviceError
from minipaged.ops import _cpu_kernels
from minipaged.ops.base import Batch, CacheShape, Dimensions, ElementTypes, Sampled, SamplingBatch
from minipaged.ops.cpu_packing import GROUP, Arena, Kind, PackedMatrix, pack, pack_gate_up
from minipaged.ops.cpu_workspace import Span, Workspace, WorkspaceFullError
from minipaged.ops.numpy_ops import Array, NumpyOps, float32
from minipaged.ops.philox import uniforms
from minipaged.ops.reference_sampling import logprobs
from minipaged.ops.tensor import HostTensor
from minipaged.progress import Progress

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 64
MAX_RECORDED = 256
"""Recorded passes that are kept, one for each number of tokens and of rows that sample; some 60 kB each."""

EMBED, RMS_NORM, QUANTISE, LINEAR, GATED_LINEAR, ROPE_CACHE, ATTENTION, TAKE, SAMPLE = range(9)

COMMAND_DTYPE = np.dtype(
    [
        *((name, np.int32) for name in ("op", "kind", "rows", "in", "out", "in_stride", "layer", "num_layers")),
        *((name, np.int32) for name in ("num_query_heads", "num_kv_heads", "head_dim", "block_size", "window")),
        *((name, np.float32) for name in ("eps", "scale")),
        *((name, np.uint64) for name in ("input", "second", "weight", "bias", "third", "output", "extra", "cache")),
        *((name, np.uint64) for name in ("q", "q_scale", "q_sum", "made_q", "made_scale", "made_sum", "batch")),
    ],
    align=True,
)
"""`Command` of cpu/command.h."""

HEADER_FIELDS = ("token_ids", "positions", "slots", "query_starts", "rows", "block_tables", "sampled")
"""`BatchHeader` of cpu/command.h: these addresses, then the tables' width and the number of sequences."""

COMMAND_FIELDS = COMMAND_DTYPE.names or ()

Command = dict[str, int | float]
"""Fields of a command; those left out are 0."""
Commands = NDArray[np.void]
Function = Callable[[Batch[Array]], Array]


@dataclass(frozen=True, slots=True)
class _Quantised:
    """Activations in 8 bits: x = scale * q; `sum` is scale times the sum of a group's q."""

    q: Array
    scale: Array
    sum: Array

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three."""
        return _address(self.q), _address(self.scale), _address(self.sum)


@dataclass(slots=True)
class _Product:
    """The command that makes rows, as floats at `address`, in quantised form, or both: whatever turns out to be read.

    Places for both are taken together: what is free later may be in use when the command runs.
    """

    command: Command
    address: int
    quantised: _Quantised


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A forward pass that can be run again."""

    commands: Commands
    output: Array


class CpuOps(NumpyOps):
    """Implements `Ops[Array, PackedMatrix]`; what its methods compute is described there.

    Raises `DeviceError` if the threads cannot be started or the instruction set is not supported.
    """

    name = "cpu"

    def __init__(self, num_threads: int, instruction_set: str | None = None) -> None:
        supported = _cpu_kernels.supported()
        if instruction_set is not None and instruction_set not in supported:
            raise DeviceError(
                f"Instruction set {instruction_set!r} is not supported here; expected one of {supported}."
            )
        self.instruction_set = instruction_set or supported[-1]
        self.kv_dtype = "bfloat16" if self.instruction_set.endswith("bf16") else "float16"
        self.num_threads = num_threads
        self.kernel_seconds = 0.0
        """Time spent inside the kernels so far."""
        try:
            self._team = _cpu_kernels.create_team(num_threads)
        except OSError as error:
            raise DeviceError(f"{error}; give a smaller num_threads.") from error
        self._arena = Arena()
        self._header = np.zeros(len(HEADER_FIELDS) + 2, np.uint64)
        self._workspace = Workspace(2**20)
        self._scratch = np.empty(0, np.float32)
        self._recording: list[Command] | None = None
        self._recorded: dict[tuple[Function, int, int], _Recorded] = {}
        self._batch: Batch[Array] | None = None

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

    def allocate_cache(self, shape: CacheShape, dtype: str) -> Array:
        """As every backend's, with room behind it: the kernels read whole vectors."""
        exact = super().allocate_cache(shape, dtype)
        with_room = np.zeros(exact.size + MAX_BLOCK_SIZE, exact.dtype)
        return with_room[: exact.size].reshape(exact.shape)

    def close(self) -> None:
        """Forget the recorded passes; threads end when the last reference to this object does."""
        self._recorded.clear()
        self._workspace = Workspace(2**20)

    # Running

    def replay(self, function: Function, batch: Batch[Array]) -> Array:
        """`function(batch)`, recorded and run in one call."""
        key = (function, len(batch.token_ids), len(batch.sampled))
        recorded = self._recorded.pop(key, None) or self._record(function, batch)
        self._recorded[key] = recorded  # the latest last
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        self._fill_header(batch)
        self._run(recorded.commands)
        return recorded.output

    def _record(self, function: Function, batch: Batch[Array]) -> _Recorded:
        while True:
            self._workspace.reset()
            commands: list[Command] = []
            self._recording = commands
            self._batch = batch
            try:
                output = function(batch)
                self._read(output)
                return _Recorded(_as_array(commands), output)
            except WorkspaceFullError:
                self._recorded.clear()  # they point into the memory that is about to be replaced
                self._workspace.grow()
            finally:
                self._recording = self._batch = None

    def _run(self, commands: Commands) -> None:
        started = time.perf_counter()
        _cpu_kernels.run(self._team, self.instruction_set, commands)
        self.kernel_seconds += time.perf_counter() - started

    def _emit(self, output: Array, **fields: int | float) -> Command:
        """A command that makes `output`: recorded, or run at once."""
        command: Command = {"output": _address(output), **fields}
        if self._recording is None:
            self._run(_as_array([command]))
        else:
            self._recording.append(command)
        return command

    def _emit_rows(self, output: Array, **fields: int | float) -> Array:
        """Likewise for operations that can quantise the rows they make; recorded, they write floats only if read."""
        rows, width = output.shape
        command = self._emit(output, **fields)
        span = _span(output)
        if self._recording is not None and span is not None and width % GROUP == 0:
            span.companion = _Product(command, _address(output), self._empty_quantised(rows, width))
            command["output"] = 0
        return output

    def _read(self, x: Array) -> int:
        """The address of floats, which must be there when a command reads them."""
        product = _product(x)
        if product is not None:
            product.command["output"] = product.address
        return _address(x)

    def _empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        return np.empty(shape, dtype) if self._recording is None else self._workspace.take(shape, dtype)

    def _use(self, batch: Batch[Array]) -> int:
        """Address of the header, which describes this batch when the command runs."""
        if self._recording is None:
            self._fill_header(batch)
        else:
            assert batch is self._batch, "a recorded function used another batch"
        return _address(self._header)

    def _fill_header(self, batch: Batch[Array]) -> None:
        addresses = [_address(getattr(batch, name)) for name in HEADER_FIELDS]
        self._header[:] = [*addresses, batch.block_tables.shape[1], len(batch.rows)]

    # The forward pass

    def embed(self, token_ids: Array, table: PackedMatrix) -> Array:
        """Rows of the table, decoded."""
        if self._recording is None:
            self._header[0] = _address(token_ids)
        else:
            assert self._batch is not None
            assert token_ids is self._batch.token_ids, "a recorded function embedded other tokens than the batch's"
        output = self._empty((len(token_ids), table.in_features))
        self._emit(
            output,
            op=EMBED,
            kind=table.kind,
            rows=len(token_ids),
            out=table.in_features,
            weight=_address(table.data),
            batch=_address(self._header),
        )
        return output

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """The norm and, where a quantised product follows, quantisation."""
        return self._emit_rows(
            self._empty(x.shape),
            op=RMS_NORM,
            rows=len(x),
            **{"in": x.shape[1]},
            eps=eps,
            input=self._read(x),
            weight=_address(weight),
        )

    def linear(self, x: Array, weight: PackedMatrix, bias: Array | None, residual: Array | None) -> Array:
        """Integer products for a quantised weight, else float32."""
        fields, _alive = self._factors(x, weight, bias)
        output = self._empty((len(x), weight.out_features))
        second = 0 if residual is None else self._read(residual)
        self._emit(output, op=LINEAR, out=weight.out_features, second=second, **fields)
        return output

    def logits(self, x: Array, head: PackedMatrix) -> Array:
        """A product like the others."""
        return self.linear(x, head, None, None)

    def gated_linear(self, x: Array, gate_up: PackedMatrix, bias: Array | None) -> Array:
        """Both products, the activation and, where a quantised product follows, quantisation."""
        width = gate_up.out_features // 2
        fields, _alive = self._factors(x, gate_up, bias)
        return self._emit_rows(self._empty((len(x), width)), op=GATED_LINEAR, out=width, **fields)

    def _factors(self, x: Array, weight: PackedMatrix, bias: Array | None) -> tuple[dict[str, int], _Quantised | None]:
        """Fields that describe a product, and what must live until its output has a place."""
        fields = {
            "kind": weight.kind,
            "rows": len(x),
            "in": weight.in_features,
            "weight": _address(weight.data),
            "bias": 0 if bias is None else _address(bias),
        }
        if not weight.is_quantised:
            return fields | {"input": self._read(x), "in_stride": x.strides[0] // 4}, None
        quantised = self._quantise(x)
        q, scale, total = quantised.addresses
        return fields | {"q": q, "q_scale": scale, "q_sum": total}, quantised

    def _quantise(self, x: Array) -> _Quantised:
        """The quantised form of x, made by the command that makes x if there is one that can."""
        product = _product(x)
        if product is not None and product.quantised.q.shape == x.shape:  # the whole of it
            product.command.update(_made_fields(product.quantised))
            return product.quantised
        rows, width = x.shape
        quantised = self._empty_quantised(rows, width)
        fields = {"op": QUANTISE, "rows": rows, "in": width, "input": self._read(x), "in_stride": x.strides[0] // 4}
        self._emit(quantised.q, **fields, **_made_fields(quantised))
        return quantised

    def _empty_quantised(self, rows: int, width: int) -> _Quantised:
        groups = (rows, width // GROUP)
        return _Quantised(self._empty((rows, width), np.int8), self._empty(groups), self._empty(groups))

    def rope_and_cache(
        self,
        qkv: Array,
        rope: Array,
        cache: Array,
        layer: int,
        batch: Batch[Array],
        num_query_heads: int,
        norms: tuple[Array, Array, float] | None,
    ) -> Array:
        """Rotates q and k in place; the result is a view of qkv."""
        head_dim = cache.shape[5]
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
        self._emit(
            qkv,
            op=ROPE_CACHE,
            rows=len(qkv),
            num_query_heads=num_query_heads,
            eps=eps,
            second=_address(rope),
            weight=0 if q_norm is None else _address(q_norm),
            bias=0 if k_norm is None else _address(k_norm),
            batch=self._use(batch),
            **_cache_fields(cache, layer),
        )
        return qkv[:, : num_query_heads * head_dim].reshape(len(qkv), num_query_heads, head_dim)

    def paged_attention(
        self, query: Array, cache: Array, layer: int, batch: Batch[Array], scale: float, window: int | None
    ) -> Array:
        """Online softmax over the blocks, in order of position; and quantisation of heads that are whole groups."""
        num_tokens, num_query_heads, head_dim = query.shape
        output = self._empty((num_tokens, num_query_heads * head_dim))
        emit = self._emit if head_dim % GROUP else self._emit_rows
        emit(
            output,
            op=ATTENTION,
            rows=num_tokens,
            in_stride=query.strides[0] // 4,
            num_query_heads=num_query_heads,
            window=window or 0,
            scale=scale,
            input=self._read(query),
            batch=self._use(batch),
            **_cache_fields(cache, layer),
        )
        self._read(output)  # its sums are made there
        return output

    def take(self, x: Array, indices: Array) -> Array:
        """Rows of x; within a recorded function, those that sample."""
        if self._recording is None:
            taken: Array = x[indices]
            return taken
        assert self._batch is not None
        assert indices is self._batch.sampled, "a recorded function took other rows than those that sample"
        output = self._empty((len(indices), x.shape[1]))
        self._emit(
            output,
            op=TAKE,
            rows=len(indices),
            **{"in": x.shape[1]},
            input=self._read(x),
            batch=_address(self._header),
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
                batch.streams.astype(np.uint32, copy=False),
                batch.positions.astype(np.uint32, copy=False),
            )
        token_ids = np.empty(num_rows, np.int32)
        self._emit(
            token_ids,
            op=SAMPLE,
            rows=num_rows,
            **{"in": vocab_size},
            input=_address(logits),
            second=_address(batch.temperature),
            weight=_address(batch.top_p),
            bias=_address(batch.min_p),
            third=_address(numbers),
            extra=_address(batch.top_k),
            cache=_address(self._scratch),
        )
        if batch.num_logprobs < 0:
            return Sampled(token_ids, None, None, None)
        return Sampled(token_ids, *logprobs(float32(raw_logits), token_ids, batch.num_logprobs))


def _as_array(commands: list[Command]) -> Commands:
    return np.array([tuple(command.get(name, 0) for name in COMMAND_FIELDS) for command in commands], COMMAND_DTYPE)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _span(array: Array) -> Span | None:
    """The piece of workspace that an array lies in."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Span) else None


def _product(array: Array) -> _Product | None:
    """How an array is made, if it is recorded rows."""
    span = _span(array)
    return span.companion if span is not None and isinstance(span.companion, _Product) else None


def _made_fields(quantised: _Quantised) -> dict[str, int]:
    q, scale, total = quantised.addresses
    return {"made_q": q, "made_scale": scale, "made_sum": total}


def _cache_fields(cache: Array, layer: int) -> dict[str, int]:
    _, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    kinds = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
    return {
        "kind": kinds[cache.dtype.name],
        "layer": layer,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "cache": _address(cache),
    }
