"""CudaOps on the fake GPU: driver, CuPy and NVRTC are fakes, and the emulator runs the kernels."""

from __future__ import annotations

import gc
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.engine.loading import dimensions_of
from minipaged.models.files.model_source import open_model
from minipaged.models.llama import load_llama
from minipaged.ops.base import Batch, ElementTypes, StepLimits
from minipaged.ops.cuda import kernels as cuda_kernels
from minipaged.ops.cuda import ops as cuda_ops
from minipaged.ops.cuda.ops import CudaOps
from minipaged.ops.reference.numpy_ops import Array
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.progress import no_progress
from tests.ops.cuda.fake_cupy import fake_cupy
from tests.ops.cuda.fake_driver import FakeDriver, use_fake_driver
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.fake_nvrtc import use_fake_nvrtc

if TYPE_CHECKING:
    import cupy

KV_SPLIT = 64
"""Positions: few, so that short sequences have several splits."""


@contextmanager
def use_fake_gpu(gpu: Gpu) -> Iterator[Gpu]:
    """While it lasts, device="cuda" works; afterwards nothing must be left on the GPU."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        use_fake_driver(patch, FakeDriver())
        use_fake_nvrtc(patch, Path(folder))
        for name, module in fake_cupy(gpu).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(cuda_kernels, "KV_SPLIT", KV_SPLIT)
        patch.setattr(cuda_ops, "STAGING_BYTES", 1 << 20)
        yield gpu
        assert_nothing_left(gpu)


def assert_nothing_left(gpu: Gpu) -> None:
    """Once garbage is collected. Where another thread has begun to, `gc.collect` returns before that is done."""
    for _ in range(1000):
        gc.collect()
        left = (gpu.used_bytes, gpu.cached_bytes, gpu.unpooled_bytes, gpu.pinned)
        if left == (0, 0, 0, {}):
            return
        time.sleep(0.01)
    raise AssertionError(f"left on the GPU, and pinned on the host: {left}")


DeviceType = Literal["float16", "bfloat16"]
"""Of weights, activations and KV."""


class Machine:
    """CudaOps with a tiny model on it, whose cache is full of NaN, and the same on ReferenceOps."""

    def __init__(
        self,
        model: Path,
        *,
        element: DeviceType = "float16",
        graphs: bool = True,
        max_tokens: int = 64,
        max_sequences: int = 12,
        max_model_len: int = 256,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        source = open_model(model)
        self.config = source.config
        self.layout = self.config.kv_layout(block_size, element)
        self.ops = CudaOps(graphs=graphs)
        types = ElementTypes(weights=element, cache="auto", stored="F32")
        self.ops.prepare(dimensions_of(self.config, block_size), types, no_progress)
        self.llama = load_llama(source.checkpoint, self.config, self.ops, max_model_len)
        limits = StepLimits(max_tokens, max_sequences, max_model_len)
        self.ops.reserve(
            limits, self.layout, lambda batch, cache: self.llama.logits(self.llama.forward(batch, cache), batch)
        )
        self.cache = self.ops.allocate_cache(self.layout, num_blocks)
        self.ops.fill_blocks(self.cache, range(num_blocks), math.nan)

        self.reference = ReferenceOps()
        self.reference_llama = load_llama(source.checkpoint, self.config, self.reference, max_model_len)
        self.reference_cache = self.reference.allocate_cache(self.layout, num_blocks)
        self.reference.fill_blocks(self.reference_cache, range(num_blocks), math.nan)

    def logits(self, batch: Batch[cupy.ndarray]) -> cupy.ndarray:
        """For `replay`."""
        return self.llama.logits(self.llama.forward(batch, self.cache), batch)

    def reference_logits(self, batch: Batch[Array]) -> NDArray[np.float32]:
        """What they should be."""
        hidden = self.reference_llama.forward(batch, self.reference_cache)
        return self.reference.download(self.reference_llama.logits(hidden, batch))
