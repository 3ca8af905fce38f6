from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from minipaged.cli.app import app
from tests.tiny import write_tiny_model

# float32: 2 (K and V) x 2 layers x 2 KV heads x head_dim 16 x 4 bytes = 512 bytes per token.


def test_info_shows_the_architecture_and_does_the_arithmetic_of_the_cache(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["info", str(folder), "--kv-memory", "1MiB"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines() if not line.startswith(" "))
    assert lines["Architecture"].strip() == "llama, 2 layers, hidden size 64"
    assert lines["Attention"].strip() == "4 query heads, 2 KV heads, head_dim 16"
    assert lines["Context length"].strip() == "512 tokens"
    reference, cpu = lines["KV cache, float32"].strip(), lines["KV cache, float16"].strip()
    assert reference == '512 B per token, 8 KiB per block (the default of device "reference")'
    assert cpu.startswith("256 B per token, 4 KiB per block (the default on a CPU or GPU is this or bfloat16")
    assert "128 blocks of 16 tokens = 2,048 tokens, 4 sequences of full context length" in result.stdout
    assert "32.0 bits each" in lines["Parameters"]


def test_a_sliding_window_is_shown(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", model_type="mistral", sliding_window=32)
    result = CliRunner().invoke(app, ["info", str(folder)])
    assert "sliding window of 32 tokens" in result.stdout


def test_a_broken_model_is_one_line_without_traceback(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "config.json").write_text("{")
    result = CliRunner().invoke(app, ["info", str(folder)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "config.json" in result.stderr
    assert "Traceback" not in result.stderr
