"""Kernels compiled by the real NVRTC, kept on disk, and run by the emulator."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minipaged import DeviceError
from minipaged.ops.cuda import modules as cuda_modules
from minipaged.ops.cuda import nvrtc
from minipaged.ops.cuda.modules import CudaModules, Source
from minipaged.ops.cuda.nvrtc import Nvrtc, find_toolkit
from minipaged.progress import no_progress
from tests.ops.cuda.fake_cupy import fake_cupy
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.fake_nvrtc import use_fake_nvrtc

EMBED = Source("embed", ("ELEMENT=__half",))
COPY = Source("copy_blocks")


class LoadedFile:
    """Stands in for cupy.RawModule: what a driver would be given."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.code = b""

    def compile(self) -> None:
        self.code = self.path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; CuPy is one that only reads files."""
    modules = fake_cupy(Gpu())
    vars(modules["cupy"])["RawModule"] = LoadedFile
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    return tmp_path / "cuda"


class Watch:
    """Counts what is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        compile_really = Nvrtc.compile

        def count(compiler: Nvrtc, source: str, name: str, *arguments: object) -> object:
            self.names.append(name)
            return compile_really(compiler, source, name, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Nvrtc, "compile", count)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def load(*sources: Source, architecture: int = 90) -> list[bytes]:
    return [module.code for module in CudaModules(architecture, no_progress).load(sources)]


def test_kernels_are_compiled_once(folder: Path, watch: Watch) -> None:
    embed, copy, again = load(EMBED, COPY, EMBED)
    assert embed[:4] == copy[:4] == b"\x7fELF"
    assert b"embed" in embed
    assert b"copy_blocks" in copy
    assert again == embed
    assert sorted(watch.names) == ["copy_blocks.cu", "embed.cu"]
    assert load(COPY, EMBED) == [copy, embed]
    assert len(watch.names) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.usefixtures("folder")
def test_defines_architecture_and_compiler_make_another_file(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [*load(EMBED), *load(Source("embed", ("ELEMENT=__nv_bfloat16",))), *load(EMBED, architecture=80)]
    assert len(set(codes)) == len(watch.names) == 3
    other = Nvrtc(find_toolkit(12))
    other.version = "12.99"
    monkeypatch.setattr(cuda_modules, "open_compiler", lambda: other)
    load(EMBED)
    assert len(watch.names) == 4


@pytest.mark.usefixtures("folder")
def test_a_changed_header_makes_another_file(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(cuda_modules, "_kernel_folder", lambda: sources)
    (sources / "kernel.cu").write_text('#include "size.cuh"\nextern "C" __global__ void kernel(int* x) { *x = SIZE; }')
    for size in (1, 2, 1):
        (sources / "size.cuh").write_text(f"#define SIZE {size}")
        load(Source("kernel"))
    assert len(watch.names) == 2


def test_progress_counts_bytes_of_source(folder: Path) -> None:
    del folder
    seen: list[tuple[str, int, int]] = []
    modules = CudaModules(90, lambda *report: seen.append(report))
    modules.load([EMBED, COPY])
    whats, done, totals = zip(*seen, strict=True)
    assert set(whats) == {"Compiling 2 CUDA kernel files"}
    assert done[0] == 0
    assert done[-1] == totals[0]
    assert list(done) == sorted(set(done))
    seen.clear()
    modules.load([EMBED, COPY])
    assert seen == []


def test_what_progress_raises_ends_the_work(folder: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaModules(90, interrupt).load([EMBED])
    assert not folder.exists()


DAMAGES: list[Callable[[bytes], bytes]] = [lambda code: b"", lambda code: code[:-1], lambda code: b"?" + code[1:]]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(folder: Path, watch: Watch, damage: Callable[[bytes], bytes]) -> None:
    [code] = load(EMBED)
    [path] = folder.iterdir()
    path.write_bytes(damage(code))
    assert load(EMBED) == [code]
    assert len(watch.names) == 2
    assert load(EMBED) == [code]
    assert len(watch.names) == 2
    assert [path.read_bytes() for path in folder.iterdir()] == [code]


def test_a_cache_that_cannot_be_written_is_a_warning(
    folder: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("no folder")
    [code] = load(EMBED)
    assert code[:4] == b"\x7fELF"
    assert load(EMBED) == [code]
    assert len(watch.names) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "Set MINIPAGED_CACHE" in caplog.text


def test_a_user_without_a_home_has_no_cache(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cuda_modules, "user_cache_folder", no_home)
    [code] = load(EMBED)
    assert code[:4] == b"\x7fELF"
    assert "cannot be kept" in caplog.text
    assert not folder.exists()


def test_two_processes_at_once(folder: Path, tmp_path: Path) -> None:
    program = """
import sys, types
class Module:
    def __init__(self, path): self.path = path
    def compile(self): self.code = open(self.path, "rb").read()
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
cupy.RawModule = Module
from minipaged.ops.cuda import modules as cuda_modules
from minipaged.ops.cuda.nvrtc import Nvrtc, find_toolkit
cuda_modules.open_compiler = lambda: Nvrtc(find_toolkit(12))
[module] = cuda_modules.CudaModules(90, lambda *_: None).load([cuda_modules.Source("embed", ("ELEMENT=__half",))])
assert module.code[:4] == b"\\x7fELF"
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    [code] = load(EMBED)
    assert code[:4] == b"\x7fELF"
    assert {path.suffix for path in folder.iterdir()} == {".cubin"}


def test_an_old_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"compute capability 7\.5.*need 8\.0"):
        CudaModules(75, no_progress)


@pytest.mark.usefixtures("folder")
def test_a_gpu_newer_than_nvrtc_gets_ptx() -> None:
    newest = max(Nvrtc(find_toolkit(12)).architectures)
    [code] = load(EMBED, architecture=999)
    assert f".target sm_{newest}".encode() in code
    assert b".entry embed" in code
    assert code[-1] != 0


def test_targets() -> None:
    compiler = Nvrtc(find_toolkit(12))
    compiler.architectures = (80, 86, 90)
    assert [compiler.target(each) for each in (80, 86, 89, 90, 100)] == [
        "sm_80",
        "sm_86",
        "compute_86",
        "sm_90",
        "compute_90",
    ]
    with pytest.raises(DeviceError, match=r"no code for compute capability 7\.5"):
        compiler.target(75)


@pytest.mark.usefixtures("folder")
def test_a_source_that_does_not_compile_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"(?s)cannot compile embed\.cu.*no_such_type"):
        load(Source("embed", ("ELEMENT=no_such_type",)))


@pytest.mark.usefixtures("folder")
def test_what_the_driver_does_not_take_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: LoadedFile) -> None:
        raise sys.modules["cupy"].cuda.driver.CUDADriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(LoadedFile, "compile", refuse)
    with pytest.raises(DeviceError, match=r"does not take embed\.cu.*UNSUPPORTED_PTX_VERSION.*Update"):
        load(EMBED)


@pytest.mark.parametrize(
    ("major", "runtime", "compiler"),
    [(12, "nvidia-cuda-runtime-cu12", "nvidia-cuda-nvrtc-cu12"), (13, "nvidia-cuda-runtime", "nvidia-cuda-nvrtc")],
)
def test_a_missing_wheel_is_named(
    major: int, runtime: str, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(part: str, major: int) -> list[Path]:
        return [tmp_path / part]

    monkeypatch.setattr(nvrtc, "_wheel_folders", folders)
    monkeypatch.setattr(nvrtc, "_installed_toolkits", lambda: [])
    advice = rf"pip install 'minipaged\[cuda{major}\]'"
    with pytest.raises(DeviceError, match=rf"NVRTC.* wheel {compiler} is not installed. {advice}"):
        find_toolkit(major)
    library = tmp_path / "cuda_nvrtc" / "lib" / f"libnvrtc.so.{major}"
    library.parent.mkdir(parents=True)
    library.write_text("no library")
    with pytest.raises(DeviceError, match=rf"cuda_fp16\.h.* wheel {runtime} is not installed. {advice}"):
        find_toolkit(major)
    include = tmp_path / "cuda_runtime" / "include"
    include.mkdir(parents=True)
    for header in nvrtc.HEADERS:
        (include / header).touch()
    with pytest.raises(DeviceError, match=r"NVRTC cannot be loaded: .*libnvrtc"):
        Nvrtc(find_toolkit(major))


def test_an_installed_toolkit_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_wheel_folders", lambda part, major: [])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    for name in ("lib64/libnvrtc.so.13", *(f"include/{header}" for header in nvrtc.HEADERS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    toolkit = find_toolkit(13)
    assert toolkit.library == tmp_path / "lib64" / "libnvrtc.so.13"
    assert toolkit.include == tmp_path / "include"


def test_the_emulator_runs_what_was_compiled_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_cupy(Gpu()).items():
        monkeypatch.setitem(sys.modules, name, module)
    cupy = sys.modules["cupy"]
    compiler = use_fake_nvrtc(monkeypatch, tmp_path)
    modules = CudaModules(80, no_progress)
    [embed] = modules.load([EMBED])
    table = np.arange(32, dtype=np.float16).reshape(4, 8)
    out = cupy.empty((2, 8), np.float16)
    arguments = (cupy.asarray(table), cupy.asarray(np.array([3, 1], np.int32)), out, np.int32(8))
    embed.get_function("embed")((2,), (128,), arguments)
    assert (out.get() == table[[3, 1]]).all()
    modules.load([EMBED])
    assert compiler.compiled == ["embed.cu"]
