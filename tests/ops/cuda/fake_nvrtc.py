"""A compiler for the fake GPU: its code is the source, which the fake CuPy gives to the emulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from minipaged.ops.cuda import modules as cuda_modules
from minipaged.ops.cuda.nvrtc import Compiled
from tests.ops.cuda.toolchain import headers


class FakeNvrtc:
    """`minipaged.ops.cuda.nvrtc.Nvrtc`."""

    def __init__(self) -> None:
        self.version = "emulated"
        self.include = headers()
        self.compiled: list[str] = []
        """Names of the sources, in the order in which they were compiled."""

    def target(self, architecture: int) -> str:
        return f"sm_{architecture}"

    def compile(self, source: str, name: str, target: str, options: Sequence[str]) -> Compiled:
        self.compiled.append(name)
        return Compiled(json.dumps([target, name, source, list(options)]).encode(), "")


def read_code(code: bytes) -> tuple[str, str, tuple[str, ...]]:
    """Name, source and options, as the emulator takes them."""
    _, name, source, options = json.loads(code)
    macros = (option.removeprefix("--define-macro=") for option in options if option.startswith("--define-macro="))
    return name, source, tuple(f"-D{macro}" for macro in macros)


def use_fake_nvrtc(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeNvrtc:
    """Let `CudaModules` compile with it, and keep its code in a folder."""
    compiler = FakeNvrtc()
    monkeypatch.setattr(cuda_modules, "open_compiler", lambda: compiler)
    monkeypatch.setattr(cuda_modules, "user_cache_folder", lambda: folder)
    return compiler
