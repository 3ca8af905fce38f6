"""Which machine an engine runs on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

from minipaged.config import EngineConfig
from minipaged.errors import DeviceError
from minipaged.ops.base import Array, Ops, Weight
from minipaged.ops.cpu.threads import default_num_threads
from minipaged.ops.cuda.modules import check_architecture
from minipaged.ops.cuda.nvidia_driver import Gpu, NoGpuError, find_gpu
from minipaged.ops.cuda.nvrtc import find_toolkit
from minipaged.ops.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from minipaged.ops.cuda.ops import CudaOps

logger = logging.getLogger(__name__)
Result_co = TypeVar("Result_co", covariant=True)


class UseOps(Protocol[Result_co]):
    """A function that works with the operations of any device, whatever its arrays are."""

    def __call__(self, ops: Ops[Array, Weight]) -> Result_co:
        """Work with them."""


def with_device(config: EngineConfig, use: UseOps[Result_co]) -> Result_co:
    """`use` with the operations of `config.device`. Raises `DeviceError` if it cannot be used here."""
    if config.device == "reference":
        return use(ReferenceOps())
    if config.device == "cpu":
        return _with_cpu(config, use)
    try:
        cuda = _cuda(config)
    except DeviceError as error:
        if config.device == "cuda":
            raise DeviceError(f'device "cuda" cannot be used here ("cpu" can). {error}') from error
        if isinstance(error, CudaNotInstalledError):
            logger.info("Running on the CPU. %s", error)
        else:
            logger.warning("Running on the CPU, not on the GPU. %s", error)
        return _with_cpu(config, use)
    return use(cuda)


def _with_cpu(config: EngineConfig, use: UseOps[Result_co]) -> Result_co:
    try:
        from minipaged.ops.cpu.ops import CpuOps
    except ImportError as error:
        missing = (
            "the CPU kernels were not built (no C compiler when minipaged was installed?). "
            "Install a C compiler, then minipaged again"
        )
        if config.device == "cpu":
            raise DeviceError(
                f'device "cpu" cannot be used: {missing}, or use "auto", which falls back to the slower '
                "reference operations."
            ) from error
        logger.warning("Running on the slower reference operations: %s.", missing)
        return use(ReferenceOps())
    return use(CpuOps(config.num_threads or default_num_threads()))


# ---- CUDA ----


class CudaNotInstalledError(DeviceError):
    """This machine or environment is not meant for CUDA: no GPU, or no CuPy. Nothing is broken."""


def describe_cuda() -> str:
    """The GPU that "auto" takes, or why it takes none, in one line."""
    try:
        return str(check_cuda())
    except DeviceError as error:
        return f"none. {error}"


def check_cuda() -> Gpu:
    """The GPU, and all that is needed to use it is there. Raises `DeviceError`, which names what is missing.

    Asks the driver first, so that nothing heavy is imported where there is no GPU.
    """
    try:
        gpu = find_gpu()
    except NoGpuError as error:
        raise CudaNotInstalledError(str(error)) from error
    check_architecture(gpu.architecture)
    driver = ".".join(map(str, gpu.cuda))
    if gpu.cuda < (12, 0):
        raise DeviceError(
            f"The NVIDIA driver is too old: it takes code of CUDA {driver}, and minipaged's is of CUDA 12 or 13. "
            "Update the driver."
        )
    install = f"pip install 'minipaged[cuda{min(gpu.cuda[0], 13)}]'"
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise CudaNotInstalledError(
                f"There is a GPU ({gpu.name}), but CuPy, through which minipaged uses it, is not installed. {install}"
            ) from error
        raise DeviceError(f"CuPy cannot be imported: {error}. {install}") from error
    built_for: int = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if gpu.cuda[0] < built_for:
        raise DeviceError(
            f"The NVIDIA driver takes code of CUDA {driver}, but CuPy was built for CUDA {built_for}. Update the "
            f"driver, or pip uninstall cupy-cuda{built_for}x and {install}"
        )
    find_toolkit(built_for)
    return gpu


def _cuda(config: EngineConfig) -> CudaOps:
    """Raises `DeviceError`."""
    gpu = check_cuda()
    from minipaged.ops.cuda.ops import CudaOps

    ops = CudaOps(graphs=config.cuda_graphs)
    logger.info("Running on %s.", gpu.name)
    return ops
