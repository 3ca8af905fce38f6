"""NVRTC, NVIDIA's compiler as a library, through ctypes: CUDA C++ in, device code out. It needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minipaged.errors import DeviceError

HEADERS = ("cuda_bf16.h", "cuda_fp16.h")
"""What the kernels include of NVIDIA's."""


class NvrtcError(DeviceError):
    """NVRTC cannot be used, or does not take a source; then the message is its log."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """Where NVRTC and NVIDIA's headers are."""

    library: Path
    include: Path


@dataclass(frozen=True, slots=True)
class Compiled:
    """What NVRTC makes of a source."""

    code: bytes
    """CUBIN for a target "sm_90", PTX for "compute_90"."""
    log: str


def find_toolkit(major: int) -> Toolkit:
    """NVRTC and the headers of CUDA `major`: from NVIDIA's wheels, else from an installed toolkit.

    The newest NVRTC is not always right: a driver takes no code of a CUDA newer than its own. Raises `DeviceError`,
    which names the wheel that is missing.
    """
    library = next(_existing(_libraries(major)), None)
    include = next(
        (folder for folder in _include_folders(major) if all((folder / header).is_file() for header in HEADERS)), None
    )
    suffix = f"-cu{major}" if major < 13 else ""
    if library is None:
        raise _missing("NVRTC, NVIDIA's run-time compiler,", f"nvidia-cuda-nvrtc{suffix}", major)
    if include is None:
        raise _missing(f"NVIDIA's headers ({', '.join(HEADERS)})", f"nvidia-cuda-runtime{suffix}", major)
    return Toolkit(library, include)


def _missing(what: str, wheel: str, major: int) -> DeviceError:
    return DeviceError(
        f"{what} of CUDA {major} cannot be found, and the kernels are compiled with it: the wheel {wheel} is not "
        f"installed. pip install 'minipaged[cuda{major}]'"
    )


def _libraries(major: int) -> Iterator[Path]:
    if os.name == "nt":
        name = f"nvrtc64_{major}0_0.dll"
        folders = [folder / place for folder in _wheel_folders("cuda_nvrtc", major) for place in ("bin", "bin/x86_64")]
        folders += [root / place for root in _installed_toolkits() for place in ("bin", "bin/x64")]
    else:
        name = f"libnvrtc.so.{major}"
        folders = [folder / "lib" for folder in _wheel_folders("cuda_nvrtc", major)]
        folders += [root / "lib64" for root in _installed_toolkits()]
    return (folder / name for folder in folders)


def _builtins(library: Path) -> Iterator[Path]:
    """What lies beside NVRTC and is opened by it by name alone, which finds it if it is loaded already.

    The wheel of CUDA 13.0 does not tell the loader where it is.
    """
    return library.parent.glob("nvrtc-builtins64_*.dll" if os.name == "nt" else "libnvrtc-builtins.so.*")


def _include_folders(major: int) -> Iterator[Path]:
    for folder in (*_wheel_folders("cuda_runtime", major), *_installed_toolkits()):
        yield folder / "include"


def _wheel_folders(part: str, major: int) -> list[Path]:
    """Where a wheel of CUDA `major` unpacks; since CUDA 13 all of them into one folder."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec and spec.submodule_search_locations) or ()
    return [Path(root) / (part if major < 13 else f"cu{major}") for root in roots]


def _installed_toolkits() -> list[Path]:
    chosen = [Path(value) for name in ("CUDA_PATH", "CUDA_HOME") if (value := os.environ.get(name))]
    return [*chosen, Path("/usr/local/cuda")]


def _existing(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file())


class Nvrtc:
    """A loaded NVRTC. Threads may compile at the same time."""

    def __init__(self, toolkit: Toolkit) -> None:
        self.include = toolkit.include
        """The folder of NVIDIA's headers."""
        try:
            for path in _builtins(toolkit.library):
                ctypes.CDLL(str(path))
            self._library = ctypes.CDLL(str(toolkit.library))
        except OSError as error:
            raise NvrtcError(f"NVRTC cannot be loaded: {error}. Install its wheel anew.") from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value} ({toolkit.library.stat().st_size} bytes)"
        """Tells builds of NVRTC apart."""
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        self.architectures = tuple(architectures)
        """Compute capabilities, times ten, that it knows."""

    def target(self, architecture: int) -> str:
        """What to compile for to run on a GPU of that compute capability (times ten).

        "sm_90" if NVRTC knows it; else "compute_89", say, the newest before it that NVRTC knows, as PTX, which the
        driver translates. Raises `NvrtcError` if it only knows newer ones.
        """
        if architecture in self.architectures:
            return f"sm_{architecture}"
        older = [known for known in self.architectures if known < architecture]
        if not older:
            raise NvrtcError(
                f"NVRTC {self.version} makes no code for compute capability {architecture / 10:.1f}, only for "
                f"{min(self.architectures) / 10:.1f} and newer; take an older CUDA."
            )
        return f"compute_{max(older)}"

    def compile(self, source: str, name: str, target: str, options: Sequence[str]) -> Compiled:
        """Compile a source, called `name` in messages. Raises `NvrtcError`."""
        flags = [f"--gpu-architecture={target}", "--std=c++17", f"--include-path={self.include}", *options]
        given = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        program = ctypes.c_void_p()
        create = (source.encode(), name.encode(), 0, None, None)
        self._call("nvrtcCreateProgram", ctypes.byref(program), *create)
        try:
            status = self._library.nvrtcCompileProgram(program, len(flags), given)
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise NvrtcError(log.strip() or f"{name}: {self._describe(status)}")
            if target.startswith("sm_"):
                return Compiled(self._output(program, "CUBIN"), log)
            return Compiled(self._output(program, "PTX").rstrip(b"\0"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        output = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, output)
        return output.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise NvrtcError(f"{function} of NVRTC failed: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()
