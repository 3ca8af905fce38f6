"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from minipaged.errors import InvalidRequestError, ModelLoadError
from minipaged.text.gguf_tokenizer import read_tokenizer_metadata
from minipaged.text.huggingface_tokenizer import read_tokenizer_file
from minipaged.text.tokenizer_source import TokenizerSource
from minipaged.text.vocabulary import Vocabulary


class Tokenizer:
    """A model's tokenizer. Its methods may be called from any thread at once.

    Special tokens that are spelled out in a text are recognised and become their ids, as in Hugging Face.

    Args:
        source: the parts; `from_file` and `from_gguf` read them.

    Attributes:
        vocab_size: one more than the highest token id; some ids below may have no token.
        special_tokens: role to token, with roles such as "bos_token", "eos_token", "pad_token", "unk_token".
        special_token_ids: ids that steer the model and are no text.
        chat_templates: name to jinja source; the usual one is named "default". Empty if there is none.
        adds_space_prefix: a space is put before every text (SentencePiece), which decoding takes off again.

    Raises:
        ModelLoadError: the parts do not fit each other, or the tokenizer is of an unknown kind.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        # Settings stored with a tokenizer that would silently cut or pad a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._prefix_ids = list(source.prefix_ids)
        self._suffix_ids = list(source.suffix_ids)
        vocabulary = Vocabulary(self._backend)
        self._token_bytes = vocabulary.token_bytes
        self._missing_bytes = vocabulary.missing_bytes
        self.adds_space_prefix = vocabulary.adds_space_prefix
        self.special_token_ids = vocabulary.special_ids
        self.vocab_size = source.vocab_size
        self.special_tokens = source.special_tokens
        self.chat_templates = source.chat_templates
        for role in ("bos_token", "eos_token"):
            token = self.special_tokens.get(role)
            if token is not None and self.token_to_id(token) is None:
                raise ModelLoadError(
                    f"The tokenizer's {role} is {token!r}, which is not in its vocabulary of {self.vocab_size} "
                    "tokens; correct special_tokens_map.json or tokenizer_config.json."
                )

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json and the files beside it that tell of special tokens and chat templates.

        Those are tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
        additional_chat_templates/*.jinja, each of them optional.

        Raises:
            ModelLoadError: a file is missing or damaged, or the tokenizer is of an unknown kind.
        """
        return cls(read_tokenizer_file(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], where: str = "GGUF metadata") -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's metadata, with its own keys ("tokenizer.ggml.tokens", …) and plain values.
            where: what error messages call the file.

        Raises:
            ModelLoadError: something is missing or inconsistent, or the tokenizer is of an unknown kind.
        """
        return cls(read_tokenizer_metadata(metadata, where))

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, where the model has one."""
        return self.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, where the model has one."""
        return self.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return None if self.eos_token is None else self.token_to_id(self.eos_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode `text`, with the special tokens around it that the model was trained with, if it has such.

        Releases the GIL while it works.

        Raises:
            InvalidRequestError: `text` holds a surrogate, or a character that the vocabulary cannot express.
        """
        self._check_encodable(text)
        # `encode_batch_fast` lets other threads run; `encode` does not.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_chat(self, text: str) -> list[int]:
        """Encode a rendered chat template, which writes its own special tokens.

        A model that begins a text with BOS gets exactly one, whether or not the template wrote it.

        Raises:
            InvalidRequestError: as `encode`.
        """
        ids = self.encode(text, add_special_tokens=False)
        return ids if ids[: len(self._prefix_ids)] == self._prefix_ids else self._prefix_ids + ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `ids`; ids that no token has decode to nothing, invalid bytes to U+FFFD. Never raises."""
        joined = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        text = joined.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_space_prefix else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that `token_id` stands for: maybe a part of a character, maybe none."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self._token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token with this id as the vocabulary spells it, or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _check_encodable(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, "
                "which is no character; decode the text with the right encoding."
            ) from error
        if len(data.translate(None, delete=self._missing_bytes)) == len(data):
            return
        missing = frozenset(self._missing_bytes)
        position = next(i for i, character in enumerate(text) if missing.intersection(character.encode()))
        raise InvalidRequestError(
            f"The text holds U+{ord(text[position]):04X} at position {position}, for which the model's "
            "vocabulary has no token; remove that character."
        )
