"""The bytes that each token id stands for.

A token's bytes do not depend on its neighbours, which makes decoding exact, incremental and cheap. The
decoders of the `tokenizers` package agree with it on every valid text; they differ from it, and among each
other, on invalid bytes, where some of them change characters that came earlier.
"""

from __future__ import annotations

import json
import re
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


class Vocabulary:
    """Token ids, their bytes, and what the tokenizer does to the start of a text.

    Args:
        backend: the tokenizer, whose decoder must be byte-level or SentencePiece-style with byte fallback.

    Attributes:
        token_bytes: token id to bytes; ids that no token has are absent.
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
        tokens = backend.get_vocab(with_added_tokens=True)
        if kinds == {"ByteLevel"}:
            self.adds_space_prefix = False
            self.token_bytes = _byte_level(tokens)
            self.token_bytes.update((token_id, token.content.encode()) for token_id, token in added.items())
            if getattr(backend.model, "unk_token", None) is None:
                alphabet = enumerate(byte_level_alphabet())
                self.missing_bytes = bytes(byte for byte, character in alphabet if character not in tokens)
        elif "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            self.adds_space_prefix = "Strip" in kinds
            self.token_bytes = {token_id: _sentencepiece(token) for token, token_id in tokens.items()}
        else:
            raise ModelLoadError(
                f"The tokenizer's decoder is made of {sorted(map(str, kinds))}; known are ['ByteLevel'] "
                "(byte-level BPE) and ['ByteFallback', 'Fuse', 'Replace', 'Strip'] (SentencePiece-style with "
                "byte fallback), which the Llama family uses: take a model of that family."
            )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    settings = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, object]] = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    return steps


def _byte_level(tokens: dict[str, int]) -> dict[int, bytes]:
    to_byte = {ord(character): byte for byte, character in enumerate(byte_level_alphabet())}
    table = {}
    for token, token_id in tokens.items():
        try:
            table[token_id] = token.translate(to_byte).encode("latin-1")
        except UnicodeEncodeError:  # a token that was not made of bytes stands for itself
            table[token_id] = token.encode()
    return table


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
