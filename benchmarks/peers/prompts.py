"""Prompts of exact lengths, cut from a passage of English prose."""

from __future__ import annotations

from pathlib import Path

from minipaged.models.files.model_source import ModelSource
from minipaged.text.tokenizer import Tokenizer

PASSAGE = Path(__file__).parents[1] / "passage.txt"


class Prompts:
    """Token ids. Prompts with different numbers begin at different words, so that they share no prefix."""

    def __init__(self, source: ModelSource) -> None:
        assert source.gguf_metadata is not None
        self.passage = Tokenizer.from_gguf(source.gguf_metadata).encode(PASSAGE.read_text(encoding="utf-8"))

    def cut(self, length: int, number: int = 0) -> list[int]:
        """`length` tokens; the passage begins again where it ends."""
        start = 31 * number
        return [self.passage[index % len(self.passage)] for index in range(start, start + length)]

    def batch(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens."""
        return [self.cut(length, number) for number in range(count)]

    def with_shared_prefix(self, count: int, prefix: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens, the first `prefix` of which are the same in all."""
        return [self.cut(prefix) + self.cut(length - prefix, number) for number in range(count)]
