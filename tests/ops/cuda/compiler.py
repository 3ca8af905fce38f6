"""Compiles CUDA source for the emulator: preprocess, rewrite shared memory, list the kernels, compile, link.

Libraries are cached by content: a second run compiles nothing, and parallel processes do not disturb each other.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.ops.cuda.toolchain import CUDA, EMULATOR, headers

CHECKED = (
    "-O1",
    "-DEMULATOR_CHECKED",
    "-fsanitize=thread,alignment,null,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "--param=tsan-instrument-func-entry-exit=0",
)
"""The compiler calls the emulator at each access to memory; no sanitiser is linked."""

FAST = ("-O2",)
COMMON = ("-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-threadsafe-statics")

DYNAMIC_SHARED = re.compile(
    r"extern\s+CUDA_SHARED\s+(?:__attribute__\(\(aligned\(\w+\)\)\)\s*)?(?P<type>[\w:]+(?:\s+\w+)*?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
STATIC_SHARED = re.compile(
    r"CUDA_SHARED\s+(?:__attribute__\(\(aligned\((?P<alignment>\w+)\)\)\)\s*)?(?P<type>[\w:]+(?:<[^;{}]*?>)?(?:\s+\w+)*?)"
    r"\s+(?P<name>\w+)\s*(?P<extents>(?:\[[^\[\];]*\])*)\s*;"
)
BOUNDS = r"CUDA_BOUNDS\[(?P<bounds>[^\]]*)\]"
KERNEL = re.compile(rf'extern\s+"C"\s+CUDA_GLOBAL\s+void\s+(?:{BOUNDS}\s*)?(?P<name>\w+)\s*\(')


class CompilationError(Exception):
    """g++ does not take the source, or the source uses what the emulator cannot rewrite."""


def compile_source(source: str, name: str, options: Sequence[str], *, checked: bool) -> Path:
    """The shared library of a CUDA source, called `name` in messages. `options` are -D and -I."""
    flags = (*COMMON, *(CHECKED if checked else FAST))
    library = cache() / f"{Path(name).stem}-{_digest(name, source, *flags, *options)}.so"
    if not library.exists():
        precompiled = _precompiled(flags)
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            _build(source, name, [*flags, *options, f"-I{precompiled}"], library, Path(folder))
    return library


def cache() -> Path:
    """Where compiled code is kept; it may be deleted at any time that no test runs."""
    root = os.environ.get("MINIPAGED_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "minipaged-cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(source: str, name: str, flags: Sequence[str], library: Path, folder: Path) -> None:
    main = folder / name
    main.write_text(source, encoding="utf-8")
    flags = [*flags, f"-ffile-prefix-map={folder}/="]
    language = ["-fpch-preprocess", "-include", "language.h"]
    text = _run(["g++", "-E", *flags, *_includes(), *language, "-x", "c++", str(main)], name)
    kernels = {match["name"]: match["bounds"] or "" for match in KERNEL.finditer(text)}
    if not kernels:
        raise CompilationError(f'{name}: there is no kernel declared as extern "C" __global__ void')
    table = "".join(
        f'emulator::Describe<&{kernel}>::as("{kernel}", emulator::most_threads({bounds})), '
        for kernel, bounds in kernels.items()
    )
    entry = (
        'extern "C" __attribute__((visibility("default"))) const emulator::Kernel* emulator_kernels() '
        f"{{ static const emulator::Kernel kernels[] = {{ {table}{{}} }}; return kernels; }}"
    )
    unit = folder / "kernel.ii"
    unit.write_text(rewrite(text, name) + entry, encoding="utf-8")
    compiled = folder / "kernel.o"
    _run(["g++", *flags, "-w", "-c", str(unit), "-o", str(compiled)], name)
    linked = folder / "kernel.so"
    link = ["g++", "-shared", "-Wl,-Bsymbolic", str(compiled), *map(str, _emulator_objects()), "-o", str(linked)]
    _run(link, name)
    linked.replace(library)


def rewrite(text: str, name: str) -> str:
    """Preprocessed text with its declarations of shared memory turned into calls of the emulator."""
    text = DYNAMIC_SHARED.sub(r"\g<type>* const \g<name> = static_cast<\g<type>*>(emulator::dynamic_shared());", text)
    text = STATIC_SHARED.sub(_static_shared, text)
    left = re.search(r"CUDA_SHARED[^;]*;", text)
    if left is not None:
        raise CompilationError(
            f"{name}: one shared variable per statement, aligned with __align__ if at all: {left.group()}"
        )
    return re.sub(rf"CUDA_GLOBAL|{BOUNDS}", "", text)


def _static_shared(match: re.Match[str]) -> str:
    kind, name = f"std::type_identity_t<{match['type']} {match['extents']}>", match["name"]
    alignment = match["alignment"] or f"alignof({match['type']})"
    return (
        f"static constexpr char {name}_key = 0; auto& {name} = "
        f"*static_cast<{kind}*>(emulator::static_shared(&{name}_key, sizeof({kind}), {alignment}));"
    )


def _precompiled(flags: Sequence[str]) -> Path:
    """A folder with language.h as g++ reads it fastest: it and NVIDIA's headers take longer than most kernels."""
    folder = cache() / f"language-{_digest(*flags)}"
    header = folder / "language.h.gch"
    if not header.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as temporary:
            output = Path(temporary) / header.name
            language = ["-w", "-x", "c++-header", str(EMULATOR / "language.h")]
            _run(["g++", *flags, *_includes(), *language, "-o", str(output)], "language.h")
            folder.mkdir(exist_ok=True)
            output.replace(header)
    return folder


def _emulator_objects() -> list[Path]:
    """The emulator's own code, compiled once and linked into every library."""
    objects = []
    for source in sorted(EMULATOR.glob("*.cpp")):
        compiled = cache() / f"{source.stem}-{_digest()}.o"
        if not compiled.exists():
            with tempfile.TemporaryDirectory(dir=cache()) as folder:
                output = Path(folder) / "emulator.o"
                _run(["g++", *COMMON, "-O2", *_includes(), "-c", str(source), "-o", str(output)], source.name)
                output.replace(compiled)
        objects.append(compiled)
    return objects


def _digest(*parts: str) -> str:
    """Names these parts and what goes into every library."""
    digest = hashlib.sha256()
    for part in (_fingerprint(), *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


@functools.cache
def _fingerprint() -> str:
    """Of all that goes into every library: the emulator, the headers of the kernels, the compiler."""
    digest = hashlib.sha256(_run(["g++", "--version"], "g++").encode())
    digest.update(str(headers()).encode())
    for path in sorted([*EMULATOR.rglob("*.h"), *EMULATOR.rglob("*.cpp"), *CUDA.glob("*.cuh"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _includes() -> list[str]:
    return [f"-I{EMULATOR / 'include'}", f"-I{EMULATOR}", f"-I{CUDA}", f"-I{headers()}", f"-ffile-prefix-map={CUDA}/="]


def _run(command: Sequence[str], name: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise CompilationError(f"{name}: {finished.stderr.strip()[:4000]}")
    return finished.stdout
