"""What device="auto" and "cuda" do where something that CUDA needs is missing."""

from __future__ import annotations

import ctypes
import logging
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minipaged import DeviceError, EngineConfig
from minipaged.cli.app import app
from minipaged.engine.devices import with_device
from minipaged.ops.base import Array, Ops, Weight
from minipaged.ops.cuda import nvidia_driver, nvrtc
from tests.ops.cuda.fake_cupy import fake_cupy
from tests.ops.cuda.fake_driver import FakeDriver, use_fake_driver
from tests.ops.cuda.fake_gpu import Gpu

Patch = pytest.MonkeyPatch
LOAD_DRIVER = nvidia_driver.load_driver
"""The real one."""


def name_of(ops: Ops[Array, Weight]) -> str:
    return ops.name


def no_driver(patch: Patch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    patch.setattr("minipaged.ops.cuda.nvidia_driver.load_driver", LOAD_DRIVER)
    patch.setattr(ctypes, "CDLL", fail)


def no_gpu(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(num_gpus=0))


def hidden_gpu(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(init_status=100))
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


def no_cupy(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver())
    patch.setitem(sys.modules, "cupy", None)


def no_cupy_of_cuda_13(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(version=13020))
    patch.setitem(sys.modules, "cupy", None)


ABSENT: dict[Callable[[Patch], None], str] = {
    no_driver: r"There is no NVIDIA driver \(libcuda\.so\.1: cannot open",
    no_gpu: r"The NVIDIA driver finds no GPU\.$",
    hidden_gpu: r"finds no GPU\. CUDA_VISIBLE_DEVICES is '', which may hide it",
    no_cupy: r"There is a GPU \(NVIDIA Fake\), but CuPy.* not installed\. pip install 'minipaged\[cuda12\]'$",
    no_cupy_of_cuda_13: r"pip install 'minipaged\[cuda13\]'$",
}
"""A machine or environment that is not meant for CUDA."""


def with_cupy(patch: Patch, runtime_version: int = 12090) -> None:
    modules = fake_cupy(Gpu())
    vars(modules["cupy.cuda.runtime"])["runtimeGetVersion"] = lambda: runtime_version
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)


def broken_driver(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(init_status=803))


def unexplained_driver(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(init_status=999))


def forked_process(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(init_status=3))


def old_driver(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(version=11040))


def driver_older_than_cupy(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(version=12040))
    with_cupy(patch, runtime_version=13000)


def old_gpu(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver(capability=(7, 5)))


def broken_cupy(patch: Patch) -> None:
    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: types.ModuleType | None = None) -> None:
            if name == "cupy":
                raise ImportError("libcudart.so.12: cannot open shared object file")

    use_fake_driver(patch, FakeDriver())
    patch.delitem(sys.modules, "cupy", raising=False)
    patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def no_nvrtc(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver())
    with_cupy(patch)
    patch.setattr(nvrtc, "_wheel_folders", lambda part, major: [])
    patch.setattr(nvrtc, "_installed_toolkits", lambda: [])


def no_headers(patch: Patch) -> None:
    use_fake_driver(patch, FakeDriver())
    with_cupy(patch)
    folders = nvrtc._wheel_folders
    patch.setattr(nvrtc, "_wheel_folders", lambda part, major: folders(part, major) if part == "cuda_nvrtc" else [])
    patch.setattr(nvrtc, "_installed_toolkits", lambda: [])


BROKEN: dict[Callable[[Patch], None], str] = {
    broken_driver: r"driver does not work: system has unsupported driver \(error 803\)",
    unexplained_driver: r"driver does not work: unknown error \(error 999\)",
    forked_process: r"\(error 3\)\. A process that was forked from one that has used CUDA cannot use it",
    old_driver: r"driver is too old: it takes code of CUDA 11\.4.*Update the driver",
    driver_older_than_cupy: r"takes code of CUDA 12\.4, but CuPy .* CUDA 13.*pip install 'minipaged\[cuda12\]'",
    old_gpu: r"compute capability 7\.5; minipaged's kernels need 8\.0",
    broken_cupy: r"CuPy cannot be imported: libcudart\.so\.12.*pip install 'minipaged\[cuda12\]'",
    no_nvrtc: r"wheel nvidia-cuda-nvrtc-cu12 is not installed. pip install 'minipaged\[cuda12\]'",
    no_headers: r"wheel nvidia-cuda-runtime-cu12 is not installed. pip install 'minipaged\[cuda12\]'",
}
"""A machine that is meant for CUDA, where something is wrong."""


@pytest.mark.parametrize(("arrange", "message"), (ABSENT | BROKEN).items())
def test_cuda_fails_with_what_is_missing(
    arrange: Callable[[Patch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    arrange(monkeypatch)
    with pytest.raises(DeviceError, match=message):
        with_device(EngineConfig(device="cuda"), name_of)


@pytest.mark.parametrize(("arrange", "level"), [(no_cupy, logging.INFO), (no_nvrtc, logging.WARNING)])
def test_auto_takes_the_cpu_and_says_why_in_one_line(
    arrange: Callable[[Patch], None], level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arrange(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert with_device(EngineConfig(), name_of) == "cpu"
    [record] = caplog.records
    assert record.levelno == level
    assert record.message.startswith("Running on the CPU")
    assert (ABSENT | BROKEN)[arrange].split(" ")[-1].replace("\\", "").rstrip("$") in record.message
    assert "\n" not in record.message


def test_info_tells_the_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        result = CliRunner().invoke(app, ["info", str(tiny_model)])
        return next(line for line in result.stdout.splitlines() if line.startswith("GPU "))

    assert "none. There is no NVIDIA driver" in shown()
    use_fake_driver(monkeypatch, FakeDriver())
    with_cupy(monkeypatch)
    assert shown().endswith("NVIDIA Fake, 80 GiB, compute capability 8.0")
