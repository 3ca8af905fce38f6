"""What ptxas says of the kernels when NVRTC compiles them."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minipaged.ops.cuda.nvrtc import Nvrtc, find_toolkit
from tests.ops.cuda.compiler import cache
from tests.ops.cuda.toolchain import CUDA

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, of Ampere, Ada, Hopper and Blackwell."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes of a multiprocessor."""

    registers: int
    """Per thread."""
    shared: int
    """Bytes of static shared memory per block."""
    spills: int
    """Bytes of registers kept in memory instead, stores and loads."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a kernel may take, by the comment on top of its file."""

    registers: int
    shared: int


BUDGET = re.compile(r"^// Budget: (\S+): (\d+) registers, (\d+) bytes of shared memory$", re.MULTILINE)

ENTRY = re.compile(
    r"Function properties for (?P<name>\w+)\n"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*?Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)


def budgets(source: str) -> dict[str, Budget]:
    """By pattern of the names of kernels, as in fnmatch."""
    return {name: Budget(int(registers), int(shared)) for name, registers, shared in BUDGET.findall(source)}


def compile_for(source: str, name: str, options: Sequence[str], architecture: int) -> dict[str, Resources]:
    """The kernels of a source and what they take. Raises NvrtcError. What ptxas said is cached by content."""
    compiler = Nvrtc(find_toolkit(12))
    flags = ["--ptxas-options=-v", f"--include-path={CUDA}", *options]
    digest = hashlib.sha256(f"{compiler.version} {architecture}".encode())
    for part in (source, *flags, *(path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cuh")))):
        digest.update(part.encode() + b"\0")
    cached = cache() / f"{digest.hexdigest()[:24]}.log"
    if cached.exists():
        log = cached.read_text(encoding="utf-8")
    else:
        log = compiler.compile(source, name, f"sm_{architecture}", flags).log
        with tempfile.NamedTemporaryFile("w", dir=cache(), delete=False, encoding="utf-8") as file:
            file.write(log)
        Path(file.name).replace(cached)
    return {
        match["name"]: Resources(
            int(match["registers"]), int(match["shared"] or 0), int(match["stores"]) + int(match["loads"])
        )
        for match in ENTRY.finditer(log)
    }
