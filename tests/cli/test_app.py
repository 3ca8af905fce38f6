from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import minipaged
from minipaged.cli.app import app


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"minipaged {minipaged.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["generate", "--help"], ["chat", "-h"], ["info", "-h"]])
def test_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from minipaged.cli.app import app\n"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0\n"
        "print([name for name in ('numpy', 'tokenizers', 'jinja2', 'anyio', 'huggingface_hub') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_python_m_runs_the_same_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "minipaged", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"minipaged {minipaged.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate"], "PROMPT"),
        (["info", "--kv-memory", "2XB"], "amount of memory"),
        (["generate", "hi", "--device", "abacus"], "abacus"),
        (["generate", "hi", "--raw", "--system", "Be short."], "--raw"),
        (["generate", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "hi", "--seed", "-1"], "--seed"),
        (["generate", "hi", "--top-p", "1.5"], "--top-p"),
        (["generate", ""], "empty"),
        (["generate", "--raw", ""], "empty"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "hi", "--top-p", "0"], "top_p"),
        (["generate", "hi", "--stop", ""], "stop"),
        (["generate", "hi", "--model", "./nothing/here"], "no such file or folder"),
        (["chat", "--model", "./nothing/here"], "no such file or folder"),
        (["info", "./nothing/here"], "no such file or folder"),
    ],
)
def test_an_error_is_one_line_without_traceback(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
