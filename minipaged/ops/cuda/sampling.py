"""Sampler: penalties, biases and the choice of tokens on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.ops.base import Bias, Penalties, Sampled, SamplingBatch
from minipaged.ops.cuda import launches
from minipaged.ops.cuda.errors import cuda_errors
from minipaged.ops.cuda.kernels import CudaKernels
from minipaged.ops.cuda.memory import CudaMemory

if TYPE_CHECKING:
    import cupy

RESULT_BYTES = 64 << 10
"""Size of the buffer for results at first; it grows where many log-probabilities are asked for."""


class Sampler:
    """Chooses tokens on the GPU as `reference_sampling` does."""

    def __init__(self, memory: CudaMemory, kernels: CudaKernels, stream: cupy.cuda.Stream) -> None:
        import cupy

        self._memory = memory
        self._kernels = kernels
        self._stream = stream
        self._runtime = cupy.cuda.runtime
        self._results = memory.allocate_pinned(RESULT_BYTES, "results")
        self._results_ready = cupy.cuda.Event(block=True, disable_timing=True)

    def adjust(
        self, logits: cupy.ndarray, penalties: Penalties[cupy.ndarray] | None, bias: Bias[cupy.ndarray] | None
    ) -> None:
        """Apply penalties, then bias, to the logits in place."""
        num_rows, vocab_size = logits.shape
        if penalties is not None:
            arguments = (
                logits,
                penalties.rows,
                penalties.starts,
                penalties.token_ids,
                penalties.counts,
                penalties.repetition,
                penalties.presence,
                penalties.frequency,
                np.int32(len(penalties.rows)),
                np.int32(vocab_size),
            )
            self._kernels.start("penalise", launches.penalise(len(penalties.token_ids)), arguments)
        if bias is not None:
            arrays = (logits, bias.rows, bias.token_ids, bias.values)
            sizes = (np.int32(len(bias.rows)), np.int32(vocab_size))
            self._kernels.start("add_bias", launches.add_bias(num_rows), (*arrays, *sizes))

    def sample(
        self,
        logits: cupy.ndarray,
        raw_logits: cupy.ndarray,
        batch: SamplingBatch[cupy.ndarray],
        take: Callable[[tuple[int, ...], DTypeLike], cupy.ndarray],
    ) -> Sampled:
        """All results come back by one copy, and this waits for it. `take` gives arrays for this step."""
        num_rows, vocab_size = logits.shape
        num_top = min(max(0, batch.num_logprobs), vocab_size)
        results = take((num_rows * (2 + 2 * num_top),), np.int32)
        of_tokens, of_own, of_top, of_top_logprobs = _parts(num_rows, num_top)
        token_ids = results[of_tokens]
        arrays = (logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        draws = (batch.seeds, batch.sample_index, batch.positions)
        self._kernels.start("sample", launches.choose(num_rows), (*arrays, *draws, token_ids, np.int32(vocab_size)))
        if batch.num_logprobs < 0:
            return Sampled(self._fetch(token_ids), None, None, None)
        outputs = (results[of_own].view(np.float32), results[of_top], results[of_top_logprobs].view(np.float32))
        arguments = (raw_logits, token_ids, *outputs, np.int32(vocab_size), np.int32(num_top))
        self._kernels.start("logprobs", launches.choose(num_rows), arguments)
        host, shape = self._fetch(results), (num_rows, num_top)
        return Sampled(
            token_ids=host[of_tokens],
            logprobs=host[of_own].view(np.float32),
            top_ids=host[of_top].reshape(shape),
            top_logprobs=host[of_top_logprobs].view(np.float32).reshape(shape),
        )

    def _fetch(self, array: cupy.ndarray) -> NDArray[np.int32]:
        """A small int32 array, as soon as it is there."""
        if array.nbytes > len(self._results):
            self._results = self._memory.allocate_pinned(array.nbytes, "results")
        runtime, host = self._runtime, self._results[: array.nbytes]
        with cuda_errors("compute the step"):
            runtime.memcpyAsync(
                host.ctypes.data, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr
            )
            self._results_ready.record(self._stream)
            self._results_ready.synchronize()
        return host.view(np.int32).copy()


def _parts(num_rows: int, num_top: int) -> tuple[slice, slice, slice, slice]:
    """Where in the results are token ids [num_rows], their log-probabilities, the most likely ids, and theirs."""
    middle, end = 2 * num_rows + num_rows * num_top, 2 * num_rows * (1 + num_top)
    return slice(num_rows), slice(num_rows, 2 * num_rows), slice(2 * num_rows, middle), slice(middle, end)
