"""What a tokenizer is built from, whichever file format it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """The parts of a `Tokenizer`.

    Attributes:
        backend: splits and merges. Its post-processor is not used: `prefix_ids` and `suffix_ids` say it all.
        vocab_size: one more than the highest token id.
        prefix_ids: put before a text that is encoded with special tokens: the BOS id, or nothing.
        suffix_ids: put after it: nothing, but for the few models that ask for an EOS id.
        special_tokens: role to token, with roles such as "bos_token", "eos_token", "pad_token", "unk_token".
        chat_templates: name to jinja source; the usual one is named "default". Empty if there is none.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
