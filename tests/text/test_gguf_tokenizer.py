from __future__ import annotations

import pytest
from gguf import GGUFReader

from minipaged.errors import ModelLoadError
from minipaged.models.files.hub import default_model_path
from minipaged.text.tokenizer import Tokenizer
from tests.text.samples import DECOMPOSED, SAMPLES, SPECIAL
from tests.text.vocabularies import Metadata, byte_level_metadata, golden_ids, sentencepiece_metadata

TEXTS = {**SAMPLES, "decomposed": DECOMPOSED, "special": SPECIAL}
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def assert_ids_equal(tokenizer: Tokenizer, expected: dict[str, list[int]]) -> None:
    found = {name: tokenizer.encode(TEXTS[name], add_special_tokens=False) for name in expected}
    assert found == expected


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_byte_level_bpe_equals_llama_cpp(pre_tokenizer: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre_tokenizer))
    assert_ids_equal(tokenizer, golden_ids("byte_level", "llama.cpp", pre_tokenizer))


@pytest.mark.parametrize("pre_tokenizer", ["gpt-2", "qwen2"])
def test_byte_level_bpe_equals_transformers(pre_tokenizer: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre_tokenizer))
    assert_ids_equal(tokenizer, golden_ids("byte_level", "transformers", pre_tokenizer))


def test_the_samples_tell_the_pre_tokenizers_apart() -> None:
    ids = {str(golden_ids("byte_level", "llama.cpp", name)) for name in PRE_TOKENIZERS}
    assert len(ids) == len(PRE_TOKENIZERS)


@pytest.mark.parametrize("peer", ["llama.cpp", "sentencepiece"])
def test_sentencepiece_bpe_equals(peer: str) -> None:
    assert_ids_equal(Tokenizer.from_gguf(sentencepiece_metadata()), golden_ids("sentencepiece", peer))


def test_the_default_model_equals_llama_cpp() -> None:
    fields = GGUFReader(default_model_path()).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    tokenizer = Tokenizer.from_gguf(metadata)
    expected = golden_ids("smollm2", "llama.cpp")
    assert_ids_equal(tokenizer, expected)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a", add_special_tokens=False)
    assert [tokenizer.decode(ids) for name, ids in expected.items() if name != "special"] == [*SAMPLES.values()]


@pytest.mark.parametrize(
    ("metadata", "prefix", "suffix"),
    [
        (byte_level_metadata("gpt-2"), [], []),
        (byte_level_metadata("smollm", add_bos_token=True), [0], []),
        (byte_level_metadata("llama-bpe"), [0], []),
        (byte_level_metadata("llama-bpe", add_bos_token=False), [], []),
        (byte_level_metadata("qwen2", add_eos_token=True), [], [1]),
        (sentencepiece_metadata(), [1], []),
        (sentencepiece_metadata(add_bos_token=False, add_eos_token=True), [], [2]),
    ],
)
def test_special_tokens_around_a_text(metadata: Metadata, prefix: list[int], suffix: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    bare = tokenizer.encode("sky", add_special_tokens=False)
    assert tokenizer.encode("sky") == prefix + bare + suffix
    assert tokenizer.decode(prefix + bare + suffix) == "sky"


def test_without_a_space_prefix_a_text_begins_as_it_is() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("the sky", add_special_tokens=False)
    assert not (tokenizer.id_to_token(ids[0]) or "").startswith("▁")
    assert tokenizer.decode(ids) == "the sky"
    assert tokenizer.decode(tokenizer.encode(" the sky")) == " the sky"


@pytest.mark.parametrize("metadata", [byte_level_metadata(), sentencepiece_metadata()])
def test_token_types(metadata: Metadata) -> None:
    def extended(name: str, *values: object) -> list[object]:
        old = metadata.get(f"tokenizer.ggml.{name}", [0.0] * 900)
        assert isinstance(old, list)
        return [*old, *values]

    tokenizer = Tokenizer.from_gguf(
        metadata
        | {
            "tokenizer.ggml.tokens": extended("tokens", "<think>", "<|secret|>", "[PAD902]", "[PAD902]", ""),
            "tokenizer.ggml.token_type": extended("token_type", 4, 3, 5, 5, 5),
            "tokenizer.ggml.scores": extended("scores", *[0.0] * 5),
        }
    )
    assert tokenizer.vocab_size == 905
    ids = tokenizer.encode("<think><|secret|>", add_special_tokens=False)
    assert ids == [900, 901]
    assert 900 not in tokenizer.special_token_ids
    assert 901 in tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think><|secret|>"
    assert tokenizer.decode([902, 903, 904], skip_special_tokens=False) == ""
    assert 902 not in tokenizer.encode("[PAD902]")


def test_named_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(eot_token_id=5, padding_token_id=2))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "eot_token": "<0x02>",
        "pad_token": "</s>",
    }
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_chat_templates() -> None:
    assert Tokenizer.from_gguf(byte_level_metadata()).chat_templates == {}
    templates = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = Tokenizer.from_gguf(byte_level_metadata() | templates)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


def without(metadata: Metadata, name: str) -> Metadata:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model is missing; expected a string"),
        (byte_level_metadata(model="t5"), r"model is 't5'; expected 'gpt2' .* or 'llama'"),
        (byte_level_metadata("tekken"), r"pre is 'tekken'; expected one of gpt-2, llama-bpe, .*qwen2, smollm"),
        (without(byte_level_metadata(), "pre"), r"tokenizer\.ggml\.pre is missing"),
        (without(byte_level_metadata(), "tokens"), r"tokenizer\.ggml\.tokens is missing; expected a list"),
        (without(byte_level_metadata(), "merges"), r"tokenizer\.ggml\.merges is missing"),
        (without(byte_level_metadata(), "token_type"), r"tokenizer\.ggml\.token_type is missing"),
        (without(sentencepiece_metadata(), "scores"), r"tokenizer\.ggml\.scores is missing"),
        (byte_level_metadata(merges=["ab"]), r"merges\[0\] is 'ab'; expected two tokens"),
        (byte_level_metadata(merges=["a nothing"]), "merges does not fit .*nothing"),
        (byte_level_metadata(merges=["a b", 3]), "merges holds 3; expected strings alone"),
        (byte_level_metadata(token_type=[1]), "token_type has 1 numbers, but there are 900 tokens"),
        (byte_level_metadata(token_type=[9] * 900), "token_type: 9 is not a valid TokenType; expected 1 to 6"),
        (sentencepiece_metadata(scores=[0.0]), "scores has 1 numbers, but there are 900 tokens"),
        (byte_level_metadata(tokens=["a"] * 900), "'a' has the ids 2 and 3|'a' has the ids 0 and 1"),
        (byte_level_metadata(bos_token_id=900), "bos_token_id is 900; expected an id from 0 to 899"),
        (byte_level_metadata(add_bos_token="yes"), "add_bos_token is 'yes'; expected true or false"),
        (byte_level_metadata(add_space_prefix=True), "add_space_prefix is True; expected false"),
        (
            without(byte_level_metadata(add_bos_token=True), "bos_token_id"),
            "bos_token_id is missing; expected an id, since the model wants BOS with every text",
        ),
        (
            sentencepiece_metadata(tokens=["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(897))]),
            "lacks the byte tokens <0x00>, <0x01>, <0x02>, <0x03>, …; expected all 256",
        ),
    ],
)
def test_what_does_not_fit_is_named(metadata: Metadata, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_gguf(metadata)
