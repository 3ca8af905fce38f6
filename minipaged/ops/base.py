"""The Ops protocol: the seam between the model and the machine.

Coarse on purpose: each operation is a kernel launch or two on a GPU. T is the number of tokens in the step, S of
sequences, N of rows that sample. `Array` is the device's array type; `Weight` whatever the device keeps a matrix as
(packed, say).

The KV cache is a `KVPool`: what lies where in a block says its `KVLayout`. A token's slot is
`block * block_size + place % block_size`, where `place` counts the tokens whose KV comes before its
own in its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from minipaged.config import Dtype, KVDtype
from minipaged.kv.layout import ElementType, KVLayout
from minipaged.ops.tensor import HostTensor
from minipaged.progress import Progress

Array = TypeVar("Array")
Weight = TypeVar("Weight")

HostArray = (
    NDArray[np.float32]
    | NDArray[np.int32]
    | NDArray[np.int64]
    | NDArray[np.uint32]
    | NDArray[np.uint64]
    | NDArray[np.bool_]
)


@dataclass(frozen=True, slots=True)
class Batch(Generic[Array]):
    """The tokens of one step, sequence after sequence, and where their KV lives."""

    token_ids: Array
    """int32 [T]"""
    positions: Array
    """int32 [T]: where each token stands in its sequence's text; the rotation of q and k goes by it."""
    kv_extents: Array
    """int32 [T]: how many tokens' KV of its sequence a token sees without a window, its own as the last.

    Attention goes by it. It is `positions + 1` while a sequence keeps the KV of all its tokens.
    """
    slots: Array
    """int64 [T]: where to write K and V."""
    cu_seqlens: Array
    """int32 [S + 1]: tokens [cu_seqlens[s], cu_seqlens[s + 1]) belong to sequence s."""
    rows: Array
    """int32 [S]: the row of `block_tables` of each sequence."""
    block_tables: Array
    """int32 [max_running, blocks per sequence]"""
    sampled: Array
    """int32 [N]: the indices into T whose logits are wanted."""
    next_positions: Array
    """uint32 [N]: the position after each of those, that of the token to be chosen."""
    device_part: object = None
    """What `Ops.upload_batch` adds for the device's own use: what the host must know to launch kernels, say."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes that a device's operations are made for, or refuse."""

    hidden_size: int
    intermediate_size: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class ElementTypes:
    """The number formats that were asked for, "auto" or the name of one, and what the checkpoint holds."""

    weights: Dtype
    """And activations."""
    cache: KVDtype
    stored: str
    """`HostTensor.encoding` of the checkpoint's matrices."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step there may be."""

    max_tokens: int
    max_sequences: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KVPool(Generic[Array]):
    """The KV blocks on a device: a handle that only the device's own operations look into."""

    layout: KVLayout
    num_blocks: int
    data: Array
    """The blocks, one after the other along the first axis."""


class PendingCopy(Protocol):
    """A copy between device and host pool that may still be running."""

    def done(self) -> bool:
        """Whether it has finished. Never blocks."""

    def wait(self) -> None:
        """Block until it has finished."""


@dataclass(frozen=True, slots=True)
class Penalties(Generic[Array]):
    """Rows of the logits that the tokens so far change, P of them, and an entry for each such token, E in all."""

    rows: Array
    """int32 [P]: indices into N."""
    starts: Array
    """int32 [P + 1]: entries [starts[p], starts[p + 1]) are row p's."""
    token_ids: Array
    """int32 [E]: tokens of the prompt or the output, distinct within a row."""
    counts: Array
    """int32 [E]: occurrences in the output; 0: in the prompt only."""
    repetition: Array
    """float32 [P]"""
    presence: Array
    """float32 [P]"""
    frequency: Array
    """float32 [P]"""


@dataclass(frozen=True, slots=True)
class Bias(Generic[Array]):
    """Sparse additions to the logits: logit_bias, and -inf where min_tokens forbids a stop token; E of them."""

    rows: Array
    """int32 [E]: indices into N."""
    token_ids: Array
    """int32 [E]"""
    values: Array
    """float32 [E]"""


@dataclass(frozen=True, slots=True)
class SamplingBatch(Generic[Array]):
    """Per sampling row; N of them."""

    temperature: Array
    """float32 [N]; 0: greedy."""
    top_k: Array
    """int32 [N]; vocab_size: no limit."""
    top_p: Array
    """float32 [N]"""
    min_p: Array
    """float32 [N]"""
    seeds: Array
    """uint64 [N]: the Philox key."""
    sample_index: Array
    """uint32 [N]: which of the request's samples, part of the Philox counter."""
    positions: Array
    """uint32 [N]: position of the token being chosen, part of the Philox counter."""
    num_logprobs: int
    """Most likely tokens to return per row; -1: no log-probabilities at all."""
    all_greedy: bool
    """Whether every temperature is 0."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Host arrays, the result of `sample`."""

    token_ids: NDArray[np.int32]
    """[N]; -1 where the row's logits held NaN or no finite value."""
    logprobs: NDArray[np.float32] | None
    """[N]: log-softmax of the raw logits at the chosen token."""
    top_ids: NDArray[np.int32] | None
    """[N, num_logprobs], most likely first; ties by smaller id."""
    top_logprobs: NDArray[np.float32] | None
    """[N, num_logprobs]"""


class Ops(Protocol[Array, Weight]):
    """One machine's implementation. Not thread-safe: one worker thread calls it, in order."""

    name: str
    """The name that `EngineConfig.device` gives this device."""
    kv_dtype: ElementType
    """Element type of the KV cache unless told otherwise; known after `prepare`."""
    max_batched_tokens: int
    """Most tokens of a step unless told otherwise."""

    # Loading, in this order

    def prepare(self, dimensions: Dimensions, types: ElementTypes, progress: Progress) -> None:
        """Get ready for a model, and compile what must be compiled for it.

        Raises `ConfigError` for types or a block size that this device cannot compute with, and
        `UnsupportedModelError` for sizes of the model, where another device takes them.
        """

    def cache_memory(self, fraction: float) -> int:
        """Bytes that the KV cache may take by default, given what is allocated so far.

        `fraction` of a GPU's memory is for the engine, and what other programs use.
        """

    def load_matrix(self, tensors: Sequence[HostTensor]) -> Weight:
        """Matrices [out_i, in] stacked along their rows into one [sum of out_i, in] (q, k and v, say)."""

    def load_vector(self, tensors: Sequence[HostTensor]) -> Array:
        """Vectors concatenated, float32."""

    def load_gate_up(self, gate: HostTensor, up: HostTensor) -> Weight:
        """The two matrices [I, in] of `gated_linear`, in whatever order of rows suits it."""

    def load_gate_up_bias(self, gate: HostTensor, up: HostTensor) -> Array:
        """Their biases [I], float32, in the same order."""

    def load_rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> Array:
        """Rotation table from cos and sin, float32 [max_model_len, head_dim / 2] each."""

    def reserve(
        self, limits: StepLimits, layout: KVLayout, logits: Callable[[Batch[Array], KVPool[Array]], Array]
    ) -> None:
        """Allocate what steps within the limits need beside weights and cache, so that they allocate nothing.

        `logits(batch, cache)` is the forward pass that will run, over a pool of that layout with any number of blocks.
        """

    def allocate_cache(self, layout: KVLayout, num_blocks: int) -> KVPool[Array]:
        """The device pool; its blocks hold zeros."""

    def allocate_host_cache(self, layout: KVLayout, num_blocks: int) -> NDArray[np.uint8]:
        """The host pool as bytes [num_blocks, layout.bytes_per_block]; page-locked where that speeds up copies."""

    def upload(self, array: HostArray) -> Array:
        """A host array, on the device."""

    def upload_together(self, arrays: Sequence[HostArray]) -> list[Array]:
        """Several of them, by one copy."""

    def upload_batch(self, batch: Batch[HostArray], changed: NDArray[np.int64]) -> Batch[Array]:
        """A step's batch, on the device, by one copy. It is valid, as all that is computed from it, until the next.

        `batch.block_tables` is the same array in every call. `changed` are the places in it, counted row after row,
        whose values differ from the call before; at first none do from -1. Nothing in the batch may be written to
        while it is valid, except places of `block_tables` that it does not use.
        """

    def download(self, array: Array) -> NDArray[np.float32]:
        """A float32 device array, on the host."""

    def close(self) -> None:
        """Free all device memory."""

    # The forward pass

    def embed(self, token_ids: Array, table: Weight) -> Array:
        """[T], [vocab_size, hidden] -> [T, hidden]"""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x**2) + eps) * weight, [T, hidden] -> [T, hidden]; arXiv:1910.07467."""

    def linear(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        """[T, in] @ [out, in].T + [out] + [T, out] -> [T, out]"""

    def logits(self, x: Array, head: Weight) -> Array:
        """[N, hidden] @ [vocab_size, hidden].T -> [N, vocab_size], float32 on every device."""

    def gated_linear(self, x: Array, gate_up: Weight, bias: Array | None) -> Array:
        """silu(x @ gate.T + gate's bias) * (x @ up.T + up's bias), [T, in] -> [T, I]; arXiv:2002.05202.

        silu(z) = z / (1 + exp(-z)). `gate_up` and `bias` are what `load_gate_up` and `load_gate_up_bias` returned.
        """

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
        """Rotate q and k at their positions, write k and v into their slots, return the rotated q.

        qkv is [T, (num_query_heads + 2 num_kv_heads) head_dim]; the result [T, num_query_heads, head_dim]. Halves are
        rotated (element i with i + head_dim / 2). `norms`: RMSNorm weights [head_dim] of q and k, and eps; they are
        applied first.
        """

    def paged_attention(
        self, query: Array, cache: KVPool[Array], layer: int, batch: Batch[Array], scale: float, window: int | None
    ) -> Array:
        """Causal attention of each token over the first `kv_extent` tokens of its sequence's KV (the last `window`).

        query [T, num_query_heads, head_dim] -> [T, num_query_heads * head_dim]; query head h reads KV head
        h // (num_query_heads / num_kv_heads). Slots behind the extent hold anything, NaN included, and are not read.
        """

    def take(self, x: Array, indices: Array) -> Array:
        """Rows of x."""

    def replay(self, function: Callable[[Batch[Array]], Array], batch: Batch[Array]) -> Array:
        """`function(batch)`, which calls only operations above and does the same for every batch of the same sizes.

        A device may record what it does once and repeat that. The result is valid until the next call.
        """

    # Choosing tokens

    def adjust_logits(self, logits: Array, penalties: Penalties[Array] | None, bias: Bias[Array] | None) -> Array:
        """Apply penalties, then bias, to a copy of logits [N, vocab_size]."""

    def sample(self, logits: Array, raw_logits: Array, batch: SamplingBatch[Array]) -> Sampled:
        """Temperature, top-k, top-p, min-p, then one draw per row; log-probabilities from `raw_logits`.

        Rows whose chosen-from logits hold NaN, or no finite value, give token id -1 and harm no other row.
        """

    # Blocks

    def fill_blocks(self, cache: KVPool[Array], blocks: Sequence[int], value: float) -> None:
        """Set whole blocks (debug mode's NaN)."""

    def copy_blocks(self, cache: KVPool[Array], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks within the device pool, before anything launched later."""

    def blocks_to_host(
        self, cache: KVPool[Array], host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """Start copying (device, host) blocks; reads what was written by everything launched before."""

    def blocks_from_host(
        self, host: NDArray[np.uint8], cache: KVPool[Array], pairs: Sequence[tuple[int, int]]
    ) -> PendingCopy:
        """Start copying (host, device) blocks; everything launched later sees them."""
