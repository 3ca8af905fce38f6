"""Opening a model by its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minipaged.errors import ModelLoadError
from minipaged.models.files.model_source import open_model
from tests.tiny import write_tiny_model
from tests.tiny_gguf import write_tiny_gguf


def test_a_folder(tmp_path: Path) -> None:
    source = open_model(write_tiny_model(tmp_path))
    assert (source.path, source.folder, source.gguf_metadata) == (tmp_path, tmp_path, None)
    assert source.config.eos_token_ids == (1,)


def test_generation_config_has_the_last_word(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert open_model(tmp_path).config.eos_token_ids == (1, 3)


def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    source = open_model(path)
    assert (source.path, source.folder) == (path, None)
    assert source.gguf_metadata is not None
    assert source.gguf_metadata["tokenizer.ggml.model"] == "gpt2"


def test_a_gguf_file_by_any_other_name(tmp_path: Path) -> None:
    assert open_model(write_tiny_gguf(tmp_path / "sha256-0123")).gguf_metadata


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    assert open_model(tmp_path).path == path
    write_tiny_gguf(tmp_path / "second.gguf")
    with pytest.raises(ModelLoadError, match=r"holds 2 models, model\.gguf, second\.gguf; name one"):
        open_model(tmp_path)


def test_a_folder_with_nothing_of_use(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither config\.json nor a \.gguf file"):
        open_model(tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere does not exist; expected a folder"):
        open_model(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_file_of_a_folder(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ModelLoadError, match=f"give its folder, {tmp_path}"):
        open_model(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not valid JSON"), (b"3", "holds int"), (b"\xff", "is"), (b"[" * 10**5, "is")]
)
def test_damaged_json(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"{name} {message}"):
        open_model(tmp_path)


def test_errors_of_the_configuration_name_its_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="gpt2")
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}/config\.json: model_type is 'gpt2'"):
        open_model(tmp_path)
