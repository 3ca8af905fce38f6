"""What the machine can do: how fast memory is read, and how fast OpenBLAS multiplies float32 matrices.

Run: python -m benchmarks.peers.machine. Prints memory_gb_s and blas_gflop_s as one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.peers.job import SLOW_BLAS

REPEATS = 8
BYTES_PER_THREAD = 2**28
MATRIX_SIZE = 2048


def measure_machine(threads: int) -> dict[str, float]:
    """In a process of its own, so that OpenBLAS starts with these threads and with its own choice of kernels."""
    environment = {name: value for name, value in os.environ.items() if name not in SLOW_BLAS}
    environment["OPENBLAS_NUM_THREADS"] = str(threads)
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.machine"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(process.stdout)
    return figures


def memory_gb_s(threads: int) -> float:
    """Every thread sums an array of its own, larger than the caches."""
    arrays = [np.ones(BYTES_PER_THREAD // 8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.sum, arrays)))
    return threads * BYTES_PER_THREAD / seconds / 1e9


def blas_gflop_s() -> float:
    """A product of two large square matrices."""
    a = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    return 2 * MATRIX_SIZE**3 / _best(lambda: a @ a) / 1e9


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls: a limit is what was reached at best."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    threads = int(os.environ.get("OPENBLAS_NUM_THREADS", os.cpu_count() or 1))
    print(json.dumps({"memory_gb_s": memory_gb_s(threads), "blas_gflop_s": blas_gflop_s()}))


if __name__ == "__main__":
    main()
