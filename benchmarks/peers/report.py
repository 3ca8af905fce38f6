"""Report: medians, ratios and shares of the machine's limits; as one JSON object and as Markdown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.measures import BATCHES, LONG_PROMPT
from minipaged.models.files.model_source import ModelSource

OURS = "minipaged"

Figures = dict[str, float]

COLUMNS = {
    **{f"decode_tok_s_{count}": f"B = {count}" for count in (1, *BATCHES)},
    f"prefill_tok_s_{LONG_PROMPT}": "prefill",
    "load_s": "load, s",
    "rss_mb_1": "memory, MB",
    "shared_prefix_cold_s": "shared prefix, s",
    "shared_prefix_s": "cached, s",
}
"""Of the Markdown table."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine, measured beside the engines, allows for this model."""

    memory_gb_s: float
    blas_gflop_s: float
    memory_tok_s: float
    """Decoding one request, if every weight is read once per token in the form that the file has it in."""
    blas_decode_tok_s: float
    """If all matrices are multiplied in float32 at OpenBLAS's speed."""
    blas_prefill_tok_s: float
    """The same without the head, which only a prompt's last token needs."""


def limits_of(machine: Figures, source: ModelSource) -> Limits:
    """For a model whose head is its embedding table."""
    config = source.config
    assert config.tie_word_embeddings
    matrices = source.num_parameters
    return Limits(
        **machine,
        memory_tok_s=machine["memory_gb_s"] * 1e9 / source.num_bytes,
        blas_decode_tok_s=machine["blas_gflop_s"] * 1e9 / (2 * matrices),
        blas_prefill_tok_s=machine["blas_gflop_s"] * 1e9 / (2 * (matrices - config.vocab_size * config.hidden_size)),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of the benchmark found."""

    processor: str
    threads: int
    rounds: int
    versions: dict[str, str]
    limits: Limits
    engines: dict[str, Figures]
    """Medians over the rounds, per engine; see `measures`."""
    ratios: Figures
    """Per figure, minipaged against the best peer: above 1, minipaged is better."""
    memory_share: Figures
    """Per engine: decode_tok_s_1 / limits.memory_tok_s."""
    blas_share: Figures
    """Per engine: prefill_tok_s_512 / limits.blas_prefill_tok_s."""
    agreement: Figures
    """Per peer: the share of prompts after which its first token is the same as minipaged's."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(_rounded(asdict(self)))

    @staticmethod
    def from_json(line: str) -> Report:
        """What `to_json` wrote."""
        fields = json.loads(line)
        return Report(**{**fields, "limits": Limits(**fields["limits"])})

    def to_markdown(self) -> str:
        """A table, and the conditions."""
        columns = {name: title for name, title in COLUMNS.items() if name in self.engines[OURS]}
        lines = [
            _table_row("", columns.values()),
            _table_row("---", ["---:"] * len(columns)),
            *(
                _table_row(f"{engine} {self.versions[engine]}", [_number(figures[name]) for name in columns])
                for engine, figures in self.engines.items()
            ),
            _table_row("minipaged : best peer", [_number(self.ratios[name]) for name in columns]),
            "",
            f"{self.processor}, {self.threads} threads; medians of {self.rounds} rounds. "
            f"Memory is read at {self.limits.memory_gb_s:.1f} GB/s, which allows {self.limits.memory_tok_s:.0f} tok/s "
            f"at B = 1: minipaged reaches {self.memory_share[OURS]:.0%}. OpenBLAS multiplies float32 matrices at "
            f"{self.limits.blas_gflop_s:.0f} GFLOP/s, which would allow {self.limits.blas_prefill_tok_s:.0f} tok/s of "
            f"prefill: minipaged reaches {self.blas_share[OURS]:.0%}.",
        ]
        return "\n".join(lines)


def make_report(
    *,
    processor: str,
    threads: int,
    rounds: int,
    versions: Mapping[str, str],
    limits: Limits,
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    first_tokens: Mapping[str, Sequence[int]],
) -> Report:
    """From the samples of each figure of each engine."""
    engines = {
        engine: {name: statistics.median(values) for name, values in figures.items()}
        for engine, figures in samples.items()
    }
    peers = [figures for engine, figures in engines.items() if engine != OURS]
    return Report(
        processor=processor,
        threads=threads,
        rounds=rounds,
        versions=dict(versions),
        limits=limits,
        engines=engines,
        ratios={name: _ratio(name, ours, [peer[name] for peer in peers]) for name, ours in engines[OURS].items()},
        memory_share={engine: each["decode_tok_s_1"] / limits.memory_tok_s for engine, each in engines.items()},
        blas_share={
            engine: each[f"prefill_tok_s_{LONG_PROMPT}"] / limits.blas_prefill_tok_s for engine, each in engines.items()
        },
        agreement={
            engine: statistics.mean(a == b for a, b in zip(tokens, first_tokens[OURS], strict=True))
            for engine, tokens in first_tokens.items()
            if engine != OURS
        },
    )


def _ratio(name: str, ours: float, peers: Sequence[float]) -> float:
    return ours / max(peers) if "tok_s" in name else min(peers) / ours


def _table_row(head: str, cells: Iterable[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _rounded(value: object) -> object:
    """Floats within, to four significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
