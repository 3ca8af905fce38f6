from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from minipaged.errors import InvalidRequestError, ModelLoadError
from minipaged.text.tokenizer import Tokenizer
from tests.text.samples import SAMPLES
from tests.text.vocabularies import KINDS, byte_level_metadata, golden_metadata, tokenizer


def write_folder(
    folder: Path, *, adds_bos: bool = False, config: object = None, special_tokens_map: object = None
) -> Path:
    """A byte-level tokenizer in Hugging Face layout: <s> is 0, </s> is 1, <think> is no special token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SAMPLES.values(), trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    path = folder / "tokenizer.json"
    backend.save(str(path))
    for name, content in {"tokenizer_config": config, "special_tokens_map": special_tokens_map}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    encoder = Tokenizer.from_file(write_folder(tmp_path))
    text = SAMPLES["mixed"]
    assert encoder.decode(encoder.encode(text)) == text
    assert encoder.vocab_size == 401
    assert (encoder.bos_token, encoder.bos_token_id) == (None, None)
    assert (encoder.eos_token, encoder.eos_token_id) == (None, None)
    assert encoder.special_token_ids == {0, 1}
    assert (encoder.token_to_id("</s>"), encoder.id_to_token(1)) == (1, "</s>")
    assert (encoder.token_to_id("absent"), encoder.id_to_token(401)) == (None, None)
    assert encoder.chat_templates == {}
    assert encoder.decode([0, 400, 1]) == "<think>"


def test_special_tokens_are_read_from_both_files(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<s>", "pad_token": None}
    encoder = Tokenizer.from_file(write_folder(tmp_path, config=config, special_tokens_map={"eos_token": "</s>"}))
    assert (encoder.bos_token, encoder.bos_token_id) == ("<s>", 0)
    assert (encoder.eos_token, encoder.eos_token_id) == ("</s>", 1)
    assert encoder.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
@pytest.mark.parametrize("add_eos_token", [None, False, True])
def test_special_tokens_around_a_text(
    tmp_path: Path, adds_bos: bool, add_bos_token: bool | None, add_eos_token: bool | None
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos_token, "add_eos_token": add_eos_token}
    encoder = Tokenizer.from_file(write_folder(tmp_path, adds_bos=adds_bos, config=config))
    bare = encoder.encode("sky", add_special_tokens=False)
    prefix = [0] if (adds_bos if add_bos_token is None else add_bos_token) else []
    assert encoder.encode("sky") == prefix + bare + [1] * (add_eos_token is True)
    assert encoder.encode("") == prefix + [1] * (add_eos_token is True)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_has_exactly_one_bos_where_the_model_wants_one(tmp_path: Path, adds_bos: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}
    encoder = Tokenizer.from_file(write_folder(tmp_path, adds_bos=adds_bos, config=config))
    bare = encoder.encode("Hi</s>", add_special_tokens=False)
    assert bare[-1] == 1
    assert encoder.encode_chat("<s>Hi</s>") == [0, *bare]
    assert encoder.encode_chat("Hi</s>") == ([0, *bare] if adds_bos else bare)


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    backend.save(str(path))
    encoder = Tokenizer.from_file(path)
    assert encoder.decode(encoder.encode(SAMPLES["latin"])) == SAMPLES["latin"]
    assert len(encoder.encode("a")) == 1


def test_chat_templates_in_the_config(tmp_path: Path) -> None:
    path = write_folder(tmp_path, config={"chat_template": "plain"})
    assert Tokenizer.from_file(path).chat_templates == {"default": "plain"}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path = write_folder(tmp_path, config={"chat_template": named})
    assert Tokenizer.from_file(path).chat_templates == {"default": "plain", "tool_use": "tools"}


def test_chat_template_files_come_before_the_config(tmp_path: Path) -> None:
    path = write_folder(tmp_path, config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new ☀", encoding="utf-8")
    assert Tokenizer.from_file(path).chat_templates == {"default": "new ☀"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert Tokenizer.from_file(path).chat_templates == {"default": "new ☀", "rag": "documents"}


def test_a_missing_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"There is no .*tokenizer\.json.*save_pretrained"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is no tokenizer\.json: .*Download"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON .*download"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds list; expected an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is a int; expected a string"),
        ("tokenizer_config.json", '{"chat_template": [{"name": 1}]}', "chat_template is a list; expected"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token is '<end>', which is not in its vocabulary"),
        ("special_tokens_map.json", b"\xff\xfe", r"special_tokens_map\.json is not valid JSON"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read as UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = write_folder(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_file(path)


def test_a_file_that_makes_the_tokenizers_package_panic_is_named(tmp_path: Path) -> None:
    """Its panics are no Exception."""
    path = write_folder(tmp_path)
    settings = json.loads(path.read_text())
    settings["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is no tokenizer\.json: .*Download"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse()])])
def test_an_unknown_decoder_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    path = write_folder(tmp_path)
    settings = json.loads(path.read_text())
    settings["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=r"decoder is made of .*known are"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_surrogate_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D83D at position 3"):
        tokenizer(kind).encode("abc\ud83d")


def test_a_character_that_the_vocabulary_cannot_express_is_refused() -> None:
    metadata = byte_level_metadata()
    types = metadata["tokenizer.ggml.token_type"]
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    without_zero = [5 if token == "Ā" else kind for token, kind in zip(tokens, types, strict=True)]
    encoder = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": without_zero})
    assert encoder.decode(encoder.encode("aĀ")) == "aĀ"
    with pytest.raises(InvalidRequestError, match=r"U\+0000 at position 1, for which .* no token"):
        encoder.encode("a\x00b")


def test_threads_can_share_a_tokenizer() -> None:
    encoder = tokenizer("byte-level")
    texts = [text * 5 for text in SAMPLES.values()] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encoder.encode, texts)) == [encoder.encode(text) for text in texts]


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentencepiece_style_folder(tmp_path: Path, adds_space: bool) -> None:
    metadata = golden_metadata("sentencepiece")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "s")], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if adds_space else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')

    encoder = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert encoder.adds_space_prefix == adds_space
    ids = encoder.encode("sky 🜁")
    assert ids[:2] == [1, vocabulary["▁s" if adds_space else "s"]]
    assert encoder.id_to_token(ids[-1]) == "<0x81>"
    assert encoder.decode(ids) == "sky 🜁"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_ids_may_have_gaps_and_be_huge(tmp_path: Path, kind: str) -> None:
    """Memory goes by the number of tokens, not by the largest id."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3, "ab": 7, "é": 2**31}, [], byte_fallback=True))
    backend.decoder = decoders.ByteLevel() if kind == "byte-level" else decoders.Sequence([decoders.ByteFallback()])
    backend.add_tokens(["a", "ab", "Ġ+"])  # the last is new and becomes 4
    backend.save(str(tmp_path / "tokenizer.json"))

    encoder = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert encoder.vocab_size == 2**31 + 1
    found = {i: data for i in (*range(-9, 9), 2**31, 2**32) if (data := encoder.token_bytes(i))}
    letter = "é".encode("latin-1" if kind == "byte-level" else "utf-8")
    assert found == {0: b"a", 3: b"b", 4: "Ġ+".encode(), 7: b"ab", 2**31: letter}
