"""HostTensor: one tensor of a checkpoint, still encoded as it is in the (memory-mapped) file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A weight on its way to the device. Ops decide whether to keep its encoding, repack it, or decode it."""

    name: str
    shape: tuple[int, ...]
    """In elements, outermost first: a matrix is [out_features, in_features]."""
    encoding: str
    """"F32", "F16", "BF16", or the name of a GGUF quantisation type such as "Q4_1"."""
    rows: NDArray[np.uint8]
    """Raw bytes [shape[0], bytes per row] (a vector: [1, bytes]); a view of the mapped file where possible."""
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    """Raw rows [n, bytes per row] to float32 [n, elements per row]."""

    def float32(self) -> NDArray[np.float32]:
        """The decoded tensor, float32 [*shape]."""
        return self.decode(self.rows).reshape(self.shape)
