from __future__ import annotations

from typer.testing import CliRunner, Result

from minipaged.cli.app import app
from tests.cli.terminal import Terminal

OPTIONS = ("--temperature", "0", "--max-tokens", "12")


def chat(typed: str | bytes, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments, *OPTIONS], input=typed)


def answer(prompt: str, model: str) -> str:
    return CliRunner().invoke(app, ["generate", "--raw", prompt, "--model", model, *OPTIONS]).stdout


def test_without_a_terminal_each_line_is_a_turn_and_only_answers_are_printed(model: str) -> None:
    result = chat("Why?\n\nHow?\n", "--model", model)
    assert result.exit_code == 0, result.output
    first = answer("<|user|>Why?<|assistant|>", model)
    said = first.removesuffix("\n")
    second = answer(f"<|user|>Why?<|assistant|>{said}<|eos|><|user|>How?<|assistant|>", model)
    assert result.stdout == first + second


def test_reset_forgets_all_but_the_system_prompt(model: str) -> None:
    result = chat("Why?\n/reset\nWhy?\n/clear\nWhy?\n", "--model", model, "--system", "the fox")
    assert result.stdout == 3 * answer("<|system|>the fox<|user|>Why?<|assistant|>", model)


def test_exit_leaves_at_once(model: str) -> None:
    result = chat("/exit\nWhy?\n", "--model", model)
    assert (result.exit_code, result.stdout) == (0, "")


def test_help_and_unknown_commands_answer_without_the_model(model: str) -> None:
    result = chat("/help\n/unknown\n", "--model", model)
    assert result.stdout == ""
    assert "/reset" in result.stderr
    assert "no command /unknown" in result.stderr


def test_a_line_that_only_begins_like_a_command_is_a_turn(model: str) -> None:
    result = chat("/etc/hosts, what is it?\n", "--model", model)
    assert result.stdout == answer("<|user|>/etc/hosts, what is it?<|assistant|>", model)


def test_a_model_without_chat_template_says_what_works(base_model: str) -> None:
    result = chat("Why?\n", "--model", base_model)
    assert result.exit_code == 1
    assert "minipaged generate" in result.stderr


def test_input_that_is_no_text_is_an_error(model: str) -> None:
    result = chat(b"Why?\n\xff\n", "--model", model)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: The line is not utf-8 text")


def test_ctrl_c_stops_the_answer_and_not_the_program(model: str) -> None:
    with Terminal("chat", "--model", model, "--temperature", "0", "--max-tokens", "90000") as terminal:
        terminal.expect("> ")
        terminal.type("The quick brown fox\n")
        terminal.expect("fox")
        terminal.expect(" ")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.interrupt_until("leaves")
        terminal.expect("> ")
        terminal.type("/reset\n")
        terminal.expect("A new conversation.")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.screen


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model: str) -> None:
    with Terminal("chat", "--model", model, *OPTIONS, "--kv-memory", "64KiB") as terminal:
        terminal.expect("> ")
        terminal.type("the " * 300 + "\n")
        terminal.expect("Error: ")
        terminal.expect("> ")
        terminal.type("Why?\n")
        terminal.expect(answer("<|user|>Why?<|assistant|>", model).strip()[:4])
        terminal.expect("> ")
        assert "/reset" not in terminal.screen
        terminal.type("the " * 300 + "\n")
        terminal.expect("Error: ")
        terminal.expect("/reset starts a new conversation")
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
