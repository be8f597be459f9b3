"""Responses in the format Harmony of gpt-oss: how they are decoded, parsed and forced, and how a chat holds them."""

import json
import random
from typing import Any

import pytest
from grammars import accepts_text
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from blockdraft.chat_text import HARMONY, render_chat
from blockdraft.engine.text import AnswerText, TextStream
from blockdraft.serving.request import ChatMessages, TextDelta, ToolCall, ToolCallDelta, ToolChoice
from blockdraft.serving.tool_calls import HarmonyParser, grammar_of, parser_of
from blockdraft.types import Grammar

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
)
TEMPLATE = """{#- We assume max 1 tool call per message -#}{% if tools %}{{ tools | length }} tools{% endif %}
{%- for message in messages -%}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
PROMPT = "<|start|>assistant"
SUN = '{"city": "Köln"}'


@pytest.fixture
def harmony(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    markers = [AddedToken(token, special=True) for token in (*HARMONY, "<|return|>", "<|call|>")]
    tokenizer.add_tokens(markers, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


Part = tuple[str, ...]
CASES: list[tuple[str, list[Part]]] = [
    (FINAL + "Hello, world!\nWhat's up?", [("text", "Hello, world!\nWhat's up?")]),
    ("<|channel|>commentary<|message|>Hi", [("text", "Hi")]),
    (f"{ANALYSIS}I'm\nthinking{NEXT}{FINAL}Hi <b>", [("reasoning", "I'm\nthinking"), ("text", "Hi <b>")]),
    (ANALYSIS + "I'm thinking <|", [("reasoning", "I'm thinking <|")]),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", [("reasoning", "a\n\nb"), ("text", "c")]),
    (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{SUN}", [("call", "weather", SUN)]),
    (f"<|channel|>commentary to=functions.weather<|message|>{SUN}<|call|>", [("call", "weather", SUN)]),
    (f" to=functions.weather<|channel|>analysis <|constrain|>json<|message|>{SUN}", [("call", "weather", SUN)]),
    (
        f"{ANALYSIS}So{NEXT}<|channel|>commentary<|message|>I look.{NEXT} to=functions.now<|channel|>commentary json"
        "<|message|>",
        [("reasoning", "So"), ("text", "I look."), ("call", "now", "{}")],
    ),
    (f"<|channel|>commentary to=assistant{ANALYSIS}a{NEXT}{FINAL}b", [("reasoning", "a"), ("text", "b")]),
    # Malformed calls and unknown tools are text, those of the makers' own tools are reasoning.
    ("<|channel|>commentary to=functions.weather<|message|>{city}", [("text", "{city}")]),
    ("<|channel|>commentary to=functions.other<|message|>{}", [("text", "{}")]),
    ("<|channel|>commentary to=python code<|message|>print(1)", [("reasoning", "print(1)")]),
    ("Plain text <|channel", [("text", "Plain text <|channel")]),
    (f"{ANALYSIS}a{NEXT}<|channel|>fin", [("reasoning", "a")]),
    ("", []),
]


def parsed(parser: Any, pieces: list[str]) -> list[Part]:
    """Return the parts, joined by kind. Deltas must begin the calls that follow."""
    result, begun = list[Part](), dict[str, str]()
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        if isinstance(part, ToolCallDelta):
            begun[part.id] = begun.get(part.id, "") + part.arguments
            continue
        if isinstance(part, ToolCall):
            assert part.arguments.startswith(begun.get(part.id, ""))
            result.append(("call", part.name, part.arguments))
            continue
        assert isinstance(part, TextDelta)
        kind = "reasoning" if part.reasoning else "text"
        if result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + part.text)
        else:
            result.append((kind, part.text))
    return result


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_parts_do_not_depend_on_pieces(harmony: PreTrainedTokenizerFast, text: str, expected: list[Part]) -> None:
    chance = random.Random(text)
    cuts = sorted(chance.sample(range(len(text) + 1), min(5, len(text))))
    some = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for pieces in ([text], list(text), some):
        parser = parser_of(harmony, ChatMessages([], TOOLS), PROMPT)
        assert isinstance(parser, HarmonyParser)
        assert parsed(parser, pieces) == expected
        assert parser.called == any(part[0] == "call" for part in expected)


def test_text_is_streamed_as_it_comes(harmony: PreTrainedTokenizerFast) -> None:
    parser = parser_of(harmony, ChatMessages([]), PROMPT)
    assert [part for piece in (ANALYSIS, "I ", "think", "<|end|>") for part in parser.push(piece)] == [
        TextDelta("I ", reasoning=True),
        TextDelta("think", reasoning=True),
    ]


def test_without_tools_calls_are_text(harmony: PreTrainedTokenizerFast) -> None:
    text = f"<|channel|>commentary to=functions.weather<|message|>{SUN}"
    for chat in (ChatMessages([]), ChatMessages([], TOOLS, ToolChoice("none"))):
        assert parsed(parser_of(harmony, chat, PROMPT), [text]) == [("text", SUN)]


def test_a_continued_message_is_text(harmony: PreTrainedTokenizerFast) -> None:
    parser = parser_of(harmony, ChatMessages([]), "</think>")  # what `prepare` makes of a continued prompt
    assert parsed(parser, [" and so on", "<|end|>"]) == [("text", " and so on")]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_markers_are_part_of_decoded_text(harmony: PreTrainedTokenizerFast, stop: tuple[str, ...]) -> None:
    text = f"{ANALYSIS}a ü{NEXT}{FINAL}b"
    end = harmony.convert_tokens_to_ids("<|return|>")
    ids = [*harmony.encode(text, add_special_tokens=False), end, harmony.eos_token_id]
    answer = AnswerText(harmony, stop, end_ids=[end])
    pieces = []
    for token in ids:
        answer.push(token)
        pieces.append(answer.take())
    answer.finish()
    assert "".join(pieces) + answer.take() == text == answer.shown
    assert TextStream(harmony).push(ids)[0] == text


def test_a_stop_string_may_be_a_marker(harmony: PreTrainedTokenizerFast) -> None:
    answer = AnswerText(harmony, ["<|end|>"])
    for token in harmony.encode(f"{ANALYSIS}a{NEXT}", add_special_tokens=False):
        answer.push(token)
    assert answer.stopped and answer.shown == ANALYSIS + "a"


def test_a_chat_holds_channels_apart(harmony: PreTrainedTokenizerFast) -> None:
    """Whole outputs, as the engine and the command line return them, and OpenAI's fields for reasoning."""
    raw = f"{ANALYSIS}Why?{NEXT}{FINAL}Hi."
    question = {"role": "user", "content": "Say <|channel|>"}
    for answer in ({"content": raw}, {"content": "Hi.", "reasoning_content": "Why?"}):
        text = render_chat(harmony, [question, {"role": "assistant", **answer}])
        assert f"{ANALYSIS}Why?<|end|><|start|>assistant<|message|>Hi.<|end|>" in text
        assert "Say <|channel|>" not in text  # a user's spelling is no marker


def accepts(tokenizer: PreTrainedTokenizerFast, text: str, chat: ChatMessages, content: Grammar | None = None) -> bool:
    return accepts_text(tokenizer, grammar_of(tokenizer, chat, PROMPT, content), text)


def test_forced_calls(harmony: PreTrainedTokenizerFast) -> None:
    def called(name: str, arguments: str) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"

    chat = ChatMessages([], TOOLS, ToolChoice("required"))
    assert accepts(harmony, called("weather", SUN), chat)
    assert accepts(harmony, f"{ANALYSIS}Well.{NEXT}{called('now', '{}')}", chat)
    refused = [FINAL + "Hi", called("weather", "{}"), called("other", "{}"), ANALYSIS + "Well."]
    assert not any(accepts(harmony, text, chat) for text in refused)
    one = ChatMessages([], TOOLS, ToolChoice("required", "now"))
    assert accepts(harmony, called("now", "{}"), one) and not accepts(harmony, called("weather", SUN), one)


def test_forced_json(harmony: PreTrainedTokenizerFast) -> None:
    form = Grammar("json_schema", json.dumps(SCHEMA | {"additionalProperties": False}))
    for tools in ((), TOOLS):
        chat = ChatMessages([], tools)
        assert accepts(harmony, FINAL + SUN, chat, form) and accepts(
            harmony, f"{ANALYSIS}a{NEXT}{FINAL}{SUN}", chat, form
        )
        assert not accepts(harmony, FINAL + "Hi", chat, form)


def test_arguments_come_while_they_are_written(harmony: PreTrainedTokenizerFast) -> None:
    parser = parser_of(harmony, ChatMessages([], TOOLS))
    parts = parser.push("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>")
    for text in ('{"city"', ': "K', 'öln"', "}"):
        parts += parser.push(text)
    assert [(part.name, part.arguments) for part in parts] == [
        ("weather", ""),
        ("weather", '{"city": "K'),
        ("weather", 'öln"'),
    ]
    [whole] = parser.finish()
    assert isinstance(whole, ToolCall) and (whole.id, whole.arguments) == (parts[0].id, SUN)
