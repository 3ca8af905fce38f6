from __future__ import annotations

import pytest

from minipaged.ops.cpu import _kernels
from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.reference.ops import ReferenceOps

CPU_BACKENDS = [(name, 1 + index % 3) for index, name in enumerate(_kernels.supported())]
"""Every instruction set that this processor has, and a number of threads."""


@pytest.fixture(scope="session", params=CPU_BACKENDS, ids=lambda backend: f"{backend[0]}-{backend[1]}-threads")
def cpu(request: pytest.FixtureRequest) -> CpuOps:
    """The CPU backend, in turn with each instruction set."""
    name, num_threads = request.param
    return CpuOps(num_threads, name)


@pytest.fixture(
    scope="session",
    params=[None, *CPU_BACKENDS],
    ids=lambda backend: "reference" if backend is None else f"{backend[0]}-{backend[1]}-threads",
)
def host_ops(request: pytest.FixtureRequest) -> ReferenceOps | CpuOps:
    """Every backend whose arrays are NumPy's."""
    if request.param is None:
        return ReferenceOps()
    name, num_threads = request.param
    return CpuOps(num_threads, name)
