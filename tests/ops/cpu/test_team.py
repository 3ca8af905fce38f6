"""The thread team: it computes, it sleeps, it leaves nothing behind."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from minipaged.errors import DeviceError
from minipaged.ops.base import Batch
from minipaged.ops.cpu import _kernels
from minipaged.ops.cpu.graph import RECORDS
from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.reference.numpy_ops import Array
from tests.batches import TokenSpan, make_batch
from tests.ops.encoded import random_tensor

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")


class Chain:
    """Many tiny loops, each of which needs the one before."""

    def __init__(self, num_threads: int) -> None:
        self.ops = CpuOps(num_threads)
        generator = np.random.default_rng(0)
        self.table = self.ops.load_matrix([random_tensor("F32", 64, 32, generator, magnitude=1)])
        self.weight = self.ops.load_matrix([random_tensor("F32", 32, 32, generator, magnitude=0.5)])
        self.scale = np.ones(32, np.float32)
        self.batch = make_batch(self.ops, [TokenSpan(0, 0, [3, 1, 4])], np.zeros((1, 4), np.int32), 1)

    def function(self, batch: Batch[Array]) -> Array:
        x = self.ops.embed(batch.token_ids, self.table)
        for _ in range(60):
            x = self.ops.rms_norm(self.ops.linear(x, self.weight, None, x), self.scale, 1e-5)
        return x

    def run(self) -> bytes:
        return self.ops.replay(self.function, self.batch).tobytes()


@pytest.mark.parametrize("num_threads", range(1, 9))
def test_many_tiny_loops(num_threads: int) -> None:
    expected = Chain(1).run()
    chain = Chain(num_threads)
    for _ in range(40):
        assert chain.run() == expected


def test_several_teams_at_once() -> None:
    expected = Chain(1).run()
    wrong: list[int] = []

    def work(num_threads: int) -> None:
        chain = Chain(num_threads)
        wrong.extend(num_threads for _ in range(20) if chain.run() != expected)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_records_of_python_and_c_are_the_same() -> None:
    """Every field that Python fills in lies where C has it, none overlaps another, and all together leave no gap."""
    for name, (op, num_bytes, places) in _kernels.layouts().items():
        numbers = {field: number for number, field in enumerate(places, 1)}
        packed = RECORDS[name].pack(numbers)
        assert len(packed) == num_bytes <= (num_bytes if op < 0 else _kernels.COMMAND_BYTES)
        end = 0
        for offset, kind, field in sorted((offset, kind, field) for field, (offset, kind) in places.items()):
            size = struct.calcsize(f"={kind}")
            assert offset == -(-end // size) * size, f"{name} has a field before {field} that Python does not know"
            assert struct.unpack_from(f"={kind}", packed, offset) == (numbers[field],)
            end = offset + size
        assert num_bytes == -(-end // 8) * 8, f"{name} has a last field that Python does not know"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"x86-64-v9.*expected one of"):
        CpuOps(1, "x86-64-v9")
    with pytest.raises(ValueError, match="num_threads is 0"):
        CpuOps(0)
    team = _kernels.create_team(1)
    with pytest.raises(ValueError, match="no whole number of commands"):
        _kernels.run(team, _kernels.supported()[0], bytes(3))
    with pytest.raises(ValueError, match="unknown or not supported"):
        _kernels.run(team, "x86-64-v9", bytes(_kernels.COMMAND_BYTES))


def run_program(program: str) -> str:
    """In a process of its own, which must end by itself, in order, and say nothing on stderr."""
    preamble = "import os, sys, time\nfrom pathlib import Path\nfrom tests.ops.cpu.test_team import Chain\n"
    result = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(program)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@needs_proc
def test_teams_leave_no_thread_behind() -> None:
    output = run_program(
        """
        tasks = Path("/proc/self/task")
        before = len(list(tasks.iterdir()))
        for round in range(100):
            chain = Chain(1 + round % 5)
            if round % 3:
                chain.run()
            assert len(list(tasks.iterdir())) == before + round % 5
            chain.ops.close()  # the recorded passes know the chain
            del chain
        print(len(list(tasks.iterdir())) - before)
        """
    )
    assert output == "0\n"


@needs_proc
def test_an_idle_team_sleeps() -> None:
    """Processor time of all threads while nothing is to be done, not how fast anything is."""
    output = run_program(
        """
        chain = Chain(4)
        chain.run()
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(1)
        print(time.process_time() - before)
        """
    )
    assert float(output) < 0.05


def test_the_interpreter_ends_while_teams_exist() -> None:
    assert run_program("chain = Chain(3); chain.run(); chain.itself = chain; print('end')") == "end\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("child", ["pass", "del chain", "assert all(chain.run() == expected for _ in range(5))"])
def test_a_forked_child_ends_and_the_parent_goes_on(child: str) -> None:
    """The threads are not in the child: it works alone, and must not wait for them when it forgets the team."""
    output = run_program(
        f"""
        chain = Chain(4)
        expected = chain.run()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                {child}
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert chain.run() == expected
        print("end")
        """
    )
    assert output == "end\n"
