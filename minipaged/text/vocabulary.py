"""The bytes that each token id stands for.

A token's bytes do not depend on its neighbours, which makes decoding exact, incremental and cheap. The
decoders of the `tokenizers` package agree with it on every valid text; they differ from it, and among each
other, on invalid bytes, where some of them change characters that came earlier.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from minipaged.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK = "▁"  # SentencePiece's space, U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes in a byte-level BPE (Radford et al., GPT-2, 2019).

    Visible Latin-1 characters stand for themselves, the other bytes for U+0100 and onwards, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


_TO_BYTE = {ord(character): byte for byte, character in enumerate(byte_level_alphabet())}


class Vocabulary:
    """Token ids, their bytes, and what the tokenizer does to the start of a text.

    Args:
        backend: the tokenizer, whose decoder must be byte-level or SentencePiece-style with byte fallback.

    Attributes:
        token_bytes: token id to bytes; no bytes for an id that no token has.
        special_ids: tokens that steer the model and are no text, such as BOS.
        adds_space_prefix: a space is put before every text, which decoding takes off again.
        missing_bytes: byte values that no token covers, so that characters with them cannot be encoded.

    Raises:
        ModelLoadError: the decoder is of another kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        steps = _decoder_steps(backend)
        kinds = {step.get("type") for step in steps}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.missing_bytes = b""
        if kinds == {"ByteLevel"}:
            self.adds_space_prefix = False
            to_bytes = _byte_level
            added_bytes = {token_id: token.content.encode() for token_id, token in added.items()}
            if getattr(backend.model, "unk_token", None) is None:
                alphabet = enumerate(byte_level_alphabet())
                self.missing_bytes = bytes(byte for byte, letter in alphabet if backend.token_to_id(letter) is None)
        elif "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            self.adds_space_prefix = "Strip" in kinds
            to_bytes = _sentencepiece
            added_bytes = {token_id: to_bytes(token.content) for token_id, token in added.items()}
        else:
            raise ModelLoadError(
                f"The tokenizer's decoder is made of {sorted(map(str, kinds))}; known are ['ByteLevel'] "
                "(byte-level BPE) and ['ByteFallback', 'Fuse', 'Replace', 'Strip'] (SentencePiece-style with "
                "byte fallback), which the Llama family uses: take a model of that family."
            )
        self.token_bytes = _ByteTable(backend, to_bytes, added_bytes).find


class _ByteTable:
    """Token id to bytes. As objects of their own they would take ten times the memory.

    Args:
        backend: a model of n tokens. The bytes of ids below n, all ids unless they have gaps, are joined in one piece.
        to_bytes: what a model's token stands for.
        added: token id to bytes of tokens that were added to the model.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], added: Mapping[int, bytes]
    ) -> None:
        size = backend.get_vocab_size(with_added_tokens=False)
        model, has_gaps = backend.model, False
        joined, self._ends = bytearray(), array("I", [0])
        for token_id in range(size):
            token = model.id_to_token(token_id)  # one by one: strings of all tokens at once would be a peak of memory
            has_gaps |= token is None
            joined += added[token_id] if token_id in added else to_bytes(token or "")
            self._ends.append(len(joined))
        self._joined = bytes(joined)
        self._others = {token_id: data for token_id, data in added.items() if token_id >= size}
        if has_gaps:
            for token, token_id in backend.get_vocab(with_added_tokens=False).items():
                if token_id >= size:
                    self._others.setdefault(token_id, to_bytes(token))

    def find(self, token_id: int) -> bytes:
        """The bytes of a token; no bytes for an id that no token has."""
        if 0 <= token_id < len(self._ends) - 1:
            return self._joined[self._ends[token_id] : self._ends[token_id + 1]]
        return self._others.get(token_id, b"")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    settings = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, object]] = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    return steps


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:  # a token that was not made of bytes stands for itself
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
