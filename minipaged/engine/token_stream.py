"""TokenStream: what a caller holds of a running request. Outbox: what the engine holds of its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from minipaged.engine.event_loop import Post, Signal
from minipaged.output import Completion, Token

T = TypeVar("T")


class Outbox:
    """Where the engine leaves a request's tokens and its stream collects them. Used on the event loop's thread.

    Unbounded, so that a slow consumer gets every token and slows nobody.
    """

    def __init__(self, changed: Signal) -> None:
        self._changed = changed
        self._tokens: deque[Token] = deque()
        self._completion: Completion | None = None
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether the one terminal event, a completion or an error, has come. Readable from any thread."""
        return self._completion is not None or self._error is not None

    def put(self, token: Token) -> None:
        """One more token."""
        self._tokens.append(token)
        self._changed.notify()

    def finish(self, completion: Completion) -> None:
        """The request ended well, or its caller aborted it."""
        assert not self.ended
        self._completion = completion
        self._changed.notify()

    def fail(self, error: Exception) -> None:
        """The request ended with an error."""
        assert not self.ended
        self._error = error
        self._changed.notify()

    async def next_token(self) -> Token:
        """The oldest token not yet taken. After the last it raises the request's error, or `StopAsyncIteration`."""
        while not self._tokens:
            if self._error is not None:
                raise self._error
            if self._completion is not None:
                raise StopAsyncIteration
            await self._changed.wait()
        return self._tokens.popleft()

    async def completion(self) -> Completion:
        """Wait for the terminal event; tokens not yet taken stay."""
        while self._completion is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._completion


class TokenStream:
    """The tokens of one request, as they come: `async for token in stream`.

    The engine works on whether or not anyone iterates, and keeps every token until it is taken; a token is taken once.
    Nobody has to close a stream. The request is aborted, and its memory free within two steps, when

    - the loop over it is left early, by `break`, an exception or the task's cancellation,
    - a task waiting in `completion()` or `anext()` is cancelled,
    - `abort()`, `aclose()` or the end of `async with` says so,
    - the stream itself is lost to garbage collection,

    unless another task still iterates over it or waits for its completion. An aborted request is no error: iteration
    ends after the tokens there were, and `completion()` returns what was generated, with finish reason "abort".

    What goes wrong is raised by iteration, after the tokens that came before, and by `completion()`:
    `RequestTimeoutError`, `RequestFailedError` for this request alone, `RequestAbortedError` if the engine was closed
    meanwhile, `EngineDeadError` if it failed, `InvalidRequestError` if the prompt cannot be encoded or does not fit.
    """

    def __init__(self, request_id: str, outbox: Outbox, abort: Callable[[], None], post: Post) -> None:
        self.request_id = request_id
        """The id given to `generate`, or made by it."""
        self._outbox = outbox
        self._abort = abort
        self._post = post
        self._consumers: set[object] = set()  # one for each loop under way and each task that waits

    def __aiter__(self) -> AsyncIterator[Token]:
        return _Iteration(self)

    async def __anext__(self) -> Token:
        return await self._wait_for(self._outbox.next_token)

    async def completion(self) -> Completion:
        """Wait until the request has ended; what it generated, its usage and timings.

        Needs no iteration, can follow one, run beside one, and be called again.
        """
        return await self._wait_for(self._outbox.completion)

    def abort(self) -> None:
        """End the request now. On the event loop's thread; does nothing once it has ended."""
        self._abort()

    async def aclose(self) -> None:
        """The same as `abort()`, by the name that `contextlib.aclosing` wants."""
        self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abort()

    def __del__(self) -> None:
        if not self._outbox.ended:
            self._post(self._abort)

    async def _wait_for(self, wait: Callable[[], Awaitable[T]]) -> T:
        consumer = object()
        self._consumers.add(consumer)
        try:
            result = await wait()
        except BaseException:  # the end, or this task was cancelled
            if self._is_last(consumer):
                self._abort()
            raise
        self._consumers.discard(consumer)
        return result

    def _is_last(self, consumer: object) -> bool:
        """Take a consumer off the list; whether it was on it, and nobody is left."""
        was_there = consumer in self._consumers
        self._consumers.discard(consumer)
        return was_there and not self._consumers


class _Iteration:
    """One loop over a stream. Python drops it when the loop is left, whichever way."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._consumer = object()
        stream._consumers.add(self._consumer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        try:
            return await self._stream._outbox.next_token()
        except BaseException:  # the end, or this task was cancelled
            if self._stream._is_last(self._consumer):
                self._stream._abort()
            raise

    def __del__(self) -> None:
        # Garbage collection may run on any thread, and in the midst of anything: only note it, and abort later.
        if self._stream._is_last(self._consumer):
            self._stream._post(self._stream._abort)
