"""The error tree. A message names the thing, what was found, what was expected and what to do."""

from __future__ import annotations


class MinipagedError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigError(MinipagedError, ValueError):
    """An engine setting is out of its range, or two settings contradict each other."""


class UnsupportedModelError(ConfigError):
    """The model has sizes that this device's kernels do not take; on another device it runs."""


class ModelLoadError(MinipagedError):
    """A model cannot be found, read, or does not fit its own configuration."""


class RequestError(MinipagedError):
    """Base of what goes wrong with one request."""

    request_id: str | None = None
    """Which one; None if it was refused before it had an id."""


class InvalidRequestError(RequestError, ValueError):
    """A request is malformed. It is refused at submit; nothing else is affected."""


class PromptTooLongError(InvalidRequestError):
    """The prompt can never fit: it exceeds `max_model_len` or the whole block pool."""


class EngineBusyError(RequestError):
    """The waiting queue is full. Retry later, or raise `EngineConfig.max_waiting`."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The request's deadline passed before it finished."""


class RequestAbortedError(RequestError):
    """The request was aborted before it finished."""


class RequestFailedError(RequestError):
    """This request alone failed while it ran: its logits were NaN, its callback raised, or its forward raised.

    The cause is chained as `__cause__` where there is one.
    """


class DeviceError(MinipagedError):
    """The device is missing, unsupported, out of memory, or failed. Fatal to the engine that uses it."""


class EngineDeadError(MinipagedError):
    """The engine has stopped: it was closed, or failed with the error chained as `__cause__`."""
