"""The order of the rooms, which are the folders: a module imports only from its own room and those below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minipaged

PACKAGE = Path(minipaged.__file__).parent

FLOORS = (
    ("cli", "server"),
    ("blocking",),
    ("engine",),
    ("execution", "scheduling"),
    ("text",),
    ("models.files",),
    ("models.architectures",),
    ("models",),
    ("ops.cpu", "ops.cuda"),
    ("ops.reference",),
    ("ops",),
    ("kv",),
    ("vocabulary",),
)
"""The folders of the package, from top to bottom; the vocabulary is the files that lie in none of them."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(reversed(FLOORS)) for room in rooms}

ARRAY_LIBRARIES = {"numpy", "cupy", "ml_dtypes"}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def room_of(path: Path) -> str:
    """The folder that a module lies in, dotted."""
    return ".".join(path.relative_to(PACKAGE).parts[:-1]) or ("cli" if path.name == "__main__.py" else "vocabulary")


def path_of(module: str) -> Path | None:
    """The file of one of the package's own modules; None for anything else."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path.with_suffix(".pyi"))
    return next((file for file in candidates if file.is_file()), None) if module.startswith("minipaged.") else None


def test_every_module_has_a_room() -> None:
    assert {room_of(path) for path in modules()} <= FLOOR_OF.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_room_and_from_floors_below(path: Path) -> None:
    own = room_of(path)
    for module in imported_modules(path):
        imported = path_of(module)
        if imported is not None and room_of(imported) != own:
            assert FLOOR_OF[room_of(imported)] < FLOOR_OF[own], f"{path} imports {module}"


BOOKKEEPING = [path for room in ("kv", "scheduling") for path in (PACKAGE / room).glob("*.py")]


@pytest.mark.parametrize("path", BOOKKEEPING, ids=lambda path: path.name)
def test_bookkeeping_imports_no_array_library(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported_modules(path)} & ARRAY_LIBRARIES


LAZY = {"gguf", "huggingface_hub", "jinja2", "rich", "safetensors", "tokenizers", "typer"}
"""Libraries that not every use of the engine needs, or not at once."""


def imported_by(statement: str) -> set[str]:
    """Top-level modules that are in memory after a statement."""
    program = f"{statement}\nimport sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_minipaged_imports_nothing_heavy() -> None:
    assert not imported_by("import minipaged") & {"anyio", "cupy", "numpy", *LAZY}


def test_the_engine_is_imported_without_what_it_may_not_need() -> None:
    assert not imported_by("from minipaged import Engine, LLM") & {"cupy", *LAZY}


def test_public_names() -> None:
    for name in minipaged.__all__:
        assert getattr(minipaged, name).__name__ == name or name == "FinishReason"
    assert set(minipaged.__all__) <= set(dir(minipaged))
    with pytest.raises(AttributeError, match="no_such_name"):
        minipaged.no_such_name  # noqa: B018
