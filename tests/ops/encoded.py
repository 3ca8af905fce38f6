"""Random tensors in every encoding, as a checkpoint would hold them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from minipaged.ops.tensor import HostTensor

FLOATS = ("F32", "F16", "BF16")
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_S": (0,),
    "IQ2_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ1_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Quantised types, and where in a block their float16 numbers stand; everything else may be any bytes."""


def random_tensor(
    encoding: str, rows: int, in_features: int, generator: np.random.Generator, *, magnitude: float = 0.05
) -> HostTensor:
    """[rows, in_features], weights of about that magnitude (floats) or block scales of it (quantised), either sign."""
    if encoding in FLOATS:
        return float_tensor(encoding, generator.standard_normal((rows, in_features)) * magnitude)
    length, size = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    blocks = generator.integers(0, 256, (rows, in_features // length, size), np.uint8)
    for offset in HALVES[encoding]:
        numbers = generator.uniform(0.5, 1, blocks.shape[:2]) * generator.choice((-1, 1), blocks.shape[:2]) * magnitude
        blocks[..., offset : offset + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return quantised_tensor(encoding, blocks.reshape(rows, -1))


def quantised_tensor(encoding: str, rows: NDArray[np.uint8]) -> HostTensor:
    """From rows of whole blocks."""
    kind = GGMLQuantizationType[encoding]
    length, size = GGML_QUANT_SIZES[kind]

    def decode(some: NDArray[np.uint8]) -> NDArray[np.float32]:
        decoded: NDArray[np.float32] = dequantize(some, kind)
        return decoded

    return HostTensor(f"a {encoding} matrix", (len(rows), rows.shape[1] // size * length), encoding, rows, decode)


def float_tensor(encoding: str, values: NDArray[np.floating]) -> HostTensor:
    """[rows, in_features], rounded to the encoding."""
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[encoding]
    return HostTensor(
        f"an {encoding} matrix",
        values.shape,
        encoding,
        np.ascontiguousarray(values.astype(dtype)).view(np.uint8),
        lambda some: some.view(dtype).astype(np.float32),
    )
