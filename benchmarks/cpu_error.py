"""How far the CPU backend's logits are from the model's own, and llama.cpp's beside them.

The truth is the de-quantised model in float32: device "reference". Every engine reads the same file and computes the
logits of all positions of the same passage in one prefill. Logits are taken less their mean over the vocabulary, which
the probabilities do not depend on. Per engine:

rms_error, max_error   of the logits
relative_error         rms_error / the standard deviation of the true logits
mean_kl, max_kl        Kullback-Leibler divergence of the engine's next-token distribution from the true one, in nats
top1_agreement         share of positions with the same most likely token
perplexity             of the passage; the truth has one too

Run: python -m benchmarks.cpu_error. The last line is one JSON object. llama_cpp takes part if it is installed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.docs import replace_block
from benchmarks.peers.prompts import Prompts
from minipaged.config import EngineConfig
from minipaged.engine.devices import with_device
from minipaged.models.files.hub import default_model_path
from minipaged.models.files.model_source import ModelSource, open_model
from minipaged.ops.base import Array, Batch, HostArray, Ops, Weight
from minipaged.ops.cpu.threads import default_num_threads
from minipaged.progress import no_progress

BLOCK_SIZE = 16
Logits = NDArray[np.float32]
"""[positions, vocab_size]"""


@dataclass(frozen=True, slots=True)
class Errors:
    """See the module's text."""

    rms_error: float
    max_error: float
    relative_error: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float


def minipaged_logits(source: ModelSource, device: Literal["cpu", "reference"], token_ids: Sequence[int]) -> Logits:
    """Through the model itself, without an engine."""

    def compute(ops: Ops[Array, Weight]) -> Logits:
        config, length = source.config, len(token_ids)
        num_blocks = -(-length // BLOCK_SIZE)
        model = source.architecture.load(source.checkpoint, config, ops, length, no_progress)
        everything = np.arange(length, dtype=np.int32)
        host: Batch[HostArray] = Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=everything,
            kv_extents=everything + 1,
            slots=everything.astype(np.int64),
            cu_seqlens=np.array([0, length], np.int32),
            rows=np.zeros(1, np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            sampled=everything,
            next_positions=(everything + 1).astype(np.uint32),
        )
        batch = ops.upload_batch(host, np.arange(num_blocks))
        cache = ops.allocate_cache(config.kv_layout(BLOCK_SIZE, ops.kv_dtype), num_blocks)
        logits = ops.download(model.logits(model.forward(batch, cache), batch)).copy()
        ops.close()
        return logits

    return with_device(EngineConfig(device=device), compute)


def llama_cpp_logits(source: ModelSource, token_ids: Sequence[int]) -> Logits:
    from benchmarks.peers.engine import Settings
    from benchmarks.peers.llama_cpp_engine import LlamaCppEngine

    settings = Settings(
        threads=default_num_threads(),
        max_requests=1,
        max_length=len(token_ids),
        prompt_tokens_per_step=None,
        prefix_caching=False,
    )
    return LlamaCppEngine(source.path, settings).logits(token_ids)


def compare(found: Logits, truth: Logits, token_ids: Sequence[int]) -> Errors:
    expected, logits = (each - each.mean(axis=1, keepdims=True) for each in (truth, found))
    expected_log, found_log = _log_softmax(truth), _log_softmax(found)
    kl = (np.exp(expected_log) * (expected_log - found_log)).sum(axis=1)
    error = logits - expected
    rms = float(np.sqrt(np.square(error, dtype=np.float64).mean()))
    return Errors(
        rms_error=rms,
        max_error=float(np.abs(error).max()),
        relative_error=rms / float(expected.std(dtype=np.float64)),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1_agreement=float((found.argmax(axis=1) == truth.argmax(axis=1)).mean()),
        perplexity=float(np.exp(-found_log[np.arange(len(token_ids) - 1), token_ids[1:]].mean())),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normaliser: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted - normaliser


def to_markdown(errors: dict[str, Errors]) -> str:
    rows = [
        "| | RMS error | of std | max error | mean KL, nats | max KL | same top token | perplexity |",
        "|---" * 8 + "|",
    ]
    for name, each in errors.items():
        rows.append(
            f"| {name} | {each.rms_error:.4f} | {each.relative_error:.2%} | {each.max_error:.3f} | {each.mean_kl:.2e} "
            f"| {each.max_kl:.2e} | {each.top1_agreement:.1%} | {each.perplexity:.3f} |"
        )
    return "\n".join(rows)


def main(
    positions: int = 512,
    docs: Annotated[bool, typer.Option(help="Write the table into docs/performance.md.")] = False,
) -> None:
    """Compare the CPU's logits with those of the reference."""
    source = open_model(default_model_path())
    token_ids = Prompts(source).cut(positions)
    truth = minipaged_logits(source, "reference", token_ids)
    engines: dict[str, Callable[[], Logits]] = {"minipaged, cpu": lambda: minipaged_logits(source, "cpu", token_ids)}
    if importlib.util.find_spec("llama_cpp"):
        engines["llama_cpp"] = lambda: llama_cpp_logits(source, token_ids)
    errors = {"reference, float32": compare(truth, truth, token_ids)}
    errors |= {name: compare(compute(), truth, token_ids) for name, compute in engines.items()}
    if docs:
        replace_block("cpu_error", to_markdown(errors))
    print(to_markdown(errors), json.dumps({name: asdict(each) for name, each in errors.items()}), sep="\n\n")


if __name__ == "__main__":
    typer.run(main)
