"""Loading weights: what arrives on the device, and the strict check before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.models.files.model_source import ModelSource, open_model
from minipaged.models.llama_tensors import expected_shapes
from minipaged.models.tensor_check import check_tensors
from minipaged.models.weights import load_weights
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.ops.tensor import HostTensor
from tests.tiny import Tensors, tiny_config, tiny_tensors, write_model_folder, write_safetensors, write_tiny_model
from tests.tiny_gguf import write_tiny_gguf

VARIANTS: list[dict[str, object]] = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 32},
    {"model_type": "mistral", "num_key_value_heads": 1},
]
KINDS = sorted(
    {re.sub(r"layers\.\d+", "layers.1", name) for variant in VARIANTS for name in tiny_tensors(tiny_config(**variant))}
)
"""Every kind of tensor, in layer 1 where there is one per layer."""


class UntouchedOps(ReferenceOps):
    """Fails the test if anything is uploaded."""

    def load_matrix(self, tensors: Sequence[HostTensor]) -> NDArray[np.float32]:
        raise AssertionError(f"{tensors[0].name} was uploaded before the check was over")

    def load_vector(self, tensors: Sequence[HostTensor]) -> NDArray[np.float32]:
        raise AssertionError(f"{tensors[0].name} was uploaded before the check was over")


def refusal(source: ModelSource) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_weights(source.checkpoint, source.config, UntouchedOps())
    message = str(error.value)
    assert str(source.checkpoint.path) in message
    return message


def source_with(folder: Path, change: Callable[[Tensors], object], **overrides: object) -> ModelSource:
    """A tiny model whose tensors have been changed behind its configuration's back."""
    write_model_folder(folder, tiny_config(**overrides))
    tensors = tiny_tensors(tiny_config(**overrides))
    change(tensors)
    write_safetensors(folder, tensors)
    return open_model(folder)


def variant_with(name: str) -> dict[str, object]:
    return next(variant for variant in VARIANTS if name in tiny_tensors(tiny_config(**variant)))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_the_expected_tensors_are_those_of_the_model(overrides: dict[str, object], tmp_path: Path) -> None:
    source = open_model(write_model_folder(tmp_path, tiny_config(**overrides)))
    tensors = tiny_tensors(tiny_config(**overrides))
    assert expected_shapes(source.config) == {name: tensor.shape for name, tensor in tensors.items()}
    assert source.num_parameters == sum(tensor.size for tensor in tensors.values())
    assert source.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("overrides", VARIANTS)
def test_every_tensor_arrives_where_it_belongs(overrides: dict[str, object], tmp_path: Path) -> None:
    source = open_model(write_model_folder(tmp_path, tiny_config(**overrides)))
    weights = load_weights(source.checkpoint, source.config, ReferenceOps())
    tensors = tiny_tensors(tiny_config(**overrides))
    read: set[str] = set()

    def stacked(*names: str) -> NDArray[np.float32] | None:
        if names[0] not in tensors:
            return None
        read.update(names)
        return np.concatenate([tensors[name] for name in names])

    def check(found: NDArray[np.generic] | None, *names: str) -> None:
        expected = stacked(*names)
        assert (found is None) == (expected is None), names
        if found is not None and expected is not None:
            np.testing.assert_array_equal(found, expected, err_msg=str(names))

    check(weights.embedding, "model.embed_tokens.weight")
    check(weights.final_norm, "model.norm.weight")
    if overrides.get("tie_word_embeddings"):
        assert weights.head is weights.embedding
    else:
        check(weights.head, "lm_head.weight")
    assert len(weights.layers) == 2
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        check(layer.input_norm, f"{prefix}input_layernorm.weight")
        check(layer.qkv, *(f"{attention}{name}_proj.weight" for name in "qkv"))
        check(layer.qkv_bias, *(f"{attention}{name}_proj.bias" for name in "qkv"))
        check(layer.q_norm, f"{attention}q_norm.weight")
        check(layer.k_norm, f"{attention}k_norm.weight")
        check(layer.output, f"{attention}o_proj.weight")
        check(layer.output_bias, f"{attention}o_proj.bias")
        check(layer.post_attention_norm, f"{prefix}post_attention_layernorm.weight")
        check(layer.gate_up, f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
        check(layer.gate_up_bias, f"{mlp}gate_proj.bias", f"{mlp}up_proj.bias")
        check(layer.down, f"{mlp}down_proj.weight")
        check(layer.down_bias, f"{mlp}down_proj.bias")
    assert read == tensors.keys()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    source = open_model(write_tiny_model(tmp_path))
    reports: list[tuple[int, int]] = []
    load_weights(source.checkpoint, source.config, ReferenceOps(), lambda what, done, all: reports.append((done, all)))
    assert reports == sorted(reports)
    assert {total for _, total in reports} == {source.num_bytes}
    assert reports[-1] == (source.num_bytes, source.num_bytes)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    source = source_with(tmp_path, lambda tensors: tensors.pop(name), **variant_with(name))
    assert f"lacks {name}." in refusal(source)


@pytest.mark.parametrize("name", KINDS)
def test_a_transposed_tensor_is_named_with_both_shapes(name: str, tmp_path: Path) -> None:
    def transpose(tensors: Tensors) -> None:
        tensors[name] = tensors[name].T

    source = source_with(tmp_path, transpose, **variant_with(name))
    shape = expected_shapes(source.config)[name]
    if shape == shape[::-1]:  # a vector or a square: nobody can tell
        check_tensors(source.checkpoint, source.config)
        return
    message = refusal(source)
    assert f"{name} has the shape {list(shape[::-1])}; expected {list(shape)}" in message
    assert "transposed" in message


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_tensor_of_another_size_is_named_with_both_shapes(name: str, axis: int, tmp_path: Path) -> None:
    def lengthen(tensors: Tensors) -> None:
        tensors[name] = np.concatenate([tensors[name], tensors[name].take([0], axis)], axis)

    source = source_with(tmp_path, lengthen, **variant_with(name))
    shape = list(expected_shapes(source.config)[name])
    found = shape.copy()
    found[axis] += 1
    assert f"{name} has the shape {found}; expected {shape}" in refusal(source)


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_with_a_dimension_more_is_named(name: str, tmp_path: Path) -> None:
    def deepen(tensors: Tensors) -> None:
        tensors[name] = tensors[name][None]

    source = source_with(tmp_path, deepen, **variant_with(name))
    assert "another architecture" in refusal(source)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("model.layers.2.input_layernorm.weight", "num_hidden_layers 2, fewer than the checkpoint"),
        ("model.layers.1.self_attn.q_proj.bias", "set attention_bias to true"),
        ("model.layers.1.mlp.up_proj.bias", "set mlp_bias to true"),
        ("model.layers.1.self_attn.q_norm.weight", "qwen3"),
        ("model.layers.1.self_attn.q_proj.lora_A.weight", "adapter"),
        ("score.weight", "another architecture"),
        ("model.layers.1.self_attn.rotary_emb.inv_freq_2", "another architecture"),
    ],
)
def test_a_tensor_that_nothing_reads_is_named(name: str, cause: str, tmp_path: Path) -> None:
    source = source_with(tmp_path, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    message = refusal(source)
    assert f"holds {name}, which nothing reads" in message
    assert cause in message


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    source = source_with(tmp_path, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".0." in n])
    assert "and 5 more tensors" in refusal(source)


@pytest.mark.parametrize(
    ("config", "model", "cause"),
    [
        ({"num_key_value_heads": None}, {}, "set num_key_value_heads to 2"),
        ({"num_key_value_heads": 1}, {}, "set num_key_value_heads to 2"),
        ({"head_dim": None}, {"head_dim": 32}, "set head_dim to 32"),
        ({"vocab_size": 400}, {}, "set vocab_size to 384"),
        ({"intermediate_size": 128}, {}, "set intermediate_size to 96"),
        ({"hidden_size": 32}, {}, "set hidden_size to 64"),
        ({"num_hidden_layers": 3}, {}, "num_hidden_layers 3, but the checkpoint has 2 layers"),
        ({"num_hidden_layers": 1}, {}, "num_hidden_layers 1, fewer than the checkpoint"),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "set tie_word_embeddings to true"),
        ({"attention_bias": True}, {}, "attention_bias must be false"),
        ({"mlp_bias": True}, {}, "mlp_bias must be false"),
        ({"model_type": "qwen3"}, {}, "another architecture"),
        ({}, {"model_type": "qwen3"}, "qwen3"),
    ],
)
def test_a_wrong_configuration_is_diagnosed(
    config: dict[str, object], model: dict[str, object], cause: str, tmp_path: Path
) -> None:
    write_safetensors(tmp_path, tiny_tensors(tiny_config(**model)))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**config)))
    assert cause in refusal(open_model(tmp_path))


def test_a_head_count_in_a_gguf_file_that_its_tensors_contradict(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    key = b"llama.attention.head_count_kv"
    path.write_bytes(path.read_bytes().replace(key, key[:-1] + b"_"))
    message = refusal(open_model(path))
    assert "blk.0.attn_k.weight (model.layers.0.self_attn.k_proj.weight) has the shape [32, 64]" in message
    assert "set num_key_value_heads to 2" in message


def test_buffers_that_old_versions_saved_do_no_harm(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)] + [
        "model.rotary_emb.inv_freq"
    ]
    source = source_with(tmp_path, lambda tensors: tensors.update({n: np.ones(8, np.float32) for n in names}))
    load_weights(source.checkpoint, source.config, ReferenceOps())
    assert source.num_parameters == sum(tensor.size for tensor in tiny_tensors(tiny_config()).values())


def test_a_head_beside_tied_embeddings_must_be_the_same(tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def add_other_head(tensors: Tensors) -> None:
        add_head(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    source = source_with(tmp_path / "same", add_head, tie_word_embeddings=True)
    weights = load_weights(source.checkpoint, source.config, ReferenceOps())
    assert weights.head is weights.embedding
    source = source_with(tmp_path / "other", add_other_head, tie_word_embeddings=True)
    assert "holds lm_head.weight that differs from model.embed_tokens.weight" in refusal(source)


def test_a_checkpoint_without_the_language_head(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert "lack the beginning 'model.'" in refusal(source_with(tmp_path, rename, tie_word_embeddings=True))
