"""Small tokenizers for the tests, of both kinds, from the vocabularies in golden.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from minipaged.text.tokenizer import Tokenizer

Metadata = dict[str, object]


@functools.cache
def golden() -> dict[str, dict[str, dict[str, dict[str, list[int]]]]]:
    content: dict[str, dict[str, dict[str, dict[str, list[int]]]]] = json.loads(
        Path(__file__).with_name("golden.json").read_text()
    )
    return content


def byte_level_metadata(pre_tokenizer: str = "smollm", **changes: object) -> Metadata:
    metadata: Metadata = {**golden()["byte_level"]["metadata"], "tokenizer.ggml.pre": pre_tokenizer}
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: object) -> Metadata:
    metadata: Metadata = {**golden()["sentencepiece"]["metadata"]}
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    match kind:
        case "byte-level":
            return Tokenizer.from_gguf(byte_level_metadata())
        case "sentencepiece":
            return Tokenizer.from_gguf(sentencepiece_metadata())
        case "sentencepiece, no space prefix":
            return Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    raise AssertionError(kind)


KINDS = ("byte-level", "sentencepiece", "sentencepiece, no space prefix")
