"""Every kernel on random shapes and inputs, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.measured_sizes import TINY, llama
from benchmarks.gpu.parts.kernel_errors import run
from minipaged.ops.cuda.ops import HEAD_DIMS


@settings(max_examples=40)
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 16),
    hidden=st.integers(1, 80).map(lambda eighths: 8 * eighths),
    intermediate=st.integers(1, 80).map(lambda eighths: 8 * eighths),
    vocab=st.integers(300, 1000),
    tokens=st.integers(2, 300),
    positions=st.integers(1, 3000),
)
def test_errors_are_those_of_rounding(
    head_dim: int,
    num_kv_heads: int,
    group: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    tokens: int,
    positions: int,
) -> None:
    model = llama(
        hidden=hidden,
        intermediate=intermediate,
        layers=1,
        heads=(group * num_kv_heads, num_kv_heads),
        head_dim=head_dim,
        vocab=vocab,
    )
    for row in run(replace(TINY, model=model, error_tokens=tokens, error_positions=positions)):
        assert row.share is not None
        assert row.value == 0 if "token ids" in row.what else row.share < 3, row


def test_a_card_that_computes_wrongly_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: with another epsilon, rms_norm is far off."""
    rows = run(replace(TINY, model=replace(TINY.model, rms_norm_eps=1e-5)))
    from minipaged.ops.cuda.ops import CudaOps

    rms_norm = CudaOps.rms_norm
    monkeypatch.setattr(CudaOps, "rms_norm", lambda ops, x, weight, eps: rms_norm(ops, x, weight, 0.1))
    assert [row.what for row in rows if row.share is not None and row.share >= 3] == [
        "rms_norm, bfloat16",
        "rms_norm, float16",
    ]
