"""How long the kernels of one model take to compile: with an empty cache, and with a full one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

from benchmarks.gpu.device import opened
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row


def run(sizes: Sizes) -> Iterator[Row]:
    before = os.environ.get("MINIPAGED_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIPAGED_CACHE"] = folder
        try:
            for what in ("kernels compiled anew", "kernels found in the cache"):
                started = time.perf_counter()
                with opened(sizes.model):
                    seconds = time.perf_counter() - started
                yield Row(what, seconds, "s")
        finally:
            if before is None:
                del os.environ["MINIPAGED_CACHE"]
            else:
                os.environ["MINIPAGED_CACHE"] = before
