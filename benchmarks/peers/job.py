"""Job: what one process does with one engine. Sent to it, and its results back, as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.engine import Settings

SLOW_BLAS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Environment variables that make OpenBLAS run other kernels than those for this processor."""


@dataclass(frozen=True, slots=True)
class Run:
    """Requests submitted at once."""

    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """Times are seconds on `time.monotonic`, which all processes of a machine share."""

    started: float
    """Just before the requests were submitted."""
    first: float
    """When every request had its first token."""
    finished: float
    """When every request had its last token."""
    decoded_tokens: int
    """Tokens that came after `first`."""
    peak_bytes: int
    """Most memory resident so far in the process's life, mapped files included."""
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    """Load an engine, then do the runs one after another."""

    engine: str
    model: str
    settings: Settings
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class JobResult:
    """`started` is when the process was created."""

    started: float
    runs: list[RunResult]


def do_job(job: Job) -> JobResult:
    """In a process of its own. What the engine writes is shown only if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in SLOW_BLAS}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = str(job.settings.threads)
    started = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.child"],
        input=json.dumps(asdict(job)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{job.engine} failed with status {process.returncode}:\n{process.stdout}{process.stderr}")
    return JobResult(started, [RunResult(**run) for run in json.loads(process.stdout.splitlines()[-1])])


def read_job(line: str) -> Job:
    """What `do_job` wrote."""
    job = json.loads(line)
    settings, runs = Settings(**job["settings"]), [Run(**run) for run in job["runs"]]
    return Job(job["engine"], job["model"], settings, runs)


def write_results(results: Sequence[RunResult]) -> None:
    """As `do_job` reads them: the last line of standard output."""
    print("\n" + json.dumps([asdict(result) for result in results]), flush=True)
