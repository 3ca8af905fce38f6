"""RandomOps: operations on the GPU whose weights are random numbers that the GPU makes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minipaged.engine.loading import dimensions_of
from minipaged.models.config import ModelConfig
from minipaged.ops.base import ElementTypes
from minipaged.ops.cuda import modules as cuda_modules
from minipaged.ops.cuda.ops import CudaOps
from minipaged.ops.tensor import HostTensor
from minipaged.progress import no_progress

if TYPE_CHECKING:
    import cupy

BLOCK_SIZE = 16
SCALE = 0.02
"""Of weights; small enough that activations of a deep model stay finite."""


class RandomOps(CudaOps):
    """`load_matrix` and `load_gate_up` look at shapes only; vectors are ones."""

    def __init__(self) -> None:
        super().__init__()
        self._fill = self._compile(Path(__file__).parent / "random.cu").get_function("fill_uniform")
        self._seed = 0

    def _compile(self, path: Path) -> cupy.RawModule:
        """By the NVRTC that compiles the kernels; CuPy might find another one, or none."""
        compiler = cuda_modules.open_compiler()
        target = compiler.target(int(self._cupy.cuda.Device().compute_capability))
        code = compiler.compile(path.read_text(encoding="utf-8"), path.name, target, []).code
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "random.cubin"
            file.write_bytes(code)
            module = self._cupy.RawModule(path=str(file))
            module.compile()
        return module

    @property
    def stream(self) -> cupy.cuda.Stream:
        """That of all kernels."""
        return self._stream

    def random(self, *shape: int, scale: float = 1.0) -> cupy.ndarray:
        """An array of bfloat16, until `close`."""
        array = self._memory.allocate(shape, np.uint16, "random numbers")
        self.randomise(array, scale)
        return array

    def randomise(self, array: cupy.ndarray, scale: float = 1.0) -> None:
        """Other random numbers, each time."""
        self._seed += 1
        blocks = min(4096, -(-array.size // 256))
        arguments = (array, np.int64(array.size), np.float32(scale), np.uint32(self._seed))
        self._fill((blocks,), (256,), arguments, stream=self._stream)

    def load_matrix(self, tensors: Sequence[HostTensor]) -> cupy.ndarray:
        """[sum of out_i, in]"""
        return self.random(sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1], scale=SCALE)

    def load_gate_up(self, gate: HostTensor, up: HostTensor) -> cupy.ndarray:
        """[2 I, in]"""
        return self.load_matrix([gate, up])

    def load_vector(self, tensors: Sequence[HostTensor]) -> cupy.ndarray:
        """Ones."""
        size = sum(math.prod(tensor.shape) for tensor in tensors)
        return self._keep(np.ones(size, np.float32), "ones")


@contextmanager
def opened(model: ModelConfig) -> Iterator[RandomOps]:
    """Operations in bfloat16, ready for a model's sizes; closed afterwards."""
    ops = RandomOps()
    try:
        types = ElementTypes(weights="bfloat16", cache="auto", stored="BF16")
        ops.prepare(dimensions_of(model, BLOCK_SIZE), types, no_progress)
        yield ops
    finally:
        ops.close()
