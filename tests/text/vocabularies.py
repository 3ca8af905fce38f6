"""Small tokenizers for the tests, of both kinds, from the vocabularies in golden.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import cast

from minipaged.text.tokenizer import Tokenizer

Metadata = dict[str, object]


def golden_ids(*keys: str) -> dict[str, list[int]]:
    """The token ids of the samples, by the sample's name."""
    return cast("dict[str, list[int]]", _golden(*keys))


def golden_metadata(kind: str) -> Metadata:
    """The GGUF metadata of a small vocabulary."""
    return cast("Metadata", _golden(kind, "metadata"))


@functools.cache
def _golden_file() -> object:
    content: object = json.loads(Path(__file__).with_name("golden.json").read_text())
    return content


def _golden(*keys: str) -> object:
    node: object = _golden_file()
    for key in keys:
        assert isinstance(node, dict)
        node = node[key]
    return node


def byte_level_metadata(pre_tokenizer: str = "smollm", **changes: object) -> Metadata:
    metadata = golden_metadata("byte_level") | {"tokenizer.ggml.pre": pre_tokenizer}
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: object) -> Metadata:
    return golden_metadata("sentencepiece") | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


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
