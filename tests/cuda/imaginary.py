"""CudaOps on a GPU that is not there: the fake driver, CuPy and NVRTC in the places of the real ones."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minipaged.ops import cuda_kernels
from minipaged.ops import cuda as cuda_ops
from tests.cuda.fake_cupy import fake_cupy
from tests.cuda.fake_driver import FakeDriver, use_fake_driver
from tests.cuda.fake_gpu import Gpu
from tests.cuda.fake_nvrtc import use_fake_nvrtc

KV_SPLIT = 64
"""Positions: few, so that short sequences have several splits."""


@contextmanager
def imaginary_gpu(gpu: Gpu) -> Iterator[Gpu]:
    """While it lasts, device="cuda" works; afterwards nothing must be left on the GPU."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        use_fake_driver(patch, FakeDriver())
        use_fake_nvrtc(patch, Path(folder))
        for name, module in fake_cupy(gpu).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(cuda_kernels, "KV_SPLIT", KV_SPLIT)
        patch.setattr(cuda_ops, "STAGING_BYTES", 1 << 20)
        yield gpu
