"""`minipaged chat`: a conversation."""

from __future__ import annotations

import re
import sys
from contextlib import closing, suppress

import typer

from minipaged.blocking.llm import LLM
from minipaged.cli.answer import Answer
from minipaged.cli.loading_bar import load
from minipaged.config import EngineConfig
from minipaged.errors import EngineDeadError, InvalidRequestError, MinipagedError, PromptTooLongError
from minipaged.params import SamplingParams

HELP = """\
/reset   forget the conversation and start over
/help    show this
/exit    leave (also Ctrl-D)
Ctrl-C   stop the answer"""


def run(*, model: str | None, config: EngineConfig, params: SamplingParams, system: str | None) -> None:
    """Take turns until the end of input. Without a terminal each line of standard input is a turn."""
    with load(model, config) as llm:
        if not llm.tokenizer.chat_templates:
            raise InvalidRequestError("This model has no chat template; it can only continue text: minipaged generate.")
        Chat(llm, params, system, interactive=sys.stdin.isatty() and sys.stdout.isatty()).run()


class Chat:
    """One conversation."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, interactive: bool) -> None:
        self._llm = llm
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)
        self._interactive = interactive

    def run(self) -> None:
        """Read a line, answer it, until the end of input or /exit."""
        if self._interactive:
            with suppress(ImportError):  # Windows' own console edits lines without it
                import readline  # noqa: F401 (gives input() line editing and history)
            self._tell("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while (line := self._read()) is not None:
            command = re.fullmatch(r"/[a-z]+", line)
            if command is None and line:
                self._answer(line)
            elif line in ("/exit", "/quit"):
                return
            elif line in ("/reset", "/clear"):
                self._messages = list(self._beginning)
                self._tell("A new conversation.")
            elif line == "/help":
                self._tell(HELP)
            elif command is not None:
                self._tell(f"There is no command {line}; /help lists them.")

    def _read(self) -> str | None:
        while True:
            try:
                return input("> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                self._tell("Ctrl-D or /exit leaves.")
            except UnicodeDecodeError as error:
                self._report(InvalidRequestError(f"The line is not {error.encoding} text ({error.reason})."))

    def _answer(self, text: str) -> None:
        """Answer a turn. One that fails, or is stopped before its first word, is as if it had not been."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = Answer()
        try:
            with closing(self._llm.stream_chat(messages, self._params)) as tokens:
                answer.write(tokens)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._tell("(stopped)")
        except MinipagedError as error:
            self._report(error)
            if isinstance(error, PromptTooLongError) and self._messages != self._beginning:
                self._tell("/reset starts a new conversation, which has room again.")
            return
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _report(self, error: MinipagedError) -> None:
        """A person can try again; a script, or a dead engine, cannot."""
        if not self._interactive or isinstance(error, EngineDeadError):
            raise error
        typer.secho(f"Error: {error}", fg="red", err=True)

    def _tell(self, text: str) -> None:
        typer.secho(text, dim=True, err=True)
