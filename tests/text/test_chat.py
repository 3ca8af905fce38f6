from __future__ import annotations

import json
import re

import pytest

from minipaged.errors import InvalidRequestError, ModelLoadError
from minipaged.text.chat import MAX_CHARACTERS, ChatTemplate, Message
from minipaged.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_metadata, sentencepiece_metadata

USER: list[Message] = [{"role": "user", "content": "Why?"}]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def render(source: str, messages: list[Message] = USER, **variables: object) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, variables=variables)


def test_messages_and_generation_prompt() -> None:
    template = ChatTemplate({"default": CHATML}, {})
    messages: list[Message] = [{"role": "system", "content": "Be <kind> & brief."}, *USER]
    text = "<|im_start|>system\nBe <kind> & brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    assert template.render(messages, add_generation_prompt=False) == text
    assert template.render(messages) == text + "<|im_start|>assistant\n"


def test_lines_with_a_block_alone_leave_no_trace() -> None:
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n."
    assert render(source) == "Why?\n."


def test_special_tokens_and_variables_are_visible() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}", enable_thinking=False) == "<s>False"


def test_tojson_escapes_nothing_and_takes_indent() -> None:
    value = {"b": "<é'&\">", "a": [1, None]}
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ value | tojson(indent=2) }}", value=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d\d \w{3} 20\d\d", render("{{ strftime_now('%d %b %Y') }}"))


def test_loop_controls_and_the_generation_tag() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Why?!"


def test_tools_choose_their_template() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}", "rag": "documents"}, {})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "search"}]) == "search"
    assert template.render(USER, template="rag") == "documents"
    with pytest.raises(InvalidRequestError, match="no chat template named 'x'; it has default, rag, tool_use"):
        template.render(USER, template="x")


def test_tools_go_to_the_default_template_where_there_is_no_other() -> None:
    template = ChatTemplate({"default": "{{ tools is none }}"}, {})
    assert template.render(USER) == "True"
    assert template.render(USER, tools=[]) == "False"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template; use generate\(\)"):
        ChatTemplate({}, {}).render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ absent.attribute }}", "'absent' is undefined"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages | tojson(indent=[]) }}{{ cycler | tojson }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_template_s_own_error_is_the_caller_s(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.__cause__ is not None


def test_a_syntax_error_is_found_when_loading() -> None:
    with pytest.raises(ModelLoadError, match=r"chat template 'tool_use' is not valid jinja: line 2: .*'oops'"):
        ChatTemplate({"default": "", "tool_use": "\n{% oops %}"}, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% break %}", "outside loop"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    ],
)
def test_so_is_what_python_cannot_compile(source: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"chat template 'default' is not valid jinja: .*{message}"):
        ChatTemplate({"default": source}, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__')).name }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ messages[0].clear() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_hostile_template_gets_nowhere(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__ }}", "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format('') }}"],
)
def test_what_a_template_may_not_see_is_undefined(source: str) -> None:
    assert render(source) == ""


def test_what_a_template_writes_is_bounded() -> None:
    source = "{% for i in range(99999) %}{{ text }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_CHARACTERS} characters"):
        render(source, text="x" * 10_000)


def test_rendering_leaves_the_messages_alone() -> None:
    messages: list[Message] = [{"role": "user", "content": "a", "parts": ["b"]}]
    with pytest.raises(InvalidRequestError):
        render("{{ messages[0].parts.append('c') }}", messages)
    assert messages == [{"role": "user", "content": "a", "parts": ["b"]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is a str; expected a list"),
        ({"role": "user", "content": "a"}, "messages is a dict; expected a list"),
        (None, "messages is a NoneType; expected a list"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str; expected an object with a role and a content"),
        ([*USER, {"content": "a"}], r"messages\[1\] has the role None; expected a string"),
        ([{"role": "", "content": "a"}], r"messages\[0\] has the role ''"),
        ([{"role": "user"}], r"messages\[0\] has a content of type NoneType; expected a string"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\] has a content of type list"),
    ],
)
def test_malformed_messages_are_named(messages: list[Message], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate({"default": CHATML}, {}).render(messages)


def test_a_tool_call_needs_no_content() -> None:
    calls: list[Message] = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].tool_calls[0].name }}", calls) == "f"
    assert render("{{ messages[0].tool_calls[0].name }}", [{"role": "assistant", "tool_calls": [{"name": "f"}]}]) == "f"


@pytest.mark.parametrize("writes_bos", [False, True])
@pytest.mark.parametrize(
    "metadata", [sentencepiece_metadata(), byte_level_metadata("llama-bpe"), byte_level_metadata("qwen2")]
)
def test_exactly_one_bos(metadata: dict[str, object], writes_bos: bool) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    source = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}"
    text = ChatTemplate({"default": source}, tokenizer.special_tokens).render(USER)
    ids = tokenizer.encode_chat(text)
    wants_bos = tokenizer.encode("") != []
    assert ids.count(tokenizer.bos_token_id or 0) == (wants_bos or writes_bos)
    assert tokenizer.decode(ids) == "Why?"
