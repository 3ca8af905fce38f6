"""The project's own promises: what README says, what the wheel must hold."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import minipaged

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_readme_has_one_command_to_run_and_one_to_test_which_ci_runs_as_they_stand() -> None:
    run, test = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert "minipaged generate" in run
    assert test.endswith("-m pytest")
    assert "grep '^python3 -m venv ' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_in_readme_is_python_and_imports_public_names(block: str) -> None:
    tree = compile(block, "README.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "minipaged"]
    for name in [alias.name for node in imports for alias in node.names]:
        assert name in minipaged.__all__


def test_links_in_readme_and_docs_lead_to_files() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_wheel_holds_the_kernels_and_the_type_marker() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        shipped = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    assert shipped["minipaged"] == ["py.typed"]
    kinds = {f"*{path.suffix}" for path in (ROOT / "cuda").rglob("*") if path.is_file()}
    assert kinds <= set(shipped["minipaged.cuda"])
