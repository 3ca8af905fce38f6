"""A picture of a report: speed over batch size beside the machine's limits, and prefill."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.peers.measures import BATCHES, LONG_PROMPT
from benchmarks.peers.report import OURS, Report


def draw(report: Report, path: Path) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    decode, prefill = figure.subplots(1, 2, width_ratios=(3, 2))
    peers = [engine for engine in report.engines if engine != OURS]
    colours = {OURS: "tab:red"} | dict(zip(peers, ("C0", "C1", "C2", "C4"), strict=False))
    limits, counts = report.limits, (1, *BATCHES)

    for engine, figures in report.engines.items():
        speeds = [figures[f"decode_tok_s_{count}"] for count in counts]
        decode.plot(counts, speeds, "o-", color=colours[engine], linewidth=2.5 if engine == OURS else 1.5, label=engine)
    top = 1.1 * max(limits.blas_decode_tok_s, *(max(line.get_ydata()) for line in decode.get_lines()))
    decode.plot(
        counts, [limits.memory_tok_s * count for count in counts], "k:", label="memory: weights read once per step"
    )
    decode.axhline(limits.blas_decode_tok_s, color="k", linestyle="--", label="OpenBLAS float32")
    decode.set(title="Decode", xlabel="requests at once", ylabel="tokens per second", xscale="log", ylim=(0, top))
    decode.set_xticks(counts, [str(count) for count in counts])
    decode.minorticks_off()

    speeds = [figures[f"prefill_tok_s_{LONG_PROMPT}"] for figures in report.engines.values()]
    prefill.bar(list(report.engines), speeds, color=[colours[engine] for engine in report.engines])
    prefill.axhline(limits.blas_prefill_tok_s, color="k", linestyle="--")
    prefill.set(title=f"Prefill of {LONG_PROMPT} tokens", ylabel="tokens per second")
    prefill.tick_params(axis="x", rotation=20)

    figure.legend(*decode.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=120)
