"""CudaModules: the kernels of cuda/, compiled for the GPU that is there, and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged.errors import DeviceError
from minipaged.ops.cuda.nvrtc import HEADERS, Nvrtc, NvrtcError, find_toolkit
from minipaged.progress import Progress
from minipaged.user_cache import user_cache_folder

if TYPE_CHECKING:
    import cupy

logger = logging.getLogger(__name__)

OLDEST_ARCHITECTURE = 80
"""Compute capability, times ten: bfloat16 and cp.async came with Ampere."""


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel file and how to compile it."""

    name: str
    """Of the file, without ".cu"."""
    defines: tuple[str, ...] = ()
    """Such as "ELEMENT=__half"."""


class CudaModules:
    """Compiles kernels for the GPU in use, once: what is on disk from an earlier process is used again."""

    def __init__(self, architecture: int, progress: Progress) -> None:
        """`architecture`: the GPU's compute capability, times ten.

        Raises `DeviceError` if the GPU is too old, or what compiles for it is not installed.
        """
        check_architecture(architecture)
        self._compiler = open_compiler()
        self._target = self._compiler.target(architecture)
        self._progress = progress
        self._sources = _kernel_folder()
        self._common = hashlib.sha256()
        """Digest of what the code of all sources depends on."""
        for text in (self._compiler.version, self._target):
            self._common.update(text.encode() + b"\0")
        for path in (*sorted(self._sources.glob("*.cuh")), *(self._compiler.include / name for name in HEADERS)):
            self._common.update(path.read_bytes() + b"\0")

    def load(self, sources: Sequence[Source]) -> list[cupy.RawModule]:
        """A module for each source, ready to launch from. What is not on disk is compiled, in parallel.

        Raises `DeviceError`. What `progress` raises ends it.
        """
        import cupy

        folder = _cache_folder()
        keys = [self._key(source) for source in sources]
        paths = {key: path for key in keys if (path := _find(folder, key)) is not None}
        missing = {key: source for key, source in zip(keys, sources, strict=True) if key not in paths}
        with tempfile.TemporaryDirectory(prefix="minipaged-", ignore_cleanup_errors=True) as scratch:
            paths |= _store_all(folder, self._compile(missing), Path(scratch))
            modules = []
            for source, key in zip(sources, keys, strict=True):
                module = cupy.RawModule(path=str(paths[key]))
                try:
                    module.compile()  # reads the file now, which may be in `scratch`
                except cupy.cuda.driver.CUDADriverError as error:
                    raise DeviceError(
                        f"The driver does not take {source.name}.cu as NVRTC {self._compiler.version} compiles it for "
                        f"{self._target}: {error}. Update the NVIDIA driver, or install the extra of an older CUDA."
                    ) from error
                modules.append(module)
            return modules

    def _compile(self, sources: dict[str, Source]) -> dict[str, bytes]:
        """Code by key. Progress counts the bytes of the source files."""
        if not sources:
            return {}
        compiled = {}
        what = f"Compiling {len(sources)} CUDA kernel files"
        done, total = 0, sum(self._path(source).stat().st_size for source in sources.values())
        self._progress(what, done, total)
        executor = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="nvrtc")
        try:
            futures = {executor.submit(self._compile_one, source): key for key, source in sources.items()}
            for future in as_completed(futures):
                key = futures[future]
                compiled[key] = future.result()
                done += self._path(sources[key]).stat().st_size
                self._progress(what, done, total)
        finally:
            executor.shutdown(cancel_futures=True)
        return compiled

    def _compile_one(self, source: Source) -> bytes:
        path = self._path(source)
        try:
            return self._compiler.compile(
                path.read_text(encoding="utf-8"), path.name, self._target, self._options(source)
            ).code
        except NvrtcError as error:
            raise DeviceError(f"NVRTC {self._compiler.version} cannot compile {path.name}: {error}") from error

    def _key(self, source: Source) -> str:
        """Names a file by all that its content depends on."""
        digest = self._common.copy()
        for define in source.defines:
            digest.update(define.encode() + b"\0")
        digest.update(self._path(source).read_bytes())
        return f"{source.name}-{digest.hexdigest()[:32]}"

    def _options(self, source: Source) -> list[str]:
        return [f"--include-path={self._sources}", *(f"--define-macro={define}" for define in source.defines)]

    def _path(self, source: Source) -> Path:
        return self._sources / f"{source.name}.cu"


def check_architecture(architecture: int) -> None:
    """Raises `DeviceError` if a GPU of that compute capability, times ten, is too old for the kernels."""
    if architecture < OLDEST_ARCHITECTURE:
        raise DeviceError(
            f"The GPU has compute capability {architecture / 10:.1f}; minipaged's kernels need "
            f'{OLDEST_ARCHITECTURE / 10:.1f} (Ampere, such as A100 or RTX 30) or newer. device="cpu" works.'
        )


def open_compiler() -> Nvrtc:
    """NVRTC of the CUDA that CuPy was built for. Raises `DeviceError` if something is missing."""
    import cupy

    return Nvrtc(find_toolkit(cupy.cuda.runtime.runtimeGetVersion() // 1000))


def _kernel_folder() -> Path:
    """In a wheel the kernels are package data; in a checkout they lie beside the package."""
    package = Path(__file__).parents[2]
    installed = package / "cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


# ---- The files: KEY.DIGEST.cubin, where DIGEST is that of the content, so that a damaged one is not used ----


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where the user has no home."""
    try:
        return user_cache_folder() / "cuda"
    except RuntimeError:
        return None


def _find(folder: Path | None, key: str) -> Path | None:
    for path in sorted(folder.glob(f"{key}.*.cubin")) if folder is not None else ():
        try:
            if _file_name(key, path.read_bytes()) == path.name:
                return path
        except OSError:
            continue  # not ours to read
    return None


def _store_all(folder: Path | None, compiled: dict[str, bytes], scratch: Path) -> dict[str, Path]:
    """Paths by key: in `folder`, or if that cannot be written, with a warning, in `scratch`. Raises `DeviceError`."""
    try:
        if folder is None:
            raise OSError("there is no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        return {key: _store(folder, key, code) for key, code in compiled.items()}
    except OSError as error:
        if compiled:
            logger.warning(
                "Compiled kernels cannot be kept (%s), so every start compiles them again. Set MINIPAGED_CACHE to a "
                "folder that can be written.",
                error,
            )
    try:
        return {key: _store(scratch, key, code) for key, code in compiled.items()}
    except OSError as error:
        raise DeviceError(f"A compiled kernel cannot be stored anywhere: {error}. Free some space.") from error


def _store(folder: Path, key: str, code: bytes) -> Path:
    """The file appears whole or not at all."""
    path = folder / _file_name(key, code)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{key}.", suffix=".part", delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
    return path


def _file_name(key: str, code: bytes) -> str:
    return f"{key}.{hashlib.sha256(code).hexdigest()[:16]}.cubin"
