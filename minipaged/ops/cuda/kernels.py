"""CudaKernels: the kernels of cuda/, compiled for one model, and how they are started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minipaged.ops.cuda.errors import cuda_errors, device_error, error_classes
from minipaged.ops.cuda.launches import GATED, LINEAR, LOGITS, Launch, chunk_tile, decode_tile
from minipaged.ops.cuda.modules import CudaModules, Source

if TYPE_CHECKING:
    import cupy

KV_SPLIT = 512
"""Positions that one block of a decoding sequence's attention takes. A token's bits depend on it."""

NULL = np.uint64(0)
"""A pointer to nothing. For None, CuPy before version 14 gives the driver no argument at all, and it may crash."""

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
"""Element types by the name that they have in C++."""


class CudaKernels:
    """Compiled for one element type and head_dim. All launches go to one stream."""

    def __init__(self, modules: CudaModules, stream: cupy.cuda.Stream, *, element: str, head_dim: int) -> None:
        self._stream = stream
        self._errors = error_classes()
        self.kv_split = KV_SPLIT
        self._functions: dict[str, cupy.RawKernel] = {}
        self.is_counting = False
        """Whether the workspace is being measured; then nothing is launched."""
        self.attention_decode, self.attention_any = decode_tile(head_dim), chunk_tile(head_dim)
        of_type = f"ELEMENT={ELEMENTS[element]}"
        of_head = (of_type, f"HEAD_DIM={head_dim}")
        kernels = {
            Source("embed", (of_type,)): ["embed"],
            Source("rms_norm", (of_type,)): ["rms_norm"],
            Source("linear", (of_type,)): [tile.kernel for tile in (*LINEAR, *LOGITS, *GATED)],
            Source("fill_blocks", (of_type,)): ["fill_blocks"],
            Source("rope_and_cache", of_head): ["rope_and_cache"],
            Source("attention", (*of_head, f"KV_SPLIT={self.kv_split}")): [
                "attention_decode",
                "attention",
                "attention_combine",
            ],
            Source("take"): ["take"],
            Source("sampling"): ["penalise", "add_bias", "sample", "logprobs"],
            Source("copy_blocks"): ["copy_blocks"],
            Source("update_tables"): ["update_tables"],
        }
        with cuda_errors("load its kernels"):
            for module, names in zip(modules.load(list(kernels)), kernels.values(), strict=True):
                self._functions |= {name: module.get_function(name) for name in names}
            for tile in (*LINEAR, *LOGITS, *GATED, self.attention_decode, self.attention_any):
                self._functions[tile.kernel].max_dynamic_shared_size_bytes = tile.shared_bytes

    def start(self, name: str, launch: Launch, arguments: Sequence[cupy.ndarray | np.generic | None]) -> None:
        """On the stream. Numbers are NumPy's, of the types that the kernel declares: CuPy sends them as they are."""
        if self.is_counting:
            return
        given = tuple(NULL if argument is None else argument for argument in arguments)
        try:
            function = self._functions[name]
            function(launch.grid, (launch.threads,), given, shared_mem=launch.shared_bytes, stream=self._stream)
        except self._errors as error:
            raise device_error(f"launch {name}", error) from error
