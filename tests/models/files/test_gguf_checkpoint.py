"""Checkpoints in GGUF files, alone and against safetensors of the same model."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.models.files.gguf_checkpoint import open_gguf
from minipaged.models.files.gguf_file import read_gguf
from minipaged.models.files.model_source import open_model
from tests.tiny import tiny_config, tiny_tensors, write_model_folder
from tests.tiny_gguf import write_model_gguf, write_tiny_gguf

QUANTISABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
DECODABLE = sorted(
    kind.name for kind in gguf.GGMLQuantizationType if kind.name in ("F32", "F16") or hasattr(gguf.quants, kind.name)
)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows of whole blocks in every quantisation."""


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32},
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
    ],
)
def test_the_same_weights_as_from_safetensors(tmp_path: Path, overrides: dict[str, object]) -> None:
    folder = open_model(write_model_folder(tmp_path / "model", tiny_config(**overrides))).checkpoint
    file = open_model(write_model_gguf(tmp_path / "model.gguf", tiny_config(**overrides))).checkpoint
    assert file.tensors.keys() == folder.tensors.keys()
    for name in folder.tensors:
        assert file.tensor(name).shape == folder.tensor(name).shape
        np.testing.assert_array_equal(file.tensor(name).float32(), folder.tensor(name).float32(), err_msg=name)


@pytest.mark.parametrize("quantization", QUANTISABLE)
def test_quantised_weights_are_the_dequantised_ones_row_by_row(tmp_path: Path, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    checkpoint = open_gguf(
        write_model_gguf(tmp_path / "model.gguf", tiny_config(**WIDE), quantization=quantization)
    ).checkpoint
    for name, original in tiny_tensors(tiny_config(**WIDE)).items():
        tensor = checkpoint.tensor(name)
        matrix = original.ndim == 2
        # Every row is quantised by itself, so that permuting rows and quantising can change places.
        expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind) if matrix else original
        assert tensor.encoding == (quantization if matrix else "F32")
        np.testing.assert_array_equal(tensor.float32(), expected, err_msg=name)


@pytest.mark.parametrize("quantization", DECODABLE)
def test_every_type_that_the_gguf_package_can_dequantise(tmp_path: Path, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (6, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    # What GGUFWriter is given as bytes, it takes to be shaped in bytes.
    writer.add_tensor("matrix", raw, raw_shape=raw.shape, raw_dtype=kind)
    _write(writer)
    [tensor] = read_gguf(tmp_path / "model.gguf").tensors
    assert (tensor.encoding, tensor.shape) == (quantization, (6, 2 * block))
    decoded = tensor.decode(tensor.data.reshape(6, -1))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, gguf.quants.dequantize(raw, kind))
    np.testing.assert_array_equal(tensor.decode(tensor.data.reshape(6, -1)[2:4]), decoded[2:4])


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float64])
def test_types_that_are_no_weights_are_named(tmp_path: Path, dtype: type[np.generic]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("odd", np.ones((2, 4), dtype))
    _write(writer)
    with pytest.raises(ModelLoadError, match=r"holds odd as (I8|I32|F64), which cannot be decoded"):
        read_gguf(tmp_path / "model.gguf")


def test_metadata_are_plain_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    values: dict[str, object] = {
        "string": "naïve ☃",
        "strings": ["a", "", "☃"],
        "integers": [1, -2, 3],
        "numbers": [0.5, 1.5],
        "flags": [True, False],
    }
    writer.add_string("string", "naïve ☃")
    for key in ("strings", "integers", "numbers", "flags"):
        value = values[key]
        assert isinstance(value, list)
        writer.add_array(key, value)
    for number, kind in enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")):
        value = -number if kind.startswith("i") else number
        getattr(writer, f"add_{kind}")(kind, value)
        values[kind] = value
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    values |= {"float32": 0.5, "float64": 0.1, "bool": True, "general.architecture": "llama"}
    _write(writer)
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    assert metadata == values
    for key, value in values.items():
        assert type(metadata[key]) is type(value), key


def test_rows_are_views_of_the_file(tmp_path: Path) -> None:
    checkpoint = open_gguf(write_tiny_gguf(tmp_path / "model.gguf", quantization="Q8_0")).checkpoint
    tensor = checkpoint.tensor("model.embed_tokens.weight")
    assert tensor.rows.shape == (384, 2 * 34)
    assert np.shares_memory(tensor.rows, checkpoint.tensors["model.embed_tokens.weight"].data)


def _split(path: Path, parts: int) -> list[Path]:
    """Write a tiny model in parts, as llama.cpp's splitting tool does: the metadata are in the first."""
    whole = gguf.GGUFReader(path)
    paths = [path.with_name(f"model-{part + 1:05}-of-{parts:05}.gguf") for part in range(parts)]
    for part, part_path in enumerate(paths):
        writer = gguf.GGUFWriter(part_path, "llama")
        for key, field in whole.fields.items() if part == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", parts)
        for tensor in whole.tensors[part::parts]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        _write(writer)
    return paths


def test_a_split_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "whole.gguf")
    whole = open_gguf(path)
    parts = _split(path, 3)
    split = open_gguf(parts[0])
    assert split.config == whole.config
    assert split.checkpoint.tensors.keys() == whole.checkpoint.tensors.keys()
    for name in whole.checkpoint.tensors:
        np.testing.assert_array_equal(split.checkpoint.tensor(name).rows, whole.checkpoint.tensor(name).rows)
    with pytest.raises(ModelLoadError, match=r"give its first part, model-00001-of-00003\.gguf"):
        open_gguf(parts[1])
    with pytest.raises(ModelLoadError, match="is one part of 3, but its name"):
        open_gguf(parts[0].rename(tmp_path / "renamed.gguf"))
    (tmp_path / "renamed.gguf").rename(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00003-of-00003\.gguf of the 3 parts"):
        open_gguf(parts[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is cut short or damaged"),
        (b"PK\x03\x04" + bytes(64), "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "of version 1; expected 2 or 3"),
        (b"GGUF" + (4).to_bytes(4, "little") + bytes(16), "of version 4; expected 2 or 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "is a big-endian GGUF file"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 64, "is cut short or damaged"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"model\.gguf {message}|{message}"):
        read_gguf(tmp_path / "model.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = _small_file(tmp_path / "whole.gguf")
    for length in range(len(whole)):
        (tmp_path / "model.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf is (empty|cut short)"):
            read_gguf(tmp_path / "model.gguf")


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    damaged = bytearray(_small_file(folder / "whole.gguf"))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.gguf").write_bytes(damaged)
    try:
        tensors = read_gguf(folder / "model.gguf").tensors
    except ModelLoadError:
        return
    for tensor in tensors:
        with np.errstate(all="ignore"):
            tensor.decode(tensor.data.reshape(1, -1))


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=re.escape("holds the tensor blk.1.ffn_up.weight twice")):
        open_gguf(path)


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    path = _small_file_path(tmp_path, "Q8_0", np.ones((2, 32), np.float32))
    content = path.read_bytes()
    path.write_bytes(content.replace((32).to_bytes(8, "little"), (33).to_bytes(8, "little"), 1))
    with pytest.raises(ModelLoadError, match="holds matrix as Q8_0 in rows of 33 elements; expected a multiple of 32"):
        read_gguf(path)


def _small_file_path(folder: Path, quantization: str, matrix: NDArray[np.float32]) -> Path:
    kind = gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tensor("matrix", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    _write(writer)
    return folder / "model.gguf"


def _small_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "bc", "☃"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("matrix", np.ones((2, 8), np.float32))
    _write(writer)
    return path.read_bytes().rstrip(b"\0")  # the padding after the last tensor may be absent


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
