"""Session: a loaded engine on an event loop of its own thread, driven from the main thread, where Ctrl-C arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from anyio.from_thread import BlockingPortal, start_blocking_portal

from minipaged.cli.loading_bar import loading_bar
from minipaged.config import EngineConfig
from minipaged.engine import Engine
from minipaged.output import Token
from minipaged.token_stream import TokenStream


class Session:
    """Made by `open_session`."""

    def __init__(self, portal: BlockingPortal, engine: Engine) -> None:
        self._portal = portal
        self.engine = engine

    @contextmanager
    def stream(self, start: Callable[[], TokenStream]) -> Iterator[Iterator[Token]]:
        """The tokens of the stream that `start` opens. Leaving the block, also by Ctrl-C, aborts the request."""
        stream = self._portal.call(start)
        try:
            yield iter(partial(self._portal.call, _next_token, stream), None)
        finally:
            self._portal.call(stream.abort)


@contextmanager
def open_session(model: str | None, config: EngineConfig) -> Iterator[Session]:
    """Load a model, showing progress."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        with loading_bar() as progress:
            loading = portal.wrap_async_context_manager(Engine.load(model, config=config, progress=progress))
            engine = stack.enter_context(loading)
        yield Session(portal, engine)


async def _next_token(stream: TokenStream) -> Token | None:
    return await anext(stream, None)
