"""StepBuffer: what lies on the device when a step has been sent, and what the host says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.ops.base import Batch, HostArray, StepLimits
from minipaged.ops.cuda import batch as cuda_batch
from minipaged.ops.cuda.batch import StepBuffer, device_part
from minipaged.ops.cuda.graphs import graph_size
from minipaged.ops.cuda.kernels import CudaKernels
from minipaged.ops.cuda.launches import Launch
from minipaged.ops.cuda.memory import CudaMemory
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import use_fake_gpu

if TYPE_CHECKING:
    import cupy

LIMITS = StepLimits(32, 6, 200)
BLOCK_SIZE = 16
WIDTH = 13
"""Blocks of the longest sequence."""
SPLIT = 64
SCRATCH = 40


class TablesOnly(CudaKernels):
    """update_tables on the host; a step needs no other kernel."""

    def __init__(self, stream: cupy.cuda.Stream) -> None:
        self._stream = stream
        self.kv_split = SPLIT
        self.num_updates: list[int] = []

    def start(self, name: str, launch: Launch, arguments: Sequence[cupy.ndarray | np.generic | None]) -> None:
        tables, places, blocks, count = arguments
        assert name == "update_tables"
        assert isinstance(count, np.int32)
        assert launch.grid[0] * launch.threads >= count == len(places) == len(blocks)  # type: ignore[arg-type]
        self.num_updates.append(int(count))
        held = tables.get(stream=self._stream)  # type: ignore[union-attr]
        held.reshape(-1)[places.get(stream=self._stream)] = blocks.get(stream=self._stream)  # type: ignore[union-attr]
        tables.set(held, stream=self._stream)  # type: ignore[union-attr]


class Sent:
    """A StepBuffer, and what can be read on the device."""

    def __init__(self) -> None:
        import cupy

        self.memory = CudaMemory()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = TablesOnly(self.stream)
        self.steps = StepBuffer(self.memory, self.kernels, self.stream, LIMITS, BLOCK_SIZE)
        self.steps.use_scratch_block(SCRATCH)

    def send(
        self, counts: Sequence[int], start: int, padded_size: int | None, changed: Sequence[int] = ()
    ) -> tuple[Batch[cupy.ndarray], Batch[HostArray]]:
        """Of each row so many tokens from position `start` on; the last token of each is sampled."""
        ends = np.cumsum(counts)
        host: Batch[HostArray] = Batch(
            token_ids=np.arange(ends[-1], dtype=np.int32) + 100,
            positions=np.concatenate([start + np.arange(count, dtype=np.int32) for count in counts]),
            kv_extents=np.concatenate([start + 1 + np.arange(count, dtype=np.int32) for count in counts]),
            slots=np.arange(ends[-1], dtype=np.int64) + 7,
            cu_seqlens=np.array([0, *ends], np.int32),
            rows=np.arange(len(counts), dtype=np.int32)[::-1].copy(),
            block_tables=np.arange(len(counts) * 5, dtype=np.int32).reshape(len(counts), 5),
            sampled=(ends - 1).astype(np.int32),
            next_positions=np.full(len(counts), start + 1, np.uint32),
        )
        return self.steps.send(host, np.array(changed, np.int64), padded_size), host

    def read(self, array: cupy.ndarray) -> NDArray[np.generic]:
        assert array.data.ptr % 16 == 0 or array.size == 0, "kernels and copies take 16 bytes at a time"
        held: NDArray[np.generic] = array.get(stream=self.stream)
        return held

    def assert_holds(self, sent: Batch[cupy.ndarray], host: Batch[HostArray]) -> None:
        for name, dtype in cuda_batch.FIELDS:
            held = self.read(getattr(sent, name))
            assert held.dtype == dtype
            np.testing.assert_array_equal(held, getattr(host, name), err_msg=name)
        np.testing.assert_array_equal(device_part(sent).cu_seqlens, host.cu_seqlens)


@pytest.fixture
def sent() -> Iterator[Sent]:
    with use_fake_gpu(Gpu(memory_bytes=4 << 20)):
        made = Sent()
        yield made
        made.memory.close()


def test_a_step_is_on_the_device_as_it_is(sent: Sent) -> None:
    for counts in ([5], [1, 7, 3], [3, 1], [9, 9, 9, 1, 1, 3]):
        step, host = sent.send(counts, 20, None)
        assert device_part(step).padded is None
        sent.assert_holds(step, host)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 4), (3, 4), (5, 6), (6, 6), (4, 4)])
def test_a_decode_is_filled_up_with_tokens_of_nobody(sent: Sent, count: int, size: int) -> None:
    """Twice, for a size that was seen before; other numbers of sequences of the same size are seen between."""
    for number in (count, 2, count):
        step, host = sent.send([1] * number, 20, max(size, number))
        padded = device_part(step).padded
        assert padded is not None
        assert device_part(padded).padded is None
        sent.assert_holds(step, host)
        assert len(padded.token_ids) == len(padded.rows) == max(size, number)
        held = {name: sent.read(getattr(padded, name)) for name, _ in cuda_batch.FIELDS}
        filling = slice(number, None)
        for name in held.keys() - {"cu_seqlens"}:
            np.testing.assert_array_equal(held[name][:number], getattr(host, name))
        everyone = np.arange(max(size, number) + 1)
        np.testing.assert_array_equal(held["cu_seqlens"], everyone)
        np.testing.assert_array_equal(device_part(padded).cu_seqlens, everyone)
        np.testing.assert_array_equal(held["sampled"], everyone[:-1])
        for name in ("token_ids", "positions", "next_positions"):
            assert not held[name][filling].any()
        assert (held["rows"][filling] == LIMITS.max_sequences).all()
        slots = held["slots"][filling]
        assert len({*slots.tolist()}) == len(slots)
        assert (slots // BLOCK_SIZE == SCRATCH).all()


@pytest.mark.parametrize(
    ("position", "splits", "of_graph"), [(0, 1, 1), (63, 1, 1), (64, 2, 2), (127, 2, 2), (128, 3, 4), (199, 4, 4)]
)
def test_splits_are_those_of_the_longest_sequence(sent: Sent, position: int, splits: int, of_graph: int) -> None:
    """Of a graph a power of two."""
    step, _ = sent.send([1, 1], position, 2)
    exact = device_part(step)
    assert exact.padded is not None
    assert (exact.num_splits, device_part(exact.padded).num_splits) == (splits, of_graph)
    assert device_part(sent.steps.of_size((32, 6, 6))).num_splits == sent.steps.most_splits == 4


def test_the_largest_step_is_described_with_all_its_tokens(sent: Sent) -> None:
    for num_tokens in (6, 32):
        batch = sent.steps.of_size((num_tokens, 6, 6))
        cu_seqlens = device_part(batch).cu_seqlens
        assert len(batch.token_ids) == cu_seqlens[-1] == num_tokens
        assert (np.diff(cu_seqlens) > 0).all()


def test_tables_hold_nothing_but_what_changed(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fit one copy go ahead of it. The row behind all others is the scratch block's."""
    monkeypatch.setattr(cuda_batch, "MOST_CHANGES", 4)
    expected = np.full((LIMITS.max_sequences + 1, WIDTH), -1)
    expected[-1, 0] = SCRATCH
    for changed, updates in (
        ([], []),
        ([3, 8], [2]),
        ([0, 1, 2, 4, 5, 6, 7, 9, 10], [4, 4, 1]),
        ([11, 12, 13, 14], [4]),
    ):
        sent.kernels.num_updates.clear()
        step, host = sent.send([2, 3, 4], 20, None, changed)
        sent.assert_holds(step, host)
        for place in changed:
            expected[place // 5, place % 5] = place
        np.testing.assert_array_equal(sent.read(step.block_tables), expected)
        assert sent.kernels.num_updates == updates


def test_steps_are_sent_while_earlier_ones_wait_for_the_gpu(sent: Sent) -> None:
    sent.stream.synchronize()
    done = sent.stream.queue.done
    for _ in range(cuda_batch.STEPS_UNDER_WAY):
        sent.send([1, 1], 20, 2)
    assert sent.stream.queue.done == done  # the fake stream's: nothing has run


def test_sizes_of_graphs() -> None:
    assert [graph_size(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 4, 4, 8, 8, 16, 16, 24]
