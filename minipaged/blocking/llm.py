"""LLM: the engine for programs without an event loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack, cast

import anyio

from minipaged.blocking.engine_thread import EngineThread
from minipaged.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.submission import Prompt
from minipaged.engine.token_stream import TokenStream
from minipaged.errors import InvalidRequestError
from minipaged.models.config import ModelConfig
from minipaged.output import Completion, Token
from minipaged.params import SamplingParams
from minipaged.progress import Progress, no_progress
from minipaged.settings import EngineSettings
from minipaged.stats import EngineStats
from minipaged.text.chat import Message
from minipaged.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
"""One set of parameters for all prompts, or one for each of them."""

Start = Callable[[], TokenStream]
Advance = Callable[[], None]


class LLM:
    """A model that answers lists of prompts: an `Engine` on an event loop in a thread of its own.

        with LLM("path/to/model") as llm:
            for completion in llm.generate(["Why is the sky blue?", "Why is the sea salty?"]):
                print(completion.text)

    Every method blocks, and may be called from any thread, also by several at once: their requests share the batch.
    Interrupted by Ctrl-C, a method aborts its requests. The constructor loads the model; arguments and errors are those
    of `Engine.load`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._engine = Engine.load(model, config=config, progress=progress, **settings)
        self._thread = EngineThread(self._engine)
        weakref.finalize(
            self, self._thread.stop
        ).atexit = False  # an LLM that is still open then is closed all the same

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = True
    ) -> list[Completion]:
        """Complete prompts, as many at a time as fit; the completions come in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids, or a single one of either.
            params: for all, or one for each prompt.
            progress: draw a bar if standard error is a terminal.

        Raises what `Engine.generate` and `TokenStream` raise; the first error aborts the other prompts.
        """
        several = _several(prompts)
        starts = [
            partial(self._engine.generate, prompt, each)
            for prompt, each in zip(several, _one_each(params, len(several)), strict=True)
        ]
        return self._complete(starts, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer conversations, given as lists of messages, or a single one. Otherwise as `generate`."""
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        several = cast(Sequence[Sequence[Message]], [conversations] if single else conversations)
        starts = [
            partial(self._engine.chat, messages, each, tools=tools, template_variables=template_variables)
            for messages, each in zip(several, _one_each(params, len(several)), strict=True)
        ]
        return self._complete(starts, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Token, None, None]:
        """The tokens of one prompt as they come. Closing it, as leaving its loop does, aborts the request."""
        return self._tokens(partial(self._engine.generate, prompt, params))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> Generator[Token, None, None]:
        """The tokens of the answer to one conversation. Otherwise as `stream`."""
        start = partial(self._engine.chat, messages, params, tools=tools, template_variables=template_variables)
        return self._tokens(start)

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counts."""
        return self._thread.portal.call(self._engine.stats)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self._thread.portal.call(self._engine.reset_prefix_cache)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The shape of the model."""
        return self._engine.model_config

    def close(self) -> None:
        """Abort what is running, end the threads, free all memory. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokens(self, start: Start) -> Generator[Token, None, None]:
        stream = self._thread.portal.call(self._start, start)
        try:
            while (token := self._thread.portal.call(_next_token, stream)) is not None:
                yield token
        finally:
            self._thread.post(stream.abort)

    def _complete(self, starts: Sequence[Start], progress: bool) -> list[Completion]:
        with _progress_bar(len(starts), enabled=progress) as advance:
            future = self._thread.portal.start_task_soon(self._complete_all, starts, advance)
            try:
                return future.result()
            except BaseException:  # Ctrl-C, say
                future.cancel()
                raise

    async def _complete_all(self, starts: Sequence[Start], advance: Advance) -> list[Completion]:
        completions: dict[int, Completion] = {}
        errors: list[Exception] = []

        async def finish(index: int, stream: TokenStream) -> None:
            try:
                completions[index] = await stream.completion()
            except Exception as error:
                errors.append(error)
                group.cancel_scope.cancel()
            else:
                advance()

        async with anyio.create_task_group() as group:
            try:
                for index, start in enumerate(starts):
                    group.start_soon(finish, index, await self._start(start))
            except Exception as error:
                errors.append(error)
                group.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return [completions[index] for index in range(len(starts))]

    async def _start(self, start: Start) -> TokenStream:
        """Start a request when the queue has room."""
        await self._engine.wait_for_room()
        return start()


async def _next_token(stream: TokenStream) -> Token | None:
    return await anext(stream, None)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also where there is just one: a text, or numbers, which have no length."""
    if isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__")):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _one_each(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"There are {len(params)} SamplingParams for {count} prompts; give one, or one each.")
    return list(params)


@contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[Advance]:
    """A bar on standard error if that is a terminal; yields a function that counts one more."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task("Completions", total=total)
        yield partial(bar.advance, task)
