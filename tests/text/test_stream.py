from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minipaged.text.stop import StopStrings
from minipaged.text.stream import TextStream
from minipaged.text.tokenizer import Tokenizer
from tests.text.samples import SAMPLES
from tests.text.vocabularies import KINDS, byte_level_metadata, sentencepiece_metadata, tokenizer

each_kind = pytest.mark.parametrize("kind", KINDS)
# The vocabularies have 900 tokens: special ones first, then (SentencePiece) or among them (byte-level) single bytes.
token_ids = st.lists(
    st.one_of(st.integers(0, 260), st.integers(0, 899), st.sampled_from([-1, 900, 2**31, 2**40, -(2**70)])),
    max_size=30,
)
SURROGATE = [240, 163]
"""In a SentencePiece vocabulary the first two bytes of a surrogate, which is no character."""
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)


def stream_text(stream: TextStream, ids: list[int]) -> str:
    return "".join([stream.push(token_id) for token_id in ids] + [stream.finish()])


# The beginnings of characters: of one for every lead byte and every second and third byte that may follow it.
UNFINISHED = {
    chr(code).encode()[:length]
    for code in [*range(0x80, 0x800, 0x40), *range(0x800, 0x110000, 0x40)]
    for length in (1, 2, 3)
    if not 0xD800 <= code < 0xE000 and length < len(chr(code).encode())
}


def unfinished_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character of UTF-8 and want more bytes."""
    return next((data[-length:] for length in (3, 2, 1) if data[-length:] in UNFINISHED), b"")


@each_kind
@example(prompt=SURROGATE, ids=[])
@given(prompt=token_ids, ids=token_ids)
def test_joined_deltas_are_the_full_decode_less_the_prompt(kind: str, prompt: list[int], ids: list[int]) -> None:
    encoder = tokenizer(kind)
    text = stream_text(TextStream(encoder, prompt), ids)

    prompt_bytes = b"".join(encoder.token_bytes(i) for i in prompt)
    whole = encoder.decode(prompt + ids)
    unfinished = unfinished_character(prompt_bytes)
    shown = prompt_bytes[: len(prompt_bytes) - len(unfinished)].decode(errors="replace")
    if encoder.adds_space_prefix and prompt_bytes:
        shown = shown.removeprefix(" ")
    assert shown + text == whole


@each_kind
@example(ids=SURROGATE)
@given(ids=token_ids)
def test_every_delta_is_shown_as_early_as_it_can_be(kind: str, ids: list[int]) -> None:
    encoder = tokenizer(kind)
    stream = TextStream(encoder, encoder.encode("a"))
    data = b""
    shown = ""
    for token_id in ids:
        data += encoder.token_bytes(token_id)
        shown += stream.push(token_id)
        complete = data[: len(data) - len(unfinished_character(data))]
        assert shown == complete.decode(errors="replace")


@each_kind
@given(prompt=texts, answer=texts)
def test_text_comes_back_whole_and_no_character_is_split(kind: str, prompt: str, answer: str) -> None:
    encoder = tokenizer(kind)
    prompt_ids = encoder.encode(prompt)
    ids = encoder.encode(answer, add_special_tokens=False)
    assert encoder.decode(prompt_ids) == prompt
    stream = TextStream(encoder, prompt_ids)
    deltas = [stream.push(token_id) for token_id in ids]
    assert stream.finish() == ""
    # Encoded on its own, the answer has a space before it, which after a prompt is a space like any other.
    space = " " if encoder.adds_space_prefix and prompt and answer else ""
    assert "".join(deltas) == space + answer


@each_kind
@pytest.mark.parametrize("name", SAMPLES)
def test_prompt_cut_anywhere_in_real_text(kind: str, name: str) -> None:
    encoder = tokenizer(kind)
    ids = encoder.encode(SAMPLES[name])
    for cut in range(len(ids) + 1):
        text = stream_text(TextStream(encoder, ids[:cut]), ids[cut:])
        assert SAMPLES[name].endswith(text)
        assert "\ufffd" not in text


def test_a_character_begun_in_the_prompt_belongs_to_the_completion() -> None:
    encoder = Tokenizer.from_gguf(sentencepiece_metadata())
    ids = [encoder.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "𐀀".encode()]
    assert stream_text(TextStream(encoder, ids[:3]), ids[3:]) == "𐀀"
    assert stream_text(TextStream(encoder, ids[:3]), []) == "\ufffd"


def test_a_completion_keeps_its_leading_space_after_a_prompt() -> None:
    encoder = tokenizer("sentencepiece")
    answer = encoder.encode("blue", add_special_tokens=False)
    assert stream_text(TextStream(encoder, encoder.encode("The sky is")), answer) == " blue"
    assert stream_text(TextStream(encoder, encoder.encode("")), answer) == "blue"


def test_special_tokens_have_no_text() -> None:
    encoder = tokenizer("byte-level")
    end = [encoder.eos_token_id or 0]
    assert stream_text(TextStream(encoder, []), end) == ""


def test_stop_strings_are_found_across_tokens_and_not_before() -> None:
    encoder = tokenizer("byte-level")
    ids = encoder.encode("Blue.\n\nQ: Why?", add_special_tokens=False)
    stream = TextStream(encoder, encoder.encode("Q: "), stop=StopStrings(["\n\nQ:", "###"]))
    deltas = []
    for token_id in ids:
        deltas.append(stream.push(token_id))
        if stream.stopped_by is not None:
            break
    assert "".join(deltas) == "Blue."
    assert stream.stopped_by == "\n\nQ:"
    assert stream.push(ids[0]) == ""
    assert stream.finish() == ""


def test_text_held_back_for_a_stop_comes_at_the_end() -> None:
    encoder = tokenizer("byte-level")
    stream = TextStream(encoder, [], stop=StopStrings(["blue!"]))
    assert stream_text(stream, encoder.encode("blue")) == "blue"
    assert stream.stopped_by is None


def test_an_unfinished_character_at_the_end_can_complete_a_stop_string() -> None:
    encoder = tokenizer("sentencepiece")
    stream = TextStream(encoder, [], stop=StopStrings(["\ufffd"]))
    assert stream.push(encoder.token_to_id("<0xF0>") or 0) == ""
    assert stream.finish() == ""
    assert stream.stopped_by == "\ufffd"


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    encoder = tokenizer("byte-level")
    ids = encoder.encode("aXbXc")
    assert len(ids) == 5
    stream = TextStream(encoder, [], stop=StopStrings(["X"]), min_tokens=2)
    assert stream_text(stream, ids) == "aXb"
    assert stream.stopped_by == "X"


@given(ids=token_ids)
def test_decoding_agrees_with_the_tokenizers_package(ids: list[int]) -> None:
    """On every id sequence in the vocabulary, invalid bytes included."""
    import tokenizers
    from tokenizers import decoders, models

    known = [i for i in ids if 0 <= i < 900]
    encoder = tokenizer("byte-level")
    vocabulary = {encoder.id_to_token(i) or "": i for i in range(900)}
    package = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    package.decoder = decoders.ByteLevel()
    assert encoder.decode(known, skip_special_tokens=False) == package.decode(known)
    assert encoder.decode(ids, skip_special_tokens=False) == package.decode(known)


def test_incremental_and_whole_decoding_of_utf8_agree_on_every_short_sequence() -> None:
    """The stream rests on this property of Python's decoder; here are all transitions between kinds of bytes."""
    kinds = bytes([0x41, 0x80, 0x90, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE1, 0xED, 0xF0, 0xF1, 0xF4, 0xF5])
    for code in range(len(kinds) ** 4):
        digits = (code // len(kinds) ** place % len(kinds) for place in range(4))
        data = bytes(kinds[digit] for digit in digits)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(bytes([byte])) for byte in data]
        assert "".join(pieces) + decoder.decode(b"", final=True) == data.decode(errors="replace")


def test_out_of_vocabulary_ids_have_no_text() -> None:
    encoder = Tokenizer.from_gguf(byte_level_metadata())
    assert stream_text(TextStream(encoder, [-5]), [2**64, -1, 900]) == ""
    assert encoder.decode([2**64, -1, 900]) == ""
    assert [encoder.id_to_token(i) for i in (2**64, -1, 900)] == [None] * 3
