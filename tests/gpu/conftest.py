from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from minipaged.engine.devices import check_cuda
from minipaged.errors import DeviceError
from minipaged.ops.cuda import kernels as cuda_kernels
from tests.ops.cuda import machine
from tests.ops.cuda import test_ops as test_cuda_ops


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    """Elsewhere this hides the GPU."""


class RealGpu:
    """What tests ask of the fake one."""

    def is_pinned(self, address: int) -> bool:
        """CUDA would have refused to allocate it otherwise."""
        return True


@pytest.fixture(scope="session", autouse=True)
def gpu() -> RealGpu:
    """Skips every test here where there is no GPU to run it on."""
    try:
        check_cuda()
    except DeviceError as error:
        pytest.skip(str(error))
    return RealGpu()


@pytest.fixture(autouse=True)
def instead_of_the_fake_gpu(gpu: RealGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are defined in tests/ops/cuda."""

    @contextmanager
    def real(_: object) -> Iterator[RealGpu]:
        yield gpu

    monkeypatch.setattr(test_cuda_ops, "use_fake_gpu", real)
    monkeypatch.setattr(cuda_kernels, "KV_SPLIT", machine.KV_SPLIT)
