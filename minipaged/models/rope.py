"""Rotary position embedding: the tables of cosines and sines for every scaling kind (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from minipaged.models.config import (
    DefaultRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
)


def rope_tables(config: ModelConfig, max_model_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, float32 [max_model_len, head_dim / 2] each, computed in float64.

    Entry [p, i] belongs to the angle p * frequency[i]; YaRN's attention factor is multiplied in.
    """
    scaling = config.rope_scaling
    angles = np.outer(np.arange(max_model_len), frequencies(config.head_dim, config.rope_theta, scaling))
    factor = yarn_attention_factor(scaling) if isinstance(scaling, YarnRope) else 1.0
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    """Radians per position of each pair of elements, float64 [head_dim / 2], fastest first."""
    kept = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match scaling:
        case DefaultRope():
            return kept
        case LinearRope():
            return kept / scaling.factor
        case FactorsRope():
            return kept / np.array(scaling.factors, np.float64)
        case Llama3Rope():
            keep = _llama3_share(kept, scaling)
        case YarnRope():
            keep = _yarn_share(head_dim, theta, scaling)
    return keep * kept + (1 - keep) * kept / scaling.factor


def yarn_attention_factor(scaling: YarnRope) -> float:
    """The factor on cos and sin, hence its square on attention scores: sqrt(1/t) of YaRN (arXiv:2309.00071, 3.4).

    DeepSeek-V2 (arXiv:2405.04434) gave it two coefficients, of which only the ratio acts here.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _log_scale(scaling.factor, scaling.mscale) / _log_scale(scaling.factor, scaling.mscale_all_dim)
    return _log_scale(scaling.factor, 1.0)


def _llama3_share(kept: NDArray[np.float64], scaling: Llama3Rope) -> NDArray[np.float64]:
    """How much of each frequency is kept, 0 to 1 (apply_scaling in Meta's Llama 3.1 reference code).

    Linear in how often the pair turns within the original context: 0 at low_freq_factor turns, 1 at high_freq_factor.
    """
    turns = scaling.original_max_position_embeddings * kept / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(share, 0, 1)


def _yarn_share(head_dim: int, theta: float, scaling: YarnRope) -> NDArray[np.float64]:
    """How much of each frequency is kept, 0 to 1 (arXiv:2309.00071, 3.2).

    Linear in the pair's index, between the pairs that turn beta_fast and beta_slow times within the original context.
    """

    def index_of(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as everywhere: a step instead of a division by zero
    ramp: NDArray[np.float64] = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return 1 - ramp


def _log_scale(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1 if factor > 1 else 1.0
