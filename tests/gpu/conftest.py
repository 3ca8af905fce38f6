from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from minipaged.devices import check_cuda
from minipaged.errors import DeviceError
from minipaged.ops import cuda_kernels
from tests.cuda import imaginary, test_cuda_ops


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    """Elsewhere this hides the GPU."""


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skips every test here where there is no GPU to run it on."""
    try:
        check_cuda()
    except DeviceError as error:
        pytest.skip(str(error))


class RealGpu:
    """What the tests of the emulated GPU ask of theirs."""

    def is_pinned(self, address: int) -> bool:
        """CUDA would have refused to allocate it otherwise."""
        return True


@pytest.fixture
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what is tested on an emulated GPU in tests/cuda be tested on the real one."""

    @contextmanager
    def real(_: object) -> Iterator[RealGpu]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_kernels, "KV_SPLIT", imaginary.KV_SPLIT)
            yield RealGpu()

    monkeypatch.setattr(test_cuda_ops, "imaginary_gpu", real)
