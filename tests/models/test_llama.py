"""The forward pass against logits that Hugging Face transformers computed (tests/golden); SmolLM2: test_smollm2.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.models.config import ModelConfig
from minipaged.models.files.model_source import open_model
from minipaged.models.llama import Llama, load_llama
from minipaged.ops.base import KVPool
from minipaged.ops.reference.numpy_ops import Array
from minipaged.ops.reference.ops import Matrix, ReferenceOps
from tests.batches import TokenSpan, make_batch, shuffled_tables
from tests.golden import tiny_models
from tests.tiny import write_tiny_model

GOLDEN = Path(__file__).parent.parent / "golden"
MAX_MODEL_LEN = 256
TOLERANCE = 3e-4
"""Of logits up to 9. transformers keeps frequencies in float32, which alone moves some by 7e-5 at these positions."""


@dataclass(frozen=True)
class Loaded:
    """A model on ReferenceOps and a pool full of NaN."""

    ops: ReferenceOps
    config: ModelConfig
    llama: Llama[Array, Matrix]

    @classmethod
    def from_path(cls, path: Path, ops: ReferenceOps | None = None) -> Loaded:
        ops = ops or ReferenceOps()
        source = open_model(path)
        return cls(ops, source.config, load_llama(source.checkpoint, source.config, ops, MAX_MODEL_LEN))

    def new_cache(self, num_blocks: int, block_size: int) -> KVPool[Array]:
        cache = self.ops.allocate_cache(self.config.kv_layout(block_size, "float32"), num_blocks)
        self.ops.fill_blocks(cache, range(num_blocks), np.nan)
        return cache

    def step(
        self,
        cache: KVPool[Array],
        tables: NDArray[np.int32],
        spans: Sequence[TokenSpan],
        sampled: Sequence[int],
    ) -> NDArray[np.float32]:
        """Logits [len(sampled), vocab_size]."""
        batch = make_batch(self.ops, spans, tables, cache.layout.block_size, sampled)
        return self.ops.download(self.llama.logits(self.llama.forward(batch, cache), batch))

    def prefill(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits at every position, computed in one step."""
        tables = shuffled_tables(np.random.default_rng(0), [len(token_ids)], 16, num_blocks=16)
        spans = [TokenSpan(0, 0, token_ids)]
        return self.step(self.new_cache(16, 16), tables, spans, range(len(token_ids)))


@pytest.fixture(scope="module")
def golden() -> Mapping[str, NDArray[np.float32]]:
    with np.load(GOLDEN / "tiny_models.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", tiny_models.CASES)
def test_logits_of_a_tiny_model(name: str, tmp_path: Path, golden: Mapping[str, NDArray[np.float32]]) -> None:
    assert tiny_models.digest(name) == str(golden[f"{name}.sha256"]), "the weights changed: run make_golden.py again"
    tiny_models.write_model(tmp_path, name)
    loaded = Loaded.from_path(tmp_path)
    ids: list[int] = tiny_models.prompt(name).tolist()

    np.testing.assert_allclose(loaded.prefill(ids), golden[name], rtol=0, atol=TOLERANCE)

    # Again in chunks, then token by token, while two other sequences come and go; each starts at another step.
    other = ids[::-1]
    prompts = [ids, other, other[:23]]
    chunks = [[1, 3, 4, 5, 17, 9], [30], [11, 2]]
    expected = [golden[name], loaded.prefill(other), loaded.prefill(other[:23])]
    first_step = [0, 2, 9]
    generator = np.random.default_rng(0)
    block_size = 4
    lengths = [len(prompt) for prompt in prompts]
    tables = shuffled_tables(generator, lengths, block_size, num_blocks=48)
    cache = loaded.new_cache(48, block_size)
    computed = [0, 0, 0]
    for step in range(2 * len(ids)):
        spans = []
        for row in generator.permutation(3).tolist():
            count = (chunks[row].pop(0) if chunks[row] else 1) if step >= first_step[row] else 0
            if part := prompts[row][computed[row] : computed[row] + count]:
                spans.append(TokenSpan(row, computed[row], part))
                computed[row] += len(part)
        if not spans:
            break
        logits = loaded.step(cache, tables, spans, range(sum(len(span.token_ids) for span in spans)))
        wanted = [expected[span.row][span.start : span.start + len(span.token_ids)] for span in spans]
        np.testing.assert_allclose(logits, np.concatenate(wanted), rtol=0, atol=TOLERANCE)
    assert computed == lengths


class CountingOps(ReferenceOps):
    """Notes how many tokens each MLP computes."""

    def __init__(self) -> None:
        self.mlp_tokens: list[int] = []

    def gated_linear(self, x: Array, gate_up: Matrix, bias: Array | None) -> Array:
        self.mlp_tokens.append(len(x))
        return super().gated_linear(x, gate_up, bias)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_last_mlp_computes_only_tokens_that_sample(num_layers: int, tmp_path: Path) -> None:
    """Only their hidden states are read, once the last layer's K and V are in the cache."""
    ops = CountingOps()
    loaded = Loaded.from_path(write_tiny_model(tmp_path, num_hidden_layers=num_layers), ops)
    tables = shuffled_tables(np.random.default_rng(0), [5, 1, 3], 16, num_blocks=3)
    spans = [TokenSpan(0, 0, [1, 2, 3, 4, 5]), TokenSpan(1, 0, [6]), TokenSpan(2, 0, [7, 8, 9])]
    loaded.step(loaded.new_cache(3, 16), tables, spans, [5, 8])
    assert ops.mlp_tokens == [9] * (num_layers - 1) + [2]
