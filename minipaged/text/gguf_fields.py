"""Typed reading of the tokenizer part of GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property

from minipaged.errors import ModelLoadError
from minipaged.models.files.fields import Fields

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """What a token is for, as numbered by the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerFields:
    """The fields "tokenizer.…" of GGUF metadata, checked for their type and against each other.

    Args:
        metadata: the file's keys and plain values (str, bool, int, float, or lists of them).
        where: what error messages call the file.

    Raises:
        ModelLoadError: by any method, where a field is missing, or of the wrong type, length or range.
    """

    def __init__(self, metadata: Mapping[str, object], where: str) -> None:
        self._fields = Fields(metadata, where)

    def string(self, name: str) -> str:
        """A field that must be there."""
        return self._fields.string(f"{_PREFIX}{name}")

    def flag(self, name: str, default: bool) -> bool:
        """A field that may be absent."""
        return self._fields.boolean(f"{_PREFIX}{name}", default)

    @cached_property
    def tokens(self) -> list[str]:
        """Every token by id; an unused id may have any string."""
        return self._strings("tokens")

    @cached_property
    def token_types(self) -> list[TokenType]:
        """The type of every token by id."""
        values = self._list("token_type", "numbers")
        try:
            types = [TokenType(value) for value in values if isinstance(value, int)]
        except ValueError as error:
            raise self.error(f"token_type: {error}; expected 1 to 6") from error
        self._check_length("token_type", len(types))
        return types

    @cached_property
    def scores(self) -> list[float]:
        """The score of every token by id."""
        scores = [float(value) for value in self._list("scores", "numbers") if isinstance(value, int | float)]
        self._check_length("scores", len(scores))
        return scores

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token to id, of all tokens in use."""
        vocabulary: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.token_types, strict=True)):
            if kind is TokenType.UNUSED or not token:
                continue
            if token in vocabulary:
                ids = f"{vocabulary[token]} and {token_id}"
                raise self.error(f"tokens: {token!r} has the ids {ids}; expected each token once")
            vocabulary[token] = token_id
        return vocabulary

    def merges(self) -> list[tuple[str, str]]:
        """The merges of a byte-level BPE, the most urgent first."""
        merges = []
        for rank, merge in enumerate(self._strings("merges")):
            left, space, right = merge.partition(" ")
            if not (left and space and right):
                raise self.error(f"merges[{rank}] is {merge!r}; expected two tokens with a space between")
            merges.append((left, right))
        return merges

    def token_id(self, name: str) -> int | None:
        """The id of a special token ("bos", "eos", …), or None where the file names none."""
        key = f"{_PREFIX}{name}_token_id"
        if self._fields.get(key) is None:
            return None
        token_id = self._fields.integer(key, at_least=0)
        if token_id >= len(self.tokens):
            raise self._fields.wrong(key, f"an id from 0 to {len(self.tokens) - 1}")
        return token_id

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the unnamed one is "default"."""
        prefix = "tokenizer.chat_template"
        return {
            key.removeprefix(prefix).removeprefix(".") or "default": value
            for key, value in self._fields.values.items()
            if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
        }

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """The error for a field that does not hold what is expected."""
        return self._fields.wrong(f"{_PREFIX}{name}", expected)

    def error(self, problem: str) -> ModelLoadError:
        """Any other error; `problem` begins with a field's name."""
        return ModelLoadError(f"{self._fields.where}: {_PREFIX}{problem}. Take another conversion of the model.")

    def _strings(self, name: str) -> list[str]:
        values = self._list(name, "strings")
        strings = [value for value in values if isinstance(value, str)]
        if len(strings) != len(values):
            odd = next(value for value in values if not isinstance(value, str))
            raise self.error(f"{name} holds {odd!r}; expected strings alone")
        return strings

    def _list(self, name: str, expected: str) -> list[object]:
        value = self._fields.get(f"{_PREFIX}{name}")
        if not isinstance(value, list):
            raise self.wrong(name, f"a list of {expected}")
        return value

    def _check_length(self, name: str, length: int) -> None:
        if length != len(self.tokens):
            raise self.error(
                f"{name} has {length} numbers, but there are {len(self.tokens)} tokens; expected one for each"
            )
