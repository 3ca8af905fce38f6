"""Chat templates: a list of messages becomes the text that the model was trained to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minipaged.errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, object]
"""A "role" and a "content", and whatever else the model's template reads, such as "tool_calls"."""

MAX_CHARACTERS = 64 * 2**20

_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})
"""What the templates see beside variables."""


class ChatTemplate:
    """A model's chat templates, compiled. They run in a sandbox and can be rendered from any thread.

    Args:
        sources: name to jinja source. The one called "default" is used, or "tool_use" where there are tools.
        special_tokens: role to token ("bos_token", …); the templates see them as variables.

    Raises:
        ModelLoadError: a template is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = _compile(sources)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render `messages`. Encode the result with `Tokenizer.encode_chat`: it holds special tokens already.

        Args:
            messages: the conversation so far, at least one message.
            add_generation_prompt: end with the words after which the assistant speaks.
            tools: JSON schemas of functions that the model may call.
            template: the name of a template, if the model has several; by default chosen as told above.
            variables: more variables for the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: an argument is malformed, the model has no such template, or the template
                raised an error, which the message repeats.
        """
        _check_messages(messages)
        _check_tools(tools)
        _check_variables(variables)
        chosen = self._choose(template, with_tools=tools is not None)
        context: dict[str, object] = {
            **self._special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = []
        length = 0
        try:
            for piece in chosen.generate(context):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise InvalidRequestError(
                        f"The chat template wrote more than {MAX_CHARACTERS} characters; send fewer messages."
                    )
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program: it can raise anything
            raise InvalidRequestError(f"The model's chat template refused the messages: {_told(error)}") from error
        return "".join(pieces)

    def _choose(self, name: str | None, *, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise InvalidRequestError(
                "The model has no chat template; use generate() with a prompt in the model's own format."
            )
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if not isinstance(name, str) or name not in self._templates:
            raise InvalidRequestError(
                f"The model has no chat template named {name!r}; it has {', '.join(sorted(self._templates))}."
            )
        return self._templates[name]


def _compile(sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
    if not sources:
        return {}
    import jinja2

    from minipaged.text.template_environment import template_environment

    environment = template_environment()
    templates = {}
    for name, source in sources.items():
        try:
            templates[name] = environment.from_string(source)
        except Exception as error:  # jinja makes Python of it, which has rules and limits of its own
            cause = f"line {error.lineno}: {error.message}" if isinstance(error, jinja2.TemplateSyntaxError) else error
            raise ModelLoadError(
                f"The chat template {name!r} is not valid jinja: {cause}. Correct the model's chat template."
            ) from error
    return templates


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}; expected a list of objects with a role and a content."
        )
    if not messages:
        raise InvalidRequestError("messages is empty; expected at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] is a {type(message).__name__}; expected an object with a role and a content."
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f"messages[{index}] has the role {role!r}; expected a string such as 'user'.")
        content = message.get("content")
        if isinstance(content, str) or (content is None and "tool_calls" in message):
            continue
        raise InvalidRequestError(
            f"messages[{index}] has a content of type {type(content).__name__}; expected a string, which only a "
            "message with tool_calls may leave out."
        )


def _check_tools(tools: object) -> None:
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidRequestError(f"tools is {tools!r:.80}; expected a list of JSON schemas, which are objects.")


def _check_variables(variables: object) -> None:
    if variables is None:
        return
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequestError(f"The template's variables are {variables!r:.80}; expected an object with names.")
    taken = _ARGUMENTS.intersection(variables)
    if taken:
        raise InvalidRequestError(f"{', '.join(sorted(taken))} cannot be a variable: it is an argument of its own.")


def _told(error: Exception) -> str:
    """What the template or jinja says, or the kind of error too where Python itself raised it."""
    import jinja2

    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
