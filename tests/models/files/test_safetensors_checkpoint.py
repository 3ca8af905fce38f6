"""Checkpoints in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.models.checkpoint import Checkpoint
from minipaged.models.files.safetensors_checkpoint import open_safetensors
from tests.tiny import tiny_config, tiny_tensors, write_safetensors, write_tiny_model

INDEX = "model.safetensors.index.json"


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, NDArray[np.float32]]) -> None:
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == expected.shape
        assert tensor.float32().dtype == np.float32
        np.testing.assert_array_equal(tensor.float32(), expected, err_msg=name)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_and_shards(tmp_path: Path, shards: int) -> None:
    tensors = tiny_tensors(tiny_config())
    write_safetensors(tmp_path, tensors, shards=shards)
    with open_safetensors(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)


@pytest.mark.parametrize(
    ("dtype", "encoding", "numpy_dtype"),
    [("float32", "F32", np.float32), ("float16", "F16", np.float16), ("bfloat16", "BF16", ml_dtypes.bfloat16)],
)
def test_element_types(tmp_path: Path, dtype: str, encoding: str, numpy_dtype: type[np.generic]) -> None:
    tensors = tiny_tensors(tiny_config())
    write_safetensors(tmp_path, tensors, dtype=dtype)
    checkpoint = open_safetensors(tmp_path)
    assert {tensor.encoding for tensor in checkpoint.tensors.values()} == {encoding}
    assert_holds(checkpoint, {name: t.astype(numpy_dtype).astype(np.float32) for name, t in tensors.items()})


def test_rows_are_views_of_the_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    checkpoint = open_safetensors(tmp_path)
    tensor = checkpoint.tensor("lm_head.weight")
    assert tensor.rows.shape == (384, 64 * 4)
    assert np.shares_memory(tensor.rows, checkpoint.tensors["lm_head.weight"].data)
    assert not tensor.rows.flags.writeable
    assert checkpoint.tensor("model.norm.weight").rows.shape == (1, 64 * 4)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    write_safetensors(tmp_path, tensors)
    with open_safetensors(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("lm_head.weight")
    assert not checkpoint.tensors
    np.testing.assert_array_equal(tensor.float32(), tensors["lm_head.weight"])


def test_stray_files_do_not_matter(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    write_safetensors(tmp_path, tensors, shards=2)
    safetensors.numpy.save_file({"stray": np.ones(3, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "adapter.safetensors").write_bytes(b"no safetensors file at all")
    assert_holds(open_safetensors(tmp_path), tensors)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00002-of-00003\.safetensors, of the 3 files"):
        open_safetensors(tmp_path)


def test_shards_of_another_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(shard)
    removed = sorted(tensors)[0]
    safetensors.numpy.save_file({name: t for name, t in tensors.items() if name != removed}, shard)
    with pytest.raises(ModelLoadError, match=f"lacks {removed}, which model.safetensors.index.json puts there"):
        open_safetensors(tmp_path)
    safetensors.numpy.save_file(tensors | {"surplus": np.ones(3, np.float32)}, shard)
    with pytest.raises(ModelLoadError, match=r"holds surplus, which model\.safetensors\.index\.json puts in no file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds list; expected an object"),
        ("{}", "weight_map is None"),
        ('{"weight_map": []}', "weight_map is"),
        ('{"weight_map": {"a": 3}}', "a is in 3; expected the name of a file"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "expected the name of a file beside"),
    ],
)
def test_a_wrong_index(tmp_path: Path, index: str, message: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        open_safetensors(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"has neither model\.safetensors nor .*found pytorch_model\.bin"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.int32, "I32"),
        (np.float64, "F64"),
        (np.uint8, "U8"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (np.bool_, "BOOL"),
    ],
)
def test_other_element_types_are_named(tmp_path: Path, dtype: type[np.generic], name: str) -> None:
    data = np.ones(4, np.uint8) if name == "F8_E4M3" else np.ones(4, dtype)
    header = {"odd": {"dtype": name, "shape": [4], "data_offsets": [0, data.nbytes]}}
    (tmp_path / "model.safetensors").write_bytes(_file(header, data.tobytes()))
    with pytest.raises(ModelLoadError, match=f"odd has elements of type {name}; expected one of F32, F16, BF16"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("shape", [[], [0, 4]])
def test_scalars_and_empty_tensors(tmp_path: Path, shape: list[int]) -> None:
    data = np.ones(int(np.prod(shape)), np.float32)
    header = {"odd": {"dtype": "F32", "shape": shape, "data_offsets": [0, data.nbytes]}}
    (tmp_path / "model.safetensors").write_bytes(_file(header, data.tobytes()))
    with pytest.raises(ModelLoadError, match="expected a vector or matrix"):
        open_safetensors(tmp_path)


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        open_safetensors(tmp_path)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    safetensors.numpy.save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)}, folder / "whole")
    whole = (folder / "whole").read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        checkpoint = open_safetensors(folder)
    except ModelLoadError:
        return
    for name in checkpoint.tensors:
        checkpoint.tensor(name).float32()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is (empty|no safetensors file)"):
            open_safetensors(tmp_path)


def _file(header: Mapping[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
