"""The order of the rooms: a module imports only from its own room and those below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minipaged

PACKAGE = Path(minipaged.__file__).parent

SCHEDULER = ("scheduler", "planner", "plan_draft", "in_flight", "waiting", "running", "preemption")
ROOMS = (
    ("server", "cli", "__main__"),
    ("llm",),
    ("engine_thread",),
    ("engine",),
    ("generation", "loading", "step_loop"),
    ("capacity", "devices", "event_loop", "submission", "token_stream", "worker"),
    (*SCHEDULER, "runner", "rows"),
    ("kv", "models", "sampling", "text"),
    ("ops",),
    ("step",),
    ("config", "settings", "request", "params", "output", "stats", "errors", "progress", "user_cache"),
)
"""From top to bottom, as in docs/architecture.md."""

RANKS = {name: rank for rank, names in enumerate(reversed(ROOMS)) for name in names}

EXCEPTIONS = {("request", "kv")}
"""A sequence carries its block table, which is plain data."""

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
            if node.module == "minipaged":
                found.update(f"minipaged.{alias.name}" for alias in node.names)
    return found


def room(dotted: str) -> str:
    return dotted.split(".")[1]


def test_every_module_has_a_room() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert rooms <= RANKS.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_rooms_below(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported_modules(path):
        if module.startswith("minipaged.") and room(module) in RANKS and (own, room(module)) not in EXCEPTIONS:
            assert RANKS[room(module)] <= RANKS[own], f"{path} imports {module}"


BOOKKEEPING = [*(PACKAGE / "kv").glob("*.py"), *(PACKAGE / f"{name}.py" for name in SCHEDULER)]


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
