from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template and a long context."""
    return str(write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_position_embeddings=100_000))


@pytest.fixture
def base_model(tmp_path: Path) -> str:
    """A tiny model without a chat template."""
    folder = write_tiny_model(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": "<|eos|>"}')
    return str(folder)
