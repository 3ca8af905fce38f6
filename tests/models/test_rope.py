"""Rotation tables against the published rules, one frequency at a time; the golden logits cover them inside a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.models.config import (
    DefaultRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
)
from minipaged.models.rope import frequencies, rope_tables

HALVES = st.integers(1, 64)
THETAS = st.sampled_from([10.0, 1e4, 5e5, 1e6])


def model_config(head_dim: int, theta: float, scaling: RopeScaling) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=10,
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=100,
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        sliding_windows=(None,),
        eos_token_ids=(),
    )


def plain(half: int, theta: float) -> list[float]:
    return [1 / theta ** (pair / half) for pair in range(half)]


@given(half=HALVES, theta=THETAS, position=st.integers(0, 999))
def test_default_tables(half: int, theta: float, position: int) -> None:
    cos, sin = rope_tables(model_config(2 * half, theta, DefaultRope()), 1000)
    assert cos.shape == sin.shape == (1000, half)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[position], [math.cos(position * f) for f in plain(half, theta)], atol=1e-7)
    np.testing.assert_allclose(sin[position], [math.sin(position * f) for f in plain(half, theta)], atol=1e-7)


def test_far_positions_are_as_exact_as_near_ones() -> None:
    """In float32 the angle of position 131071 alone would be off by up to 0.004."""
    cos, _ = rope_tables(model_config(4, 10.0, DefaultRope()), 131072)
    angle = 131071 / math.sqrt(10)
    assert cos[-1, 1] == np.float32(math.cos(angle))


@given(half=HALVES, theta=THETAS, factor=st.floats(1, 64))
def test_linear_is_another_position(half: int, theta: float, factor: float) -> None:
    scaled = frequencies(2 * half, theta, LinearRope(factor))
    np.testing.assert_allclose(scaled * factor, plain(half, theta), rtol=1e-12)


def test_stored_factors_divide() -> None:
    scaled = frequencies(6, 1000.0, FactorsRope((1.0, 2.0, 8.0)))
    np.testing.assert_allclose(scaled, [1, 0.05, 0.00125], rtol=1e-12)


@given(half=HALVES, theta=THETAS, original=st.sampled_from([32, 8192]), factor=st.floats(1, 32))
def test_llama3_bands(half: int, theta: float, original: int, factor: float) -> None:
    scaling = Llama3Rope(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original)
    for kept, scaled in zip(plain(half, theta), frequencies(2 * half, theta, scaling), strict=True):
        wavelength = 2 * math.pi / kept
        if wavelength < original / 4:
            expected = kept
        elif wavelength > original:
            expected = kept / factor
        else:
            smooth = (original / wavelength - 1) / 3
            expected = (1 - smooth) * kept / factor + smooth * kept
        assert scaled == pytest.approx(expected, rel=1e-9)


@given(half=st.integers(4, 64), theta=THETAS, truncate=st.booleans())
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(half: int, theta: float, truncate: bool) -> None:
    original, factor = 4096, 8.0
    scaling = YarnRope(factor, original, truncate=truncate)
    shares = frequencies(2 * half, theta, scaling) / plain(half, theta)
    assert (np.diff(shares) <= 1e-12).all()
    for pair, share in enumerate(shares):
        # The ramp's ends may be rounded outwards by one pair.
        slower, faster = (original / (2 * math.pi) / theta ** (p / half) for p in (pair + 1, pair - 1))
        if slower > 32:
            assert share == pytest.approx(1, rel=1e-9)
        if faster < 1:
            assert share == pytest.approx(1 / factor, rel=1e-9)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (YarnRope(4.0, 32), 0.1 * math.log(4) + 1),
        (YarnRope(0.5, 32), 1.0),
        (YarnRope(4.0, 32, attention_factor=0.75), 0.75),
        (YarnRope(4.0, 32, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (YarnRope(4.0, 32, mscale=0.5, mscale_all_dim=2.0), (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        (YarnRope(4.0, 32, mscale=0.5), 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor(scaling: YarnRope, expected: float) -> None:
    cos, sin = rope_tables(model_config(16, 1e4, scaling), 64)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)
