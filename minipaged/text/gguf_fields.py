"""Typed reading of the tokenizer part of GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property

from minipaged.errors import ModelLoadError


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

    Raises:
        ModelLoadError: by any method, where a field is missing, or of the wrong type, length or range.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def string(self, name: str) -> str:
        """A field that must be there."""
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A field that may be absent."""
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

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
            raise ModelLoadError(f"tokenizer.ggml.token_type: {error}; expected 1 to 6") from error
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
                raise ModelLoadError(
                    f"tokenizer.ggml.tokens: {token!r} has the ids {vocabulary[token]} and {token_id}; expected "
                    "each token once. Take another conversion of the model"
                )
            vocabulary[token] = token_id
        return vocabulary

    def merges(self) -> list[tuple[str, str]]:
        """The merges of a byte-level BPE, the most urgent first."""
        merges = []
        for rank, merge in enumerate(self._strings("merges")):
            left, space, right = merge.partition(" ")
            if not (left and space and right):
                raise ModelLoadError(
                    f"tokenizer.ggml.merges[{rank}] is {merge!r}; expected two tokens with a space between"
                )
            merges.append((left, right))
        return merges

    def token_id(self, name: str) -> int | None:
        """The id of a special token ("bos", "eos", …), or None where the file names none."""
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._wrong(f"{name}_token_id", value, f"an id from 0 to {len(self.tokens) - 1}")
        return value

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the unnamed one is "default"."""
        prefix = "tokenizer.chat_template"
        return {
            key.removeprefix(prefix).removeprefix(".") or "default": value
            for key, value in self._metadata.items()
            if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
        }

    def _strings(self, name: str) -> list[str]:
        values = self._list(name, "strings")
        strings = [value for value in values if isinstance(value, str)]
        if len(strings) != len(values):
            raise self._wrong(name, next(v for v in values if not isinstance(v, str)), "strings alone in it")
        return strings

    def _list(self, name: str, expected: str) -> list[object]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise self._wrong(name, value, f"a list of {expected}")
        return value

    def _check_length(self, name: str, length: int) -> None:
        if length != len(self.tokens):
            raise ModelLoadError(
                f"tokenizer.ggml.{name} has {length} numbers, but there are {len(self.tokens)} tokens; expected "
                "one for each. Download the file again, or take another conversion of the model"
            )

    def _wrong(self, name: str, found: object, expected: str) -> ModelLoadError:
        key = f"tokenizer.ggml.{name}"
        state = f"is {found!r:.80}" if key in self._metadata else "is missing"
        return ModelLoadError(f"{key} {state}; expected {expected}. Take another conversion of the model")
