"""Grammars of required calls, run by llguidance, accept what the parser reads."""

import json
from typing import Any

import pytest
from grammars import accepts_text, matcher_of
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from blockdraft.errors import UsageError
from blockdraft.serving.request import ChatMessages, ToolCall, ToolChoice
from blockdraft.serving.tool_calls import grammar_of as grammar_of_chat
from blockdraft.serving.tool_calls import parser_of
from blockdraft.types import Grammar

HERMES = "{{ tools }} <tool_call>"
LLAMA3 = '{{ tools }} {"name": function name, "parameters": dictionary}'
CODER = "{{ tools }} <tool_call> <function=example>"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city"],
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
REQUIRED = ToolChoice("required")
SKY = {
    "type": "object",
    "properties": {"sky": {"$ref": "#/$defs/sky"}},
    "required": ["sky"],
    "additionalProperties": False,
    "$defs": {"sky": {"enum": ["blue", "grey"]}},
}
FORM = Grammar("json_schema", json.dumps(SKY))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def coder(name: str, arguments: str) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in json.loads(arguments).items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


FORMATS = {HERMES: hermes, LLAMA3: llama3, CODER: coder}


@pytest.fixture(params=[False, True], ids=["markers as bytes", "markers as tokens"])
def tokens(tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param:
        markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return tokenizer


def grammar_of(
    tokenizer: PreTrainedTokenizerFast, tools: Any, choice: ToolChoice, parallel: bool = True, **more: Any
) -> Grammar | None:
    return grammar_of_chat(tokenizer, ChatMessages([], tuple(tools), choice, parallel), **more)


def accepts(tokenizer: PreTrainedTokenizerFast, text: str, *args: Any, **more: Any) -> bool:
    return accepts_text(tokenizer, grammar_of(tokenizer, *args, **more), text)


@pytest.mark.parametrize("template", FORMATS)
def test_valid_calls_are_accepted_and_others_refused(tokens: PreTrainedTokenizerFast, template: str) -> None:
    tokens.chat_template = template
    write = FORMATS[template]
    full = '{"city": "Köln \\"\\"", "unit": "C", "days": 2}'
    separator = "; " if template == LLAMA3 else "\n"
    good = [write("weather", full), write("weather", '{"city": "x"}'), write("now", "{}")]
    for text in good:
        assert accepts(tokens, text, TOOLS, REQUIRED)
        parser = parser_of(tokens, ChatMessages([], tuple(TOOLS)))
        [call] = parser.push(text) + parser.finish()
        assert isinstance(call, ToolCall)
        sent = [arguments for arguments in (full, '{"city": "x"}', "{}") if write(str(call.name), arguments) == text]
        assert [json.loads(arguments) for arguments in sent] == [json.loads(call.arguments)]
    bad = [
        "",
        "Sure.",
        write("weather", "{}"),  # an argument is missing
        write("weather", '{"city": "x", "unit": "K"}'),
        write("weather", '{"city": "x", "days": 0}'),
        write("weather", '{"city": "x", "other": 1}'),
        write("unknown", "{}"),
        write("now", '{"a": 1}'),
        "So " + write("now", "{}"),
    ]
    if template != CODER:
        bad.append(write("weather", '{"city":   "x"}'))  # a weak model might write spaces for ever
    assert [text for text in bad if accepts(tokens, text, TOOLS, REQUIRED)] == []
    # What follows the required call is the model's choice, unless only one call is allowed.
    for text in (separator.join(good), good[0] + "\nDone.", f"{good[0]}\n{good[1]} and <"):
        assert accepts(tokens, text, TOOLS, REQUIRED)
        assert not accepts(tokens, text, TOOLS, REQUIRED, parallel=False)
    named = ToolChoice("required", "now")
    assert accepts(tokens, good[2], TOOLS, named)
    assert not accepts(tokens, good[0], TOOLS, named)
    assert not accepts(tokens, separator.join([good[2]] * 2), TOOLS, named)


@pytest.mark.parametrize("template", FORMATS)
def test_reasoning_before_calls(tokens: PreTrainedTokenizerFast, template: str) -> None:
    tokens.chat_template = template + "<think></think>"
    call, think = FORMATS[template]("now", "{}"), "<think>\nHm, < so\n</think>\n\n"
    args: tuple[Any, ...] = (tokens, call, TOOLS, REQUIRED)
    assert accepts(*args)
    assert accepts(tokens, think + call, *args[2:])
    assert not accepts(tokens, think, *args[2:])
    # The prompt has begun it, or has ended it.
    assert accepts(tokens, think.removeprefix("<think>") + call, *args[2:], prompt_text="<think>\n")
    assert not accepts(*args, prompt_text="<think>\n")
    assert accepts(*args, prompt_text="<think>\n\n</think>\n\n")
    assert not accepts(tokens, think + call, *args[2:], prompt_text="<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [HERMES, CODER])
def test_optional_calls_with_a_response_format(tokens: PreTrainedTokenizerFast, template: str) -> None:
    tokens.chat_template = template + "<think></think>"
    args: tuple[Any, ...] = (TOOLS, ToolChoice())
    call, think = FORMATS[template]("now", "{}"), "<think>\nHm, < so\n</think>\n\n"
    for text in (call, f"{call}\n{call}", '{"sky": "blue"}', '{"sky":"grey"}', '{\n  "sky": "grey"\n}'):
        assert accepts(tokens, text, *args, content=FORM)
        assert accepts(tokens, think + text, *args, content=FORM)
    for text in ("", "Sure.", '{"sky": "red"}', '{"sky": "blue"} ' + call, FORMATS[template]("now", '{"a": 1}')):
        assert not accepts(tokens, text, *args, content=FORM)
    assert not accepts(tokens, f"{call}\n{call}", *args, parallel=False, content=FORM)
    assert accepts(tokens, call, TOOLS, REQUIRED, content=FORM)  # a form is of texts, and there is none
    assert accepts(tokens, f"{call}\n{call}", TOOLS, REQUIRED, content=FORM)
    for text in ('{"sky": "blue"}', f"{call} Sure.", f'{call}\n{{"sky": "blue"}}'):
        assert not accepts(tokens, text, TOOLS, REQUIRED, content=FORM)


def test_reasoning_before_a_response_format(tokens: PreTrainedTokenizerFast) -> None:
    tokens.chat_template = "<think></think>"
    args: tuple[Any, ...] = ((), ToolChoice())
    text, think = '{"sky": "blue"}', "<think>\nHm, < so\n</think>\n\n"
    for form in (FORM, Grammar("json_object")):
        assert accepts(tokens, text, *args, content=form)
        assert accepts(tokens, think + text, *args, content=form)
        assert accepts(tokens, think.removeprefix("<think>") + text, *args, prompt_text="<think>\n", content=form)
        assert not accepts(tokens, text, *args, prompt_text="<think>\n", content=form)
        assert grammar_of(tokens, *args, prompt_text="<think>\n\n</think>\n\n", content=form) == form
    with pytest.raises(UsageError, match='json_schema is refused: no grammar expresses "uniqueItems"'):
        grammar_of(tokens, *args, content=Grammar("json_schema", '{"uniqueItems": true}'))
    tokens.chat_template = HERMES
    assert grammar_of(tokens, TOOLS, ToolChoice("none"), content=FORM) == FORM


def test_unmarked_calls_conflict_with_a_response_format(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = LLAMA3
    with pytest.raises(UsageError, match="response_format and tools cannot be combined"):
        grammar_of(tokenizer, TOOLS, ToolChoice(), content=FORM)
    assert accepts(tokenizer, llama3("now", "{}"), TOOLS, REQUIRED, content=FORM)
    assert grammar_of(tokenizer, TOOLS, ToolChoice("none"), content=FORM) == FORM


def test_open_schemas_stay_open(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = HERMES
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert accepts(tokenizer, hermes("f", '{"a": 1, "b": true}'), tools, REQUIRED)
    assert not accepts(tokenizer, hermes("f", '{"a": 1, "b": 2}'), tools, REQUIRED)


def test_nested_objects_are_closed(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = HERMES
    item = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"properties": {"items": {"type": "array", "items": item}, "free": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert accepts(tokenizer, hermes("f", '{"items": [{"a": 1}], "free": {"b": 2}}'), tools, REQUIRED)
    assert not accepts(tokenizer, hermes("f", '{"items": [{"a": 1, "b": 2}]}'), tools, REQUIRED)


def test_unsupported_schema_keywords_of_tools_are_ignored(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = HERMES
    paths = {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": paths}}}}]
    assert accepts(tokenizer, hermes("f", '{"a": ["x", "x"]}'), tools, REQUIRED)
    assert not accepts(tokenizer, hermes("f", '{"a": [1]}'), tools, REQUIRED)


@pytest.mark.parametrize("template", FORMATS)
def test_null_counts_as_absent_and_unlisted_names_as_any_value(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = template
    for parameters, arguments in (
        ({"properties": {"a": {"type": "integer"}}, "required": None}, '{"a": 1}'),
        ({"properties": {"a": None}}, '{"a": [1]}'),
        ({"properties": {}, "required": ["a"]}, '{"a": 1}'),
        ({"properties": {"a": {"type": "string", "enum": ["x", None]}}}, '{"a": "x"}'),
        ({"properties": {"a": {"type": ["string", "null"]}}}, '{"a": "x"}'),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        assert accepts(tokenizer, FORMATS[template]("f", arguments), tools, REQUIRED), parameters


def test_optional_calls_need_no_grammar(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = HERMES
    assert grammar_of(tokenizer, TOOLS, ToolChoice()) is None
    assert grammar_of(tokenizer, TOOLS, ToolChoice("none")) is None


def test_impossible_tool_choices_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = HERMES
    with pytest.raises(UsageError, match="tool_choice names 'later'; the tools are weather, now"):
        grammar_of(tokenizer, TOOLS, ToolChoice("required", "later"))
    with pytest.raises(UsageError, match="without tools"):
        grammar_of(tokenizer, (), REQUIRED)
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UsageError, match="takes no tools"):
        grammar_of(tokenizer, TOOLS, REQUIRED)


@pytest.mark.parametrize("template", FORMATS)
def test_special_tokens_in_tools_are_text(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    schema = {"properties": {"a": {"enum": ["<|im_end|>"]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    matcher = matcher_of(tokenizer, grammar_of(tokenizer, tools, REQUIRED))
    text = FORMATS[template]("f", '{"a": "<|im_end|>"}')
    ids: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert matcher.validate_tokens(ids) == len(ids)


def test_unknown_formats_are_plain_json(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ tools }} [TOOL_CALLS]"
    assert accepts(tokenizer, '{"name": "now", "arguments": {}}', TOOLS, REQUIRED)
    assert not accepts(tokenizer, '[TOOL_CALLS] {"name": "now", "arguments": {}}', TOOLS, REQUIRED)
