"""Engine: load a model, generate, stream, close."""

from __future__ import annotations

import copy
import traceback
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

import anyio

from minipaged.config import EngineConfig
from minipaged.engine.capacity import Capacity
from minipaged.engine.event_loop import EventLoop, current_event_loop
from minipaged.engine.generation import Generation
from minipaged.engine.loading import LoadedModel, load_model
from minipaged.engine.step_loop import StepLoop
from minipaged.engine.submission import Prompt, Submission, check_params, check_prompt_ids, check_text
from minipaged.engine.token_stream import Outbox, TokenStream
from minipaged.engine.worker import Worker
from minipaged.errors import EngineBusyError, EngineDeadError, InvalidRequestError, RequestAbortedError, RequestError
from minipaged.models.config import ModelConfig
from minipaged.params import SamplingParams
from minipaged.progress import Progress, no_progress
from minipaged.scheduling.request import Request
from minipaged.scheduling.scheduler import Scheduler
from minipaged.settings import EngineSettings, merge_settings
from minipaged.stats import EngineStats
from minipaged.text.chat import Message
from minipaged.text.tokenizer import Tokenizer

T = TypeVar("T")

Loader = Callable[[EngineConfig, Progress], LoadedModel]
"""Loads the model; called once, on the worker thread."""


@dataclass(frozen=True, slots=True)
class _Threads:
    """The event loop and the threads of a started engine."""

    event_loop: EventLoop
    step_worker: Worker
    text_worker: Worker
    """Encodes prompts, in order of arrival."""


class Engine:
    """A model, its KV cache and a worker thread, serving any number of requests at once.

        async with Engine.load("path/to/model") as engine:
            async for token in engine.generate("Why is the sky blue?"):
                print(token.text, end="", flush=True)

    Works under asyncio (uvloop too) and trio. An engine belongs to the event loop that it was started in: call it only
    there (`LLM` can be used from any thread). A program may have several engines.
    """

    def __init__(self, config: EngineConfig, loader: Loader, progress: Progress = no_progress) -> None:
        """Meant for tests and extensions; everyone else calls `Engine.load`."""
        self.config = config
        """The settings as given; see `capacity` for what they came to."""
        self._loader = loader
        self._progress = progress
        self._loaded: LoadedModel | None = None
        self._step_loop: StepLoop | None = None
        self._threads: _Threads | None = None
        self._refusal: str | None = "has not been started; use it in `async with`"
        self._closed: anyio.Event | None = None  # exists from the first close() on
        self._num_submitted = 0

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """An engine that loads a model when entered with `async with`.

        Args:
            model: a folder in Hugging Face layout, a .gguf file, a name on the Hugging Face hub ("org/repo"), or None
                for the default model, which is downloaded once.
            config: the settings.
            progress: told of downloading and loading, on the engine's worker thread.
            settings: single fields of `EngineConfig`; they take precedence over `config`.

        Raises:
            ConfigError: a setting is unknown or out of range. On entering: settings do not fit the model.
            ModelLoadError: on entering: the model cannot be found or read, or is damaged.
            DeviceError: on entering: the device cannot be used, or has too little memory.
        """
        return cls(merge_settings(config, settings), partial(load_model, model), progress)

    # Lifecycle

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model, without holding up the event loop. Once only; `async with` calls it. Raises as `load`."""
        if self._threads is not None or self._closed is not None:
            raise EngineDeadError("An engine is started only once; make another with Engine.load.")
        loop = current_event_loop()
        self._threads = _Threads(
            event_loop=loop,
            step_worker=Worker("minipaged-steps", loop.post),
            text_worker=Worker("minipaged-text", loop.post),
        )
        self._refusal = "is still loading its model"
        try:
            await self._threads.step_worker.run(self._load)
            self._step_loop = self._make_step_loop(self._threads)
        except BaseException:  # loading failed, or this task was cancelled
            await self.close()
            raise
        self._refusal = None

    async def drain(self) -> None:
        """Accept no more requests, and wait until those accepted have ended. Raises `EngineDeadError` if it fails."""
        step_loop = self._running()
        self._refusal = "is draining and accepts no more requests"
        await step_loop.wait_until(lambda: step_loop.idle)

    async def close(self) -> None:
        """Abort what is running, end the threads, free all memory. `async with` calls it. Idempotent.

        Requests that have not ended raise `RequestAbortedError`. Waits for the step in progress; not cancellable.
        """
        self._check_event_loop()
        with anyio.CancelScope(shield=True):
            if self._closed is not None:
                await self._closed.wait()
                return
            self._closed = anyio.Event()
            self._refusal = "was closed"
            try:
                await self._free()
            finally:
                self._closed.set()

    # Requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Queue a request and return its stream at once; a text is encoded on a thread of its own.

        Args:
            prompt: a text, encoded with the special tokens that the model wants, or token ids, taken as they are.
            params: how tokens are chosen; by default one sample at temperature 1.
            request_id: a name that no unfinished request has; by default a random one.
            priority: lower is served first and preempted last.
            deadline: seconds from now after which the request ends with `RequestTimeoutError`; looked at between steps.
            cache_salt: only requests with the same one share cached prompt beginnings.

        Raises:
            InvalidRequestError: an argument is out of its range, or the id is taken.
            PromptTooLongError: the token ids can never fit. A text's error comes out of the stream.
            EngineBusyError: `max_waiting` requests are waiting already.
            EngineDeadError: the engine is not running.
        """
        submission = self._submission(params, request_id, priority, deadline, cache_salt)
        with _naming(submission.id):
            if isinstance(prompt, str):
                check_text(prompt)
                return self._submit_text(submission, partial(self.tokenizer.encode, prompt))
            ids = check_prompt_ids(prompt, self.model_config.vocab_size)
            generation = self._register(submission)
            try:
                self._running().start(generation, self._request(generation, ids))
            except Exception as error:
                generation.fail(error)
                raise
            return self._stream(generation)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """The same as `generate` for a conversation, rendered by the model's chat template.

        Args:
            messages: "role" and "content" each.
            params: as for `generate`.
            tools: JSON schemas of functions that the model may call.
            template: the name of a chat template, if the model has several.
            template_variables: more variables for the template, such as `enable_thinking`.
            add_generation_prompt: end with the words after which the assistant speaks.
            request_id: as for `generate`, like the other arguments.
            priority: lower is served first.
            deadline: seconds from now.
            cache_salt: only requests with the same one share cached prompt beginnings.

        Raises:
            InvalidRequestError: as for `generate`; what the template refuses comes out of the stream.
            EngineBusyError: as for `generate`.
            EngineDeadError: as for `generate`.
        """
        submission = self._submission(params, request_id, priority, deadline, cache_salt)
        tokenizer, chat_template = self._model.tokenizer, self._model.chat_template

        def encode() -> list[int]:
            text = chat_template.render(
                copies[0],
                add_generation_prompt=add_generation_prompt,
                tools=copies[1],
                template=template,
                variables=copies[2],
            )
            return tokenizer.encode_chat(text)

        with _naming(submission.id):
            # The caller may append the answer to its list before the template is rendered.
            copies = _copied((messages, tools, template_variables))
            return self._submit_text(submission, encode)

    def abort(self, request_id: str) -> bool:
        """End a request; its stream ends too, without an error. Returns whether there was an unfinished one."""
        step_loop = self._running()
        generation = step_loop.find(request_id)
        if generation is None:
            return False
        generation.abort(step_loop.clock())
        return True

    async def wait_for_room(self) -> None:
        """Wait until the queue has room, so that `generate`, called next, raises no `EngineBusyError`."""
        step_loop = self._running()
        await step_loop.wait_until(lambda: step_loop.num_waiting < self.config.max_waiting)

    # What there is to know

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The shape of the model."""
        return self._model.model_config

    @property
    def device(self) -> str:
        """What the engine runs on: "cuda", "cpu" or "reference"."""
        return self._model.device

    @property
    def capacity(self) -> Capacity:
        """KV blocks, the longest sequence and the largest step."""
        return self._model.capacity

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counts."""
        step_loop = self._running()
        return replace(step_loop.scheduler.stats(), waiting=step_loop.num_waiting)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings; running requests keep their blocks."""
        self._running().scheduler.reset_prefix_cache()

    # Details

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineDeadError(f"The engine {self._refusal}.")
        return self._loaded

    def _running(self) -> StepLoop:
        """The step loop, failed or not, of an engine that is started and not closed."""
        if self._step_loop is None:
            raise EngineDeadError(f"The engine {self._refusal}.")
        self._check_event_loop()
        return self._step_loop

    def _check_event_loop(self) -> None:
        if self._threads is not None and not self._threads.event_loop.is_here():
            raise RuntimeError(
                "An engine can be used only in the event loop that it was started in; use LLM from other threads."
            )

    def _accepting(self) -> StepLoop:
        """The step loop of an engine that takes requests."""
        step_loop = self._running()
        step_loop.check_alive()
        if self._refusal is not None:
            raise EngineDeadError(f"The engine {self._refusal}.")
        return step_loop

    def _submission(
        self,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        deadline: float | None,
        cache_salt: str | None,
    ) -> Submission:
        """The keywords of a request, checked on their own."""
        step_loop = self._accepting()
        self._num_submitted += 1
        with _naming(request_id):
            return Submission(
                params=SamplingParams() if params is None else params,
                id=uuid.uuid4().hex if request_id is None else request_id,
                priority=priority,
                deadline=deadline,
                cache_salt=cache_salt,
                arrival=self._num_submitted,
                submitted_at=step_loop.clock(),
            )

    def _register(self, submission: Submission) -> Generation:
        """A request that is all right as far as can be told without its prompt."""
        step_loop = self._accepting()
        check_params(submission.params, vocab_size=self.model_config.vocab_size, max_running=self.config.max_running)
        if step_loop.find(submission.id) is not None:
            raise InvalidRequestError(f"A request with the id {submission.id!r} is running; choose another id.")
        if step_loop.num_waiting >= self.config.max_waiting:
            raise EngineBusyError(
                f"{step_loop.num_waiting} requests are waiting, which is the limit (max_waiting). Retry later, "
                "await wait_for_room() first, or raise max_waiting."
            )
        assert self._threads is not None
        generation = Generation(submission, Outbox(self._threads.event_loop.signal()), step_loop.forget)
        step_loop.register(generation)
        return generation

    def _submit_text(self, submission: Submission, encode: Callable[[], list[int]]) -> TokenStream:
        generation, step_loop = self._register(submission), self._running()
        vocab_size = self.model_config.vocab_size

        def prepare() -> Request | None:
            if generation.ended:
                return None  # aborted while it waited for this thread
            return self._request(generation, check_prompt_ids(encode(), vocab_size))

        def start(request: Request | None) -> None:
            if request is not None and not generation.ended:
                try:
                    step_loop.start(generation, request)
                except Exception as error:  # it is too long, say; the stream tells its caller
                    generation.fail(error)

        assert self._threads is not None
        self._threads.text_worker.submit(prepare, start, generation.fail)
        return self._stream(generation)

    def _request(self, generation: Generation, prompt: array[int]) -> Request:
        model = self._model
        return generation.submission.request(
            prompt, eos_token_ids=model.model_config.eos_token_ids, max_model_len=model.capacity.max_model_len
        )

    def _stream(self, generation: Generation) -> TokenStream:
        assert self._threads is not None
        return TokenStream(
            generation.id, generation.outbox, partial(self._abort, generation), self._threads.event_loop.post
        )

    def _abort(self, generation: Generation) -> None:
        if self._step_loop is not None:
            generation.abort(self._step_loop.clock())

    def _make_step_loop(self, threads: _Threads) -> StepLoop:
        if self._closed is not None:
            raise EngineDeadError("The engine was closed while it loaded its model.")
        model = self._model
        scheduler = Scheduler(
            self.config,
            num_blocks=model.capacity.num_blocks,
            swap_blocks=model.capacity.swap_blocks,
            block_bytes=model.capacity.block_bytes,
            max_batched_tokens=model.capacity.max_batched_tokens,
        )
        depth = 2 if self.config.overlap else 1
        return StepLoop(scheduler, model.runner, model.tokenizer, threads.step_worker, threads.event_loop, depth=depth)

    async def _free(self) -> None:
        step_loop, self._step_loop = self._step_loop, None
        if step_loop is not None:
            step_loop.stop(EngineDeadError("The engine was closed."), _aborted)
            if step_loop.error is not None and step_loop.error.__cause__ is not None:
                # Callers may keep the error, but not the arrays that the failed step was working on.
                traceback.clear_frames(step_loop.error.__cause__.__traceback__)
        if self._threads is not None:
            try:
                await self._threads.step_worker.run(self._unload)
            finally:
                try:
                    await self._threads.step_worker.close()
                finally:
                    await self._threads.text_worker.close()

    def _load(self) -> None:
        """On the worker thread, where `_unload` will follow whatever happens to the task that awaits this."""
        self._loaded = self._loader(self.config, self._report)

    def _report(self, what: str, done: int, total: int) -> None:
        if self._closed is not None:
            raise EngineDeadError("The engine was closed while it loaded its model.")
        self._progress(what, done, total)

    def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


@contextmanager
def _naming(request_id: str | None) -> Iterator[None]:
    """Errors that refuse the request carry its id, if that is one."""
    try:
        yield
    except RequestError as error:
        error.request_id = request_id if isinstance(request_id, str) else None
        raise


def _copied(conversation: T) -> T:
    try:
        return copy.deepcopy(conversation)
    except Exception as error:  # copying calls whatever the values define
        raise InvalidRequestError(
            f"The messages, tools or template_variables cannot be copied ({type(error).__name__}: {error}); expected "
            "strings, numbers, lists and dictionaries."
        ) from error


def _aborted(request_id: str) -> RequestAbortedError:
    return RequestAbortedError(f"Request {request_id!r} was aborted: the engine was closed.")
