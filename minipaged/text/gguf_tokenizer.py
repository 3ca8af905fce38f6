"""Rebuilding a tokenizer from the metadata of a GGUF file.

The keys are those of the GGUF specification ("tokenizer.ggml.…"). A file says which model (byte-level BPE,
or SentencePiece-style BPE), and for the former which pre-tokenizer, by name alone; what stands behind a name
is settled by the tokenizer.json of the model family that it is named after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minipaged.text.gguf_fields import TokenizerFields, TokenType
from minipaged.text.tokenizer_source import TokenizerSource
from minipaged.text.vocabulary import SPACE_MARK

if TYPE_CHECKING:
    import tokenizers

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = (*_LLAMA3, "qwen2", "gpt-2", "smollm")

# Llama 3 and Qwen2 split a text alike, but for the number of digits that go together.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# GGUF's name of a special token to its role in the Hugging Face files.
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": "eot_token",
    "eom": "eom_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def read_tokenizer_metadata(metadata: Mapping[str, object], where: str) -> TokenizerSource:
    """Build the tokenizer that GGUF `metadata` describes; see `Tokenizer.from_gguf`."""
    fields = TokenizerFields(metadata, where)
    model = fields.string("model")
    match model:
        case "gpt2":
            pre_tokenizer = fields.string("pre")
            backend = _byte_level_bpe(fields, pre_tokenizer)
            adds_bos_by_default = pre_tokenizer in _LLAMA3
            default_ids: dict[str, int] = {}
        case "llama":
            backend = _sentencepiece_bpe(fields)
            adds_bos_by_default = True
            default_ids = {"unknown": 0, "bos": 1, "eos": 2}
        case _:
            raise fields.wrong("model", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece-style BPE)")
    _add_special_tokens(backend, fields)
    given_ids = {name: fields.token_id(name) for name in _ROLES}
    ids = default_ids | {name: token_id for name, token_id in given_ids.items() if token_id is not None}
    return TokenizerSource(
        backend=backend,
        vocab_size=len(fields.tokens),
        prefix_ids=_ids_if_wanted(fields, ids, "bos", adds_bos_by_default),
        suffix_ids=_ids_if_wanted(fields, ids, "eos", False),
        special_tokens={_ROLES[name]: fields.tokens[token_id] for name, token_id in ids.items()},
        chat_templates=fields.chat_templates(),
    )


def _byte_level_bpe(fields: TokenizerFields, pre_tokenizer: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise fields.wrong("pre", f"one of {known}. Or take the same model as a folder with a tokenizer.json")
    if fields.flag("add_space_prefix", False):
        expected = "false in a byte-level BPE, whose text begins as it is"
        raise fields.wrong("add_space_prefix", f"{expected}. Take the same model as a folder with a tokenizer.json")
    try:
        bpe = models.BPE(fields.vocabulary, fields.merges(), ignore_merges=pre_tokenizer in _LLAMA3)
    except Exception as error:  # the package raises plain Exception for a merge of tokens that do not exist
        raise fields.error(f"merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.decoder = decoders.ByteLevel()
    if pre_tokenizer in ("gpt-2", "smollm"):
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = split if pre_tokenizer == "gpt-2" else pre_tokenizers.Sequence([digits, split])
        return backend
    pattern = _SPLIT_PATTERN.replace("DIGITS", r"\p{N}" if pre_tokenizer == "qwen2" else r"\p{N}{1,3}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_bpe(fields: TokenizerFields) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocabulary = fields.vocabulary
    missing = [token for byte in range(256) if (token := f"<0x{byte:02X}>") not in vocabulary]
    if missing:
        raise fields.error(
            f"tokens lacks the byte tokens {', '.join(missing[:4])}{', …' * (len(missing) > 4)}; expected all 256, so "
            "that every character can be expressed"
        )
    bpe = models.BPE(vocabulary, _merges_by_score(fields), byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    marks = [normalizers.Replace(" ", SPACE_MARK)]
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *marks])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = normalizers.Sequence(marks)
        backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(fields: TokenizerFields) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model, whose pieces have scores instead.

    SentencePiece joins the neighbours whose joint piece has the highest score (Kudo and Richardson, 2018).
    So every way to cut a piece in two pieces is a merge, and the piece's score is its rank. Of the ways to
    cut one piece the longest left part comes first, as where transformers converts such a model.
    """
    pieces = {
        token: score
        for token, score, kind in zip(fields.tokens, fields.scores, fields.token_types, strict=True)
        if kind is TokenType.NORMAL
    }
    ranked = [
        (score, cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in ranked]


def _add_special_tokens(backend: tokenizers.Tokenizer, fields: TokenizerFields) -> None:
    """Let the tokens that a text may spell out be found before anything else is done to it."""
    from tokenizers import AddedToken

    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(fields.tokens, fields.token_types, strict=True)
            if kind in special
        ]
    )


def _ids_if_wanted(fields: TokenizerFields, ids: Mapping[str, int], name: str, default: bool) -> tuple[int, ...]:
    if not fields.flag(f"add_{name}_token", default):
        return ()
    if name not in ids:
        raise fields.wrong(f"{name}_token_id", f"an id, since the model wants {name.upper()} with every text")
    return (ids[name],)
