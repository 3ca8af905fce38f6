from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from minipaged.cli.app import app
from tests.cli.terminal import Terminal


def generate(*arguments: str, typed: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments, "--temperature", "0", "--max-tokens", "12"], input=typed)


def test_an_answer_goes_to_standard_output_and_nothing_else_does(model: str) -> None:
    result = generate("Why is the sky blue?", "--model", model)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert result.stdout.endswith("\n")
    assert result.stderr == ""


def test_the_chat_template_is_used_unless_raw(model: str) -> None:
    prompt = "Why is the sky blue?"
    chat = generate(prompt, "--model", model).stdout
    rendered = generate(f"<|user|>{prompt}<|assistant|>", "--raw", "--model", model).stdout
    raw = generate(prompt, "--raw", "--model", model).stdout
    assert chat == rendered
    assert chat != raw


def test_a_system_prompt_comes_first(model: str) -> None:
    with_system = generate("Why?", "--system", "the quick fox", "--model", model).stdout
    assert with_system == generate("<|system|>the quick fox<|user|>Why?<|assistant|>", "--raw", "--model", model).stdout


def test_a_model_without_chat_template_continues_the_prompt(base_model: str) -> None:
    plain = generate("The quick brown", "--model", base_model)
    assert plain.exit_code == 0, plain.output
    assert plain.stdout == generate("The quick brown", "--raw", "--model", base_model).stdout


def test_a_model_without_chat_template_takes_no_system_prompt(base_model: str) -> None:
    result = generate("The quick brown", "--system", "Be short.", "--model", base_model)
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


@pytest.mark.parametrize("typed", ["Why is the sky blue?\n", "Why is the sky blue?"])
def test_a_dash_reads_the_prompt_from_standard_input(model: str, typed: str) -> None:
    assert (
        generate("-", "--model", model, typed=typed).stdout == generate("Why is the sky blue?", "--model", model).stdout
    )


def test_standard_input_that_is_no_text_is_a_usage_error(model: str) -> None:
    result = generate("-", "--model", model, typed=b"\xff\xfe\xfd")
    assert result.exit_code == 2
    assert "not utf-8 text" in result.stderr


def test_the_same_seed_gives_the_same_answer(model: str) -> None:
    def answer(seed: str) -> str:
        arguments = ["generate", "Why?", "--model", model, "--temperature", "1.5", "--seed", seed, "-n", "12"]
        return CliRunner().invoke(app, arguments).stdout

    assert answer("1") == answer("1")
    assert answer("1") != answer("2")


def test_stop_texts_end_the_answer(model: str) -> None:
    whole = generate("Why?", "--model", model).stdout
    stop = whole.strip()[4:6]
    assert generate("Why?", "--model", model, "--stop", stop).stdout.rstrip("\n") == whole[: whole.index(stop)].rstrip(
        "\n"
    )


def test_nothing_on_standard_input_is_a_usage_error(model: str) -> None:
    result = generate("-", "--model", model, typed="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "empty" in result.stderr


def test_standard_input_that_is_no_text_is_a_usage_error_in_the_c_locale_too(model: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "minipaged", "generate", "-", "--model", model],
        input=b"\xff\xfe\xfd",
        capture_output=True,
        check=False,
        env=os.environ | {"LC_ALL": "C"},
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"not utf-8 text" in result.stderr


def test_a_prompt_longer_than_the_context_is_an_error(model: str) -> None:
    result = generate("the " * 300, "--model", model, "--kv-memory", "64KiB")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")


def test_memory_too_small_for_a_block_is_an_error(model: str) -> None:
    result = generate("Why?", "--model", model, "--kv-memory", "100B")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")


def test_ctrl_c_ends_the_command_with_status_130_and_no_traceback(model: str) -> None:
    with Terminal("generate", "The quick brown fox", "--model", model, "-t", "0", "-n", "90000") as terminal:
        terminal.expect(" ")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.screen


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    command = [sys.executable, "-m", "minipaged", "generate", "The quick", "--model", model, "-t", "0", "-n", "90000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_terminal_shows_no_trace_of_the_progress_bar_beside_the_answer(model: str) -> None:
    with Terminal("generate", "The quick brown fox", "--model", model, "-t", "0", "-n", "4") as terminal:
        assert terminal.wait() == 0
        assert "cut off" in terminal.screen


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("redirection", "exit_code", "message"),
    [
        ("- <&-", 2, "the prompt is empty"),
        ("Why? >&-", 0, ""),
        ("Why? 2>&-", 0, ""),
        pytest.param(
            "Why? >/dev/full",
            1,
            "Error: .*No space left",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full"),
        ),
    ],
)
def test_standard_streams_that_are_closed_or_full(model: str, redirection: str, exit_code: int, message: str) -> None:
    command = f"{sys.executable} -m minipaged generate --model {model} --max-tokens 2 {redirection}"
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code, result.stderr
    assert re.search(message, result.stderr)
    assert "Traceback" not in result.stderr
