"""ReferenceOps: the Ops protocol in plain NumPy, float32: the specification that other backends are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minipaged.kv.layout import ElementType
from minipaged.ops.base import Batch, KVPool
from minipaged.ops.reference.numpy_ops import Array, NumpyOps, float32, plane_elements
from minipaged.ops.tensor import HostTensor

Matrix = NDArray[np.float32]

FEW_ROWS = 8
"""Up to so many rows `linear` multiplies one by one: a product of two matrices first repacks the whole weight, which
costs about as much as that, and BLAS rounds it differently with the number of rows."""


class ReferenceOps(NumpyOps):
    """Implements `Ops[Array, Matrix]`; what its methods compute is described there.

    Infinity and NaN take their course through the forward pass without a warning, as on every other device: they stay
    in their own row, and `sample` reports them for that row.
    """

    name = "reference"
    kv_dtype: ElementType = "float32"

    # Loading

    def load_matrix(self, tensors: Sequence[HostTensor]) -> Matrix:
        """float32 [sum of out_i, in]."""
        stacked = np.empty((sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]), np.float32)
        start = 0
        for tensor in tensors:
            stacked[start : start + tensor.shape[0]] = tensor.float32()
            start += tensor.shape[0]
        return stacked

    def load_gate_up(self, gate: HostTensor, up: HostTensor) -> Matrix:
        """float32 [2 I, in], the gate's rows first."""
        return self.load_matrix([gate, up])

    def load_rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> Array:
        """float32 [2, max_model_len, head_dim / 2]."""
        return np.stack([cos, sin])

    # The forward pass

    def embed(self, token_ids: Array, table: Matrix) -> Array:
        """Rows of the table."""
        return table[_indices(token_ids)]

    @np.errstate(all="ignore")
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Normalised and weighted."""
        return _rms_norm(float32(x), float32(weight), eps)

    @np.errstate(all="ignore")
    def linear(self, x: Array, weight: Matrix, bias: Array | None, residual: Array | None) -> Array:
        """x @ weight.T + bias + residual."""
        rows = float32(x)
        if len(rows) > FEW_ROWS:
            y = rows @ weight.T
        else:
            y = np.empty((len(rows), len(weight)), np.float32)
            for row, result in zip(rows, y, strict=True):
                np.matmul(weight, row, out=result)
        if bias is not None:
            y += float32(bias)
        if residual is not None:
            y += float32(residual)
        return y

    def logits(self, x: Array, head: Matrix) -> Array:
        """x @ head.T."""
        return self.linear(x, head, None, None)

    @np.errstate(all="ignore")
    def gated_linear(self, x: Array, gate_up: Matrix, bias: Array | None) -> Array:
        """gate / (1 + exp(-gate)) * up."""
        gate, up = np.split(float32(self.linear(x, gate_up, bias, None)), 2, axis=1)
        silu: NDArray[np.float32] = gate / (1 + np.exp(-gate))
        return silu * up

    @np.errstate(all="ignore")
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
        """The rotated q, [T, num_query_heads, head_dim]."""
        layout = cache.layout
        num_kv_heads, head_dim = layout.keys.num_heads, layout.keys.width
        heads = float32(qkv).reshape(len(qkv), num_query_heads + 2 * num_kv_heads, head_dim)
        q, k, v = np.split(heads, [num_query_heads, num_query_heads + num_kv_heads], axis=1)
        if norms is not None:
            q_norm, k_norm, eps = norms
            q = _rms_norm(q, float32(q_norm), eps)
            k = _rms_norm(k, float32(k_norm), eps)

        cos, sin = float32(rope)[:, _indices(batch.positions), None]  # [T, 1, head_dim / 2] each
        q = _rotate(q, cos, sin)
        k = _rotate(k, cos, sin)

        block, offset = np.divmod(_indices(batch.slots), layout.block_size)
        for plane, written in ((layout.keys, k), (layout.values, v)):
            elements = plane_elements(cache, layer, plane)
            elements[block, :, offset] = written.astype(elements.dtype)
        return q

    @np.errstate(all="ignore")
    def paged_attention(
        self, query: Array, cache: KVPool[Array], layer: int, batch: Batch[Array], scale: float, window: int | None
    ) -> Array:
        """softmax(scale q k.T) v over the KV that each token sees, [T, num_query_heads * head_dim]."""
        num_tokens, num_query_heads, head_dim = query.shape
        layout = cache.layout
        num_kv_heads, block_size = layout.keys.num_heads, layout.block_size
        keys, values = plane_elements(cache, layer, layout.keys), plane_elements(cache, layer, layout.values)
        q = float32(query).reshape(num_tokens, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
        extents = _indices(batch.kv_extents)
        starts = _indices(batch.cu_seqlens)
        tables = _indices(batch.block_tables[_indices(batch.rows)])

        attended = np.empty_like(q)
        for start, end, table in zip(starts[:-1], starts[1:], tables, strict=True):
            blocks = table[: -(-int(extents[start:end].max(initial=1)) // block_size)]
            k, v = _by_head(keys[blocks]), _by_head(values[blocks])
            # One token at a time, so that what it does not see is never touched: 0 * NaN would be NaN.
            for t in range(start, end):
                stop = int(extents[t])
                first = 0 if window is None else max(0, stop - window)
                scores = scale * (q[t] @ k[:, first:stop].swapaxes(1, 2))
                attended[t] = _softmax(scores) @ v[:, first:stop]
        return attended.reshape(num_tokens, num_query_heads * head_dim)

    def take(self, x: Array, indices: Array) -> Array:
        """x[indices]."""
        return x[_indices(indices)]


def _indices(array: Array) -> NDArray[np.int64]:
    return array.astype(np.int64, copy=False)


def _rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    normed: NDArray[np.float32] = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps))
    return normed * weight


def _rotate(x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Element i and element i + half of each head are the two coordinates of a plane."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _by_head(blocks: Array) -> NDArray[np.float32]:
    """[blocks, num_kv_heads, block_size, head_dim] -> [num_kv_heads, positions, head_dim]."""
    num_blocks, num_kv_heads, block_size, head_dim = blocks.shape
    return float32(blocks).swapaxes(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis, shifted by its maximum so that nothing overflows."""
    weights: NDArray[np.float32] = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: NDArray[np.float32] = weights.sum(axis=-1, keepdims=True)
    return weights / total
