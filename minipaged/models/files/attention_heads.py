"""Heads: a model's attention heads, as either kind of configuration gives them under keys of its own."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.errors import ModelLoadError
from minipaged.models.files.fields import Fields


@dataclass(frozen=True, slots=True)
class Heads:
    """`num_query_heads` is a multiple of `num_kv_heads`, `head_dim` even."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(fields: Fields, *, hidden_size: str, num_query_heads: str, num_kv_heads: str, head_dim: str) -> Heads:
    """The arguments are keys. Raises `ModelLoadError`.

    Without a number of KV heads there are as many as query heads; without a head_dim these share the hidden size.
    """
    hidden, query_heads = fields.integer(hidden_size), fields.integer(num_query_heads)
    kv_heads = fields.integer(num_kv_heads, query_heads)
    if query_heads % kv_heads:
        raise fields.wrong(num_kv_heads, f"a divisor of {num_query_heads}, {query_heads}")
    if fields.get(head_dim) is None and hidden % query_heads:
        raise fields.wrong(
            head_dim, f"a value, since {hidden_size} {hidden} is no multiple of {num_query_heads} {query_heads}"
        )
    size = fields.integer(head_dim, hidden // query_heads)
    if size % 2:
        raise ModelLoadError(
            f"{fields.where}: {head_dim} is {size} (given, or {hidden_size} / {num_query_heads}); expected an even "
            "number, because rotary embedding turns pairs."
        )
    return Heads(query_heads, kv_heads, size)
