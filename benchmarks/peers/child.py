"""The process of one engine: reads a job from standard input, writes the results to standard output."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.peers.engine import LoadPeerEngine, PeerEngine
from benchmarks.peers.job import Run, RunResult, read_job, write_results


def load_peer(name: str) -> LoadPeerEngine:
    """How the engine that the module `name` provides is loaded."""
    if name == "minipaged":
        from benchmarks.peers.minipaged_engine import MinipagedEngine

        return MinipagedEngine
    if name == "llama_cpp":
        from benchmarks.peers.llama_cpp_engine import LlamaCppEngine

        return LlamaCppEngine
    if name == "openvino_genai":
        from benchmarks.peers.openvino_engine import OpenVinoEngine

        return OpenVinoEngine
    if name == "transformers":
        from benchmarks.peers.transformers_engine import TransformersEngine

        return TransformersEngine
    if name == "vllm":
        from benchmarks.peers.vllm_engine import VllmEngine

        return VllmEngine
    raise ValueError(f"There is no engine {name!r}.")


def do_run(engine: PeerEngine, run: Run) -> RunResult:
    started = time.monotonic()
    answers = engine.answer(run.prompts, run.new_tokens)
    for answer in answers:
        if len(answer.token_ids) != run.new_tokens or len(answer.arrivals) != run.new_tokens:
            raise RuntimeError(f"{len(answer.token_ids)} tokens came instead of {run.new_tokens}")
    first = max(answer.arrivals[0] for answer in answers)
    return RunResult(
        started=started,
        first=first,
        finished=max(answer.arrivals[-1] for answer in answers),
        decoded_tokens=sum(arrival > first for answer in answers for arrival in answer.arrivals),
        peak_bytes=peak_bytes(),
        token_ids=[answer.token_ids for answer in answers],
    )


def peak_bytes() -> int:
    """Of this program alone: getrusage would include what its parent held when it was forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    job = read_job(sys.stdin.read())
    engine = load_peer(job.engine)(Path(job.model), job.settings)
    write_results([do_run(engine, run) for run in job.runs])


if __name__ == "__main__":
    main()
