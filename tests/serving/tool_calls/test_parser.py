"""The parsed output does not depend on how the text is cut into pieces."""

import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from blockdraft.errors import UsageError
from blockdraft.serving.request import ChatMessages, TextDelta, ToolCall, ToolCallDelta, ToolChoice
from blockdraft.serving.tool_calls import OutputParser
from blockdraft.serving.tool_calls import parser_of as parser_of_chat
from blockdraft.serving.tool_calls.parser import Part

# The words of chat templates by which formats are recognized.
TEMPLATES = {
    "hermes": "{{ tools }} <tool_call>",
    "llama3": '{{ tools }} {"name": function name, "parameters": dictionary}',
    "qwen3_coder": "{{ tools }} <tool_call> <function=example>",
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "g"}},
]


def tokenizer_with(tiny: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tiny.chat_template = template
    return tiny


def parser_of(
    tokenizer: PreTrainedTokenizerFast,
    tools: Any = (),
    tool_choice: ToolChoice = ToolChoice(),  # noqa: B008
    prompt_text: str = "",
    parallel: bool = True,
) -> OutputParser:
    return parser_of_chat(tokenizer, ChatMessages([], tuple(tools), tool_choice, parallel), prompt_text)


def parse(
    tokenizer: PreTrainedTokenizerFast, pieces: list[str], tools: Any = TOOLS, prompt: str = "", **more: Any
) -> list[Part]:
    parser = parser_of(tokenizer, tools, prompt_text=prompt, **more)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert parser.called == any(isinstance(part, ToolCall) for part in parts)
    return parts


def joined(parts: list[Part]) -> list[tuple[str, ...]]:
    """Join consecutive parts of one kind, without the random ids of calls. Deltas must begin the calls that follow."""
    result, begun = list[tuple[str, ...]](), dict[str, str]()
    for part in parts:
        if isinstance(part, ToolCallDelta):
            begun[part.id] = begun.get(part.id, "") + part.arguments
        elif isinstance(part, ToolCall):
            assert part.arguments.startswith(begun.get(part.id, ""))
            result.append(("call", str(part.name), part.arguments))
        elif result and result[-1][0] == ("Reasoning" if part.reasoning else "Text"):
            result[-1] = (result[-1][0], result[-1][1] + part.text)
        else:
            result.append(("Reasoning" if part.reasoning else "Text", part.text))
    return result


def call(name: str, arguments: str) -> tuple[str, ...]:
    return ("call", name, arguments)


def plain(text: str) -> tuple[str, ...]:
    return ("Text", text)


NESTED = '{"a": "} \\" <tool_call> \\\\", "b": {"c": [1, {"d": "ü – 語"}]}}'
SURROGATE = '{"a": "\\ud83d"}'
HERMES = [
    ("plain text, with 1 < 2 <b>\n", [plain("plain text, with 1 < 2 <b>\n")]),
    ("", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', [call("f", '{"a": "x"}')]),
    (
        'Before.\n<tool_call>{"name": "f", "arguments": ' + NESTED + "}</tool_call>\n after",
        [plain("Before."), call("f", NESTED), plain("after")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>\n\n',
        [call("f", "{}"), call("g", "{}")],
    ),
    # One call's end and the next one's beginning are missing or broken.
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', [call("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_', [call("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} more\n', [call("f", '{"a": 1}'), plain("more\n")]),
    ('<tool_call>{"name": "f", "arg', [plain('<tool_call>{"name": "f", "arg')]),
    ("<tool_call> none <tool_c", [plain("<tool_call> none <tool_c")]),
    ('a <tool_call>{"name": f}</tool_call> b ', [plain('a <tool_call>{"name": f}</tool_call> b ')]),
    ("<tool_call>[1, 2]</tool_call>", [plain("<tool_call>[1, 2]</tool_call>")]),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [plain('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}', [plain('<tool_call>{"name": "f", "arguments": {"a": NaN}}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}',
        [plain('<tool_call>{"name": "f", "arguments": {"a": 1e999}}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        [plain('<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>'), call("g", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', [call("f", '{"a": 2}')]),
    # Other keys for the arguments, none, and keys whose values would be lost.
    ('<tool_call>{"name": "f", "parameters": {"a": "x"}}</tool_call>', [call("f", '{"a": "x"}')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}}\n</tool_call>', [call("f", '{"a": "x"}')]),
    ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}', [call("f", '{"a": "x"}')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [call("f", "{}")]),
    (
        '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        [plain('<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}', [call("f", '{"a": "two\\nlines"}')]),
    ('<tool_call>{"name": "f", "arguments": ' + SURROGATE + "}</tool_call>", [call("f", SURROGATE)]),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', [call("unknown", "{}")]),
    ("<tool_call>" + "[" * 60, [plain("<tool_call>" + "[" * 60)]),
    ("<<tool_call><tool_call>", [plain("<<tool_call><tool_call>")]),
]
LLAMA3 = [
    ("plain text {x}\n", [plain("plain text {x}\n")]),
    ('{"name": "f", "parameters": {"a": "x"}}', [call("f", '{"a": "x"}')]),
    (' \n{"type": "function", "name": "f", "parameters": {"a": "x"}}\n', [call("f", '{"a": "x"}')]),
    (
        '{"name": "f", "parameters": ' + NESTED + '}; {"name": "g", "parameters": {}}',
        [call("f", NESTED), call("g", "{}")],
    ),
    ('I call:\n{"name": "g", "parameters": {}}\nDone', [plain("I call:"), call("g", "{}"), plain("Done")]),
    ('As {"name": "g", "parameters": {}} says', [plain('As {"name": "g", "parameters": {}} says')]),
    ('{"name": "Ann", "parameters": {}}', [plain('{"name": "Ann", "parameters": {}}')]),
    ('{"name": "f", "parameters": 3}', [plain('{"name": "f", "parameters": 3}')]),
    ('{"name": "f", "param', [plain('{"name": "f", "param')]),
    ('{"name": "f",, "x\n{"name": "g", "parameters": {}}', [plain('{"name": "f",, "x'), call("g", "{}")]),
    ("void f()\n{\n  int x;\n}\n", [plain("void f()\n{\n  int x;\n}\n")]),
    ('{"x": 1}', [plain('{"x": 1}')]),
    (" ; x\n;y", [plain(" ; x\n;y")]),
    ('{"name": "g", "parameters": {}};', [call("g", "{}"), plain(";")]),
]
CODER = [
    ("plain < text <parameter=a>", [plain("plain < text <parameter=a>")]),
    (
        "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>",
        [call("f", '{"a": "5", "b": [1, 2]}')],
    ),
    (
        "Now.\n<function=f>\n<parameter=a>\n\n<b></parameter></function >\n\n</parameter>\n</function>\nThen.",
        [plain("Now."), call("f", '{"a": "\\n<b></parameter></function >\\n"}'), plain("Then.")],
    ),
    ("<tool_call><function=g></function></tool_call><tool_call><function=g></function>", [call("g", "{}")] * 2),
    ("<tool_call>\n<function=f>\n<parameter=a>\nx", [plain("<tool_call>\n<function=f>\n<parameter=a>\nx")]),
    ("<tool_call>{} <function=g></function>", [plain("<tool_call>{}"), call("g", "{}")]),
    ("<function=f>what", [plain("<function=f>what")]),
    ("<function=f\n", [plain("<function=f\n")]),
    ("<tool_call>\n<function=g>\n</function>\n</tool_c", [call("g", "{}")]),
    ("<toolbox <function=g></function>", [plain("<toolbox"), call("g", "{}")]),
    ("<function=f><parameter=b>\nNaN\n</parameter></function>", [call("f", '{"b": "NaN"}')]),
]
# As small models write calls whatever their template asks for.
PLAIN_JSON = [
    ('```json\n{"name": "f", "arguments": {"a": "x"}}\n```', [call("f", '{"a": "x"}')]),
    (
        'I call it.\n\n```\n{"name": "g", "parameters": {}}\n```\nDone.',
        [plain("I call it."), call("g", "{}"), plain("Done.")],
    ),
    ('```json\n{"name": "f", "arguments": {}}', [call("f", "{}")]),
    ('```json\n{"name": "f", "arguments": {}}\n``', [call("f", "{}")]),
    (
        '{"name": "f", "arguments": {"a": "x"}}\n{"name": "g", "arguments": {}}',
        [call("f", '{"a": "x"}'), call("g", "{}")],
    ),
    (
        '```json\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n```',
        [call("f", "{}"), call("g", "{}")],
    ),
    (
        '```json\n[\n  {"name": "f", "arguments": {}},\n  {"name": "g", "arguments": {}}\n]\n```',
        [call("f", "{}"), call("g", "{}")],
    ),
    ('[{"name": "f", "arguments": {}}]', [call("f", "{}")]),
    ('<tools>\n{"name": "f", "arguments": {}}\n</tools>', [call("f", "{}")]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', [call("f", "{}")]),
    ('{"name": "f", "arguments": {}}\n</tool_call>', [call("f", "{}")]),
    ('{"type": "function", "function": {"name": "f", "arguments": "{}"}}', [call("f", "{}")]),
    ('{"function": "f", "arguments": {}}', [call("f", "{}")]),
    ("<tool_call>\n<function=g>\n</function>\n</tool_call>", [call("g", "{}")]),
    ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [call("f", "{}")]),
    *(
        (text, [plain(text)])
        for text in (
            '```json\n{"name": "Ann", "arguments": {}}\n```',
            '```json\n{"name": "f", "description": "F.", "parameters": {"a": 1}}\n```',
            '```python\nf({"name": "f", "arguments": {}})\n```',
            '```json\n{"name": "f", "argum',
            "```json\n[1, 2]\n```",
            '{"name": "f"}',
            "[link](x)\n<b>bold</b>\n`code`\n``` ",
            'Write {"name": "f", "arguments": {}} for it.',
            '{"a": 1}\n',
        )
    ),
]
CASES = [(name, *case) for name in TEMPLATES for case in PLAIN_JSON] + [
    (name, *case) for name, cases in (("hermes", HERMES), ("llama3", LLAMA3), ("qwen3_coder", CODER)) for case in cases
]


def splits_of(text: str, seed: int) -> list[list[str]]:
    """Return a text whole, by characters, cut in two at every index, and in pieces of random lengths."""
    pieces = [[text], list(text)] + [[text[:at], text[at:]] for at in range(len(text))]
    generator = random.Random(seed)
    for _ in range(20):
        cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), generator.randrange(1, 8))))
        pieces.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return pieces


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_in_pieces(
    tokenizer: PreTrainedTokenizerFast, name: str, text: str, expected: list[tuple[str, ...]]
) -> None:
    for pieces in splits_of(text, seed=len(text)):
        assert joined(parse(tokenizer_with(tokenizer, TEMPLATES[name]), pieces)) == expected, pieces


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_outputs_in_pieces(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Random texts of markers, calls and broken calls give the same parts in one piece and in many."""
    tokenizer_with(tokenizer, TEMPLATES[name] + "<think></think>")
    generator = random.Random(name)
    bits = (
        [text for form, text, _ in CASES if form == name]
        + list('<>{}"\n;\\ ')
        + ["<think>", "</think>", "</tool_call>"]
    )
    for _ in range(60):
        text = "".join(generator.choices(bits, k=generator.randrange(1, 6)))
        whole = joined(parse(tokenizer, [text]))
        for pieces in splits_of(text, seed=generator.randrange(10**6))[-12:]:
            assert joined(parse(tokenizer, pieces)) == whole, (text, pieces)


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_without_tools_calls_are_text(
    tokenizer: PreTrainedTokenizerFast, name: str, text: str, expected: list[tuple[str, ...]]
) -> None:
    tokenizer_with(tokenizer, TEMPLATES[name])
    for more in ({"tools": ()}, {"tool_choice": ToolChoice("none")}):
        assert joined(parse(tokenizer, list(text), **more)) == ([plain(text)] if text else [])


THINKING = [
    ("<think>\nHm.\n</think>\n\nYes.", "", [("Reasoning", "Hm."), plain("Yes.")]),
    ("\n<think>Hm. </thin>k</think>", "", [("Reasoning", "Hm. </thin>k")]),
    (
        "Hm.\n\nSo.\n</think>\n Yes.\n",
        "<|im_start|>assistant\n<think>\n",
        [("Reasoning", "Hm.\n\nSo."), plain("Yes.\n")],
    ),
    ("Hm. </thi", "<think>", [("Reasoning", "Hm. </thi")]),
    ("<think>\n\n</think>\n\nYes.", "", [plain("Yes.")]),
    ("Yes.", "<think>\n\n</think>\n\n", [plain("Yes.")]),
    (" I <think> so </think>", "", [plain(" I <think> so </think>")]),
    ("<thin", "", [plain("<thin")]),
    (" \n", "", [plain(" \n")]),
    (
        '<think>\n<tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>',
        "",
        [("Reasoning", '<tool_call>{"name": "f"}</tool_call>'), call("g", "{}")],
    ),
]


@pytest.mark.parametrize(("text", "prompt", "expected"), THINKING)
def test_reasoning_in_pieces(
    tokenizer: PreTrainedTokenizerFast, text: str, prompt: str, expected: list[tuple[str, ...]]
) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"] + "<think></think>")
    for pieces in splits_of(text, seed=1):
        assert joined(parse(tokenizer, pieces, prompt=prompt)) == expected, pieces


def test_without_reasoning_in_the_template_it_is_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert joined(parse(tokenizer, ["<think>x</think>y"], tools=())) == [plain("<think>x</think>y")]


def test_text_is_returned_as_soon_as_possible(tokenizer: PreTrainedTokenizerFast) -> None:
    parser = parser_of(tokenizer_with(tokenizer, TEMPLATES["hermes"]), TOOLS)
    assert parser.push("One two <") == [TextDelta("One two")]
    assert parser.push("too") == []
    assert parser.push("th") == [TextDelta(" <tooth")]
    parser = parser_of(tokenizer, TOOLS)
    assert parser.push("```json\n{") == []
    assert parser.push('"name": "app"') == [TextDelta('```json\n{"name": "app"')]  # no tool of this name
    parser = parser_of(tokenizer_with(tokenizer, "<think></think>"), prompt_text="<think>")
    assert parser.push("Hm, ") == [TextDelta("Hm,", reasoning=True)]


ARGUMENTS = {"a": 'x\n\\ "y" 語 😀', "b": [1.5, {"c": "d"}, True, "e"], "f": "g", "h": -12}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_arguments_come_while_they_are_written(tokenizer: PreTrainedTokenizerFast, ascii_only: bool) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    parser = parser_of(tokenizer, TOOLS)
    text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=ascii_only)}}}\n</tool_call>'
    written, most = "", 0
    *deltas, (_, whole) = [(i, part) for i, character in enumerate(text) for part in parser.push(character)]
    for number, part in deltas:
        assert isinstance(part, ToolCallDelta) and (part.index, part.name) == (0, "f")
        written += part.arguments
        most = number
    assert isinstance(whole, ToolCall) and json.loads(whole.arguments) == ARGUMENTS
    assert whole.arguments.startswith(written) and written.endswith('"f": "g"')  # a number may go on
    assert most < len(text) - len("</tool_call>")


FILE = {"path": "a.py", "text": "if x:\n\n    y = '</parameter> <b>'\n", "mode": 7, "force": True, "note": ""}
KINDS = {"path": "string", "text": "string", "mode": "integer", "force": "boolean", "note": "string"}
WRITE = {"name": "write", "parameters": {"properties": {name: {"type": kind} for name, kind in KINDS.items()}}}


def test_arguments_in_bare_text_come_while_they_are_written(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer_with(tokenizer, TEMPLATES["qwen3_coder"])
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in FILE.items())
    text = f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"
    parser = parser_of(tokenizer, [{"type": "function", "function": WRITE}])
    arrived = [(i, part) for i, character in enumerate(text) for part in parser.push(character)]
    *deltas, (_, whole) = arrived
    assert isinstance(whole, ToolCall) and json.loads(whole.arguments) == FILE
    begun = "".join(part.arguments for _, part in deltas if isinstance(part, ToolCallDelta))
    assert whole.arguments == begun + "}"
    of_text = [i for i, _ in deltas if text.index("if x") < i < text.index("</parameter> <b>")]
    assert len(of_text) > 8  # while the value is written, and not when it is complete
    number, behind = text.index("7\n</parameter>"), text.index("<parameter=force>")
    assert not [i for i, _ in deltas if number <= i <= behind]  # a number may go on


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=unknown>\n<parameter=a>\nb",
        '<tool_call>{"name": "unknown", "arguments": {"a": "b',
        '<tool_call>{"arguments": {"a": "b"',
        '<tool_call>{"name": "f", "arguments": "{\\"a',
        '```json\n{"name": "f", "arguments": {"a": "b',
    ],
)
def test_arguments_of_other_calls_come_when_they_are_complete(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    parser = parser_of(tokenizer, TOOLS)
    assert [part for character in text for part in parser.push(character)] == []


def test_a_begun_call_that_becomes_none_is_text(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    text = '<tool_call>{"name": "f", "arguments": {"a": "print("x")"}}</tool_call>'
    parts = parse(tokenizer, list(text))
    assert isinstance(parts[0], ToolCallDelta) and joined(parts) == [plain(text)]


def test_calls_have_ids_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    calls = parse(tokenizer, ['<tool_call>{"name": "g"}</tool_call>' * 2])
    assert [part.index for part in calls if isinstance(part, ToolCall)] == [0, 1]
    assert len({part.id for part in calls if isinstance(part, ToolCall)}) == 2


def test_deeply_nested_and_huge_values_are_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """JSON that makes Python's parser raise other errors than JSONDecodeError."""
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    for value in ('{"a":' * 50_000, "1" * 5000 + "}}"):
        text = '<tool_call>{"name": "f", "arguments": {"a": ' + value
        assert joined(parse(tokenizer, [text[:100], text[100:]])) == [plain(text)]


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12345", "12345"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        (NULLABLE, "12345", "12345"),
        (NULLABLE, "null", None),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "integer"]}, "12345", 12345),
        ({"allOf": [{"type": "string"}]}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"$ref": "#/$defs/id"}, "007", "007"),
        ({"$ref": "#/$defs/id"}, "7", "7"),
        ({"$ref": "#/$defs/loop"}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, '{"b": [1]}', {"b": [1]}),
        ({"type": "integer"}, "many", "many"),
        ({}, "5", 5),
        ({}, "True", "True"),
        (None, "5", 5),
    ],
)
def test_schemas_give_bare_values_their_types(
    tokenizer: PreTrainedTokenizerFast, schema: Any, text: str, value: Any
) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}
    parameters = {"properties": {"x": schema}, "$defs": {"id": {"type": "string"}, "loop": loop}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    output = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    [part] = parse(tokenizer_with(tokenizer, TEMPLATES["qwen3_coder"]), [output], tools)
    assert isinstance(part, ToolCall) and json.loads(part.arguments) == {"x": value}


def test_templates_without_tools_refuse_them(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match="tools is given, and the model's chat template"):
        parser_of(tokenizer_with(tokenizer, "{{ messages }}"), TOOLS)
    parser_of(tokenizer, TOOLS, ToolChoice("none"))


def test_json_content_is_no_call(tokenizer: PreTrainedTokenizerFast) -> None:
    """Where text must be JSON, only marked calls can be told from it."""
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    text = '{"name": "f", "arguments": {}}'
    parser = parser_of_chat(tokenizer, ChatMessages([], tuple(TOOLS)), json_content=True)
    assert joined(parser.push(text) + parser.finish()) == [plain(text)]


def test_unfinished_calls_behind_others_are_dropped_at_the_token_limit(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer_with(tokenizer, TEMPLATES["hermes"])
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "arg'
    for cut in (True, False):
        parser = parser_of(tokenizer, TOOLS)
        parts = joined(parser.push(text) + parser.finish(cut))
        assert parts == [call("f", "{}")] + ([] if cut else [plain('<tool_call>{"name": "f", "arg')])
    parser = parser_of(tokenizer, TOOLS)
    assert joined(parser.push('<tool_call>{"name') + parser.finish(cut=True)) == [plain('<tool_call>{"name')]


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function"}],
        [{"function": {"name": ""}}],
        [{"function": {"name": "f", "parameters": {"properties": []}}}],
        [{"function": {"name": "f", "parameters": {"required": "a"}}}],
        [{"function": {"name": "f", "parameters": {"type": "array"}}}],
        [{"function": {"name": "f"}}] * 2,
    ],
)
def test_invalid_tools(tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="tools"):
        parser_of(tokenizer_with(tokenizer, TEMPLATES["hermes"]), tools)


def test_arguments_are_json(tokenizer: PreTrainedTokenizerFast) -> None:
    for name, _, expected in CASES:
        assert name in TEMPLATES
        assert all(isinstance(json.loads(part[2]), dict) for part in expected if part[0] == "call")


def test_without_parallel_calls_the_first_call_ends_the_output(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = tokenizer_with(tokenizer, TEMPLATES["hermes"])
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "fg"]
    text = "Well. " + "\n".join(calls) + " So."
    for pieces in ([text], list(text)):
        assert joined(parse(tokenizer, pieces, parallel=False)) == [plain("Well."), call("f", "{}")]
        assert len(joined(parse(tokenizer, pieces))) == 4
    parser = parser_of(tokenizer, TOOLS, parallel=False)
    ended = [bool(parser.push(letter)) and parser.ended for letter in text]
    assert ended.index(True) == len("Well. " + calls[0]) - 1


def test_templates_with_single_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    refuses = "{{ raise_exception('This model only supports single tool-calls at once!') }}"
    text = '{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}'
    for template, count in ((TEMPLATES["llama3"], 2), (TEMPLATES["llama3"] + refuses, 1)):
        assert len(parse(tokenizer_with(tokenizer, template), [text])) == count
