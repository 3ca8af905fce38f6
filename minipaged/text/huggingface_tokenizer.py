"""Reading a tokenizer from a folder in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged.errors import ModelLoadError
from minipaged.models.files.json_file import read_json
from minipaged.text.tokenizer_source import TokenizerSource

if TYPE_CHECKING:
    import tokenizers


def read_tokenizer_file(path: Path) -> TokenizerSource:
    """Read `path` (a tokenizer.json) and the optional files beside it; see `Tokenizer.from_file`."""
    folder = path.parent
    backend = _read_backend(path)
    config = _read_optional(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config | _read_optional(folder / "special_tokens_map.json"))
    prefix_ids, suffix_ids = _ids_around_a_text(backend)
    return TokenizerSource(
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        prefix_ids=_override(prefix_ids, config.get("add_bos_token"), special_tokens.get("bos_token"), backend),
        suffix_ids=_override(suffix_ids, config.get("add_eos_token"), special_tokens.get("eos_token"), backend),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        raise ModelLoadError(
            f"There is no {path}; the model's folder must hold a tokenizer.json. Where it has only a "
            "tokenizer.model, save it anew with transformers' AutoTokenizer.save_pretrained."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the package raises plain Exception for what is wrong with the file, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelLoadError(f"{path} is no tokenizer.json: {error}. Download the file again.") from error


def _read_optional(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as UTF-8: {error}. Download the file again.") from error


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The tokens by role. A token is a string, or an object whose "content" is that string."""
    found = {}
    for role, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(content, str):
            found[role] = content
    return found


def _ids_around_a_text(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ModelLoadError(
        f"The tokenizer's post-processor turns the ids {bare} into {full}; expected it to put special tokens "
        "before and after a text and to leave the text as it is."
    )


def _override(ids: list[int], wanted: object, token: str | None, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Apply `add_bos_token` or `add_eos_token`, which outrank the post-processor where they are given."""
    if not isinstance(wanted, bool) or token is None:
        return tuple(ids)
    token_id = backend.token_to_id(token)
    rest = [i for i in ids if i != token_id]
    if not wanted or token_id is None:
        return tuple(rest)
    return tuple(ids) if token_id in ids else (token_id, *rest)


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """All chat templates by name. Files of their own outrank tokenizer_config.json, as in transformers."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if templates:
        return templates
    given = config.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        for entry in given:
            match entry:
                case {"name": str(name), "template": str(template)}:
                    templates[name] = template
                case _:
                    break
        else:
            return templates
    raise ModelLoadError(
        f"{folder / 'tokenizer_config.json'}: chat_template is a {type(given).__name__}; expected a string, or "
        "a list of objects with a name and a template."
    )
