"""The command: rounds over the engines, then the report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.docs import DOCS, replace_block
from benchmarks.peers.machine import measure_machine
from benchmarks.peers.measures import Measures
from benchmarks.peers.prompts import Prompts
from benchmarks.peers.report import OURS, Report, limits_of, make_report
from minipaged.models.files.hub import default_model_path
from minipaged.models.files.model_source import open_model
from minipaged.ops.cpu.threads import default_num_threads

ENGINES = (OURS, "llama_cpp", "openvino_genai", "transformers", "vllm")
"""The names of their modules; those that are installed take part."""


def main(
    rounds: int = 3,
    threads: Annotated[int, typer.Option(help="Of every engine.")] = default_num_threads(),
    engine: Annotated[list[str] | None, typer.Option(help="Only these; minipaged is always one.")] = None,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: the JSON object of an earlier run.")] = None,
    docs: Annotated[bool, typer.Option(help="Write the table and the plot into docs/.")] = False,
) -> None:
    """Measure minipaged beside its peers; the last line is one JSON object."""
    names = [name for name in ENGINES if importlib.util.find_spec(name) and (not engine or name in (OURS, *engine))]
    report = Report.from_json(read.read_text().splitlines()[-1]) if read else measure(names, rounds, threads)
    if docs:
        from benchmarks.peers.plot import draw

        draw(report, DOCS / "peers.png")
        replace_block("peers", report.to_markdown())
    print(report.to_markdown(), report.to_json(), sep="\n\n")


def measure(engines: list[str], rounds: int, threads: int) -> Report:
    """Every round asks every engine in turn, so that all of them share the machine's good and bad minutes."""
    source = open_model(default_model_path())
    measures = Measures(source.path, Prompts(source), threads)
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("machine", *engines)}
    for number in range(1, rounds + 1):
        for kind in (measures.single, measures.batches, measures.shared_prefix):
            for name, value in measure_machine(threads).items():
                samples["machine"][name].append(value)
            for engine in engines:
                print(f"round {number}/{rounds}: {kind.__name__}, {engine}", file=sys.stderr)
                for name, value in kind(engine):
                    samples[engine][name].append(value)
    machine = {name: max(values) for name, values in samples.pop("machine").items()}
    return make_report(
        processor=_processor(),
        threads=threads,
        rounds=rounds,
        versions={name: _version(name) for name in engines},
        limits=limits_of(machine, source),
        samples=samples,
        first_tokens=measures.first_tokens,
    )


def _version(module: str) -> str:
    return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    typer.run(main)
