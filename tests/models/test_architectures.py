"""The registry of architectures: complete, and asked instead of names."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import minipaged
from minipaged.models import architectures
from minipaged.models.architecture import Architecture
from minipaged.models.architectures.registry import ARCHITECTURES, GGUF_ARCHITECTURES

PACKAGE = Path(minipaged.__file__).parent


def test_every_module_of_the_folder_is_an_architecture_of_the_registry() -> None:
    names = {path.stem for path in Path(architectures.__path__[0]).glob("*.py")} - {"__init__", "registry"}
    assert names == ARCHITECTURES.keys()
    for name in names:
        module = import_module(f"minipaged.models.architectures.{name}")
        assert [value for value in vars(module).values() if isinstance(value, Architecture)] == [ARCHITECTURES[name]]


def test_gguf_files_name_one_architecture_each() -> None:
    named = [each.gguf.architecture for each in ARCHITECTURES.values() if each.gguf is not None]
    assert len(named) == len(set(named))
    assert GGUF_ARCHITECTURES.keys() == set(named)


def test_nothing_asks_for_an_architecture_by_name() -> None:
    for path in [*(PACKAGE / "models").rglob("*.py"), *(PACKAGE / "engine").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not constants & ARCHITECTURES.keys(), f"{path}:{node.lineno} asks for an architecture by name"
