"""Which operations an engine runs on, with and without compiled kernels."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import anyio
import pytest

from minipaged import ConfigError, DeviceError, Engine, EngineConfig, SamplingParams
from minipaged.engine.devices import with_device
from minipaged.ops.base import Array, Ops, Weight


def name_of(ops: Ops[Array, Weight]) -> str:
    return ops.name


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler was found when minipaged was installed."""
    monkeypatch.setitem(sys.modules, "minipaged.ops.cpu._kernels", None)
    for name in ("ops", "commands"):
        monkeypatch.delitem(sys.modules, f"minipaged.ops.cpu.{name}", raising=False)
    monkeypatch.delattr("minipaged.ops.cpu._kernels", raising=False)


def test_without_a_gpu_the_cpu_kernels_are_the_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert with_device(EngineConfig(), name_of) == "cpu"
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == "Running on the CPU. There is no NVIDIA driver (hidden from the tests)."
    assert with_device(EngineConfig(device="cpu", num_threads=1), name_of) == "cpu"
    assert with_device(EngineConfig(device="reference"), name_of) == "reference"


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_the_reference_runs_and_one_line_says_so(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Engine.load(tiny_model, num_blocks=16) as engine:
            completion = await engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)).completion()
            assert completion.usage.completion_tokens == 3

    anyio.run(main)
    [record] = [record for record in caplog.records if record.name.startswith("minipaged")]
    assert record.levelno == logging.WARNING
    assert "slower reference operations" in record.message
    assert "\n" not in record.message


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_the_cpu_device_is_an_error(tiny_model: Path) -> None:
    async def main() -> None:
        with pytest.raises(DeviceError, match=r"not built.*compiler"):
            async with Engine.load(tiny_model, device="cpu", num_blocks=16):
                pass

    anyio.run(main)


def test_too_many_threads_are_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.ops.cpu import _kernels

    def fail(num_threads: int) -> None:
        raise OSError(f"cannot start {num_threads} threads")

    monkeypatch.setattr(_kernels, "create_team", fail)
    with pytest.raises(DeviceError, match="cannot start 5 threads; give a smaller num_threads"):
        with_device(EngineConfig(device="cpu", num_threads=5), name_of)


def test_what_the_cpu_kernels_cannot_compute_is_refused_before_weights_are_read(tiny_model: Path) -> None:
    seen: list[str] = []

    def note(what: str, done: int, total: int) -> None:
        seen.append(what)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"block_size 128; the CPU kernels take at most 256 and 64\. Give"):
            async with Engine.load(tiny_model, device="cpu", block_size=128, num_blocks=16, progress=note):
                pass

    anyio.run(main)
    assert "Loading weights" not in seen
