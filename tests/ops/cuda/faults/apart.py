"""Modules whose kernels find their arrays far apart, so that what lies beyond one of them is never another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ops.cuda.emulated import Argument, Execution, Kernel, Module

GAP = 2**20
"""Bytes between arrays: more than what is said to be near one of them."""


class ModuleApart:
    """A module, as far as launches go."""

    def __init__(self, module: Module) -> None:
        self.kernels = {name: KernelApart(kernel) for name, kernel in module.kernels.items()}


class KernelApart:
    """A kernel that gets copies of its arrays, in the order of the arguments; afterwards they are copied back."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.max_dynamic_shared_size_bytes = kernel.max_dynamic_shared_size_bytes

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        shared_mem: int = 0,
        *,
        execution: Execution | None = None,
    ) -> None:
        """Raises as `Kernel` does."""
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        room = np.zeros(sum(array.nbytes + 2 * GAP for array in arrays) + GAP, np.uint8)  # untouched, it takes none
        end = -room.ctypes.data % GAP
        moved: list[Argument] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                place = room[end + GAP :][: argument.nbytes].view(argument.dtype).reshape(argument.shape)
                place[...] = argument
                end += GAP + -(-argument.nbytes // GAP) * GAP
                moved.append(place)
            else:
                moved.append(argument)
        self._kernel.max_dynamic_shared_size_bytes = self.max_dynamic_shared_size_bytes
        self._kernel(grid, block, moved, shared_mem, execution=execution)
        places = [place for place in moved if isinstance(place, np.ndarray)]
        for array, place in zip(arrays, places, strict=True):
            array[...] = place
