"""The formats in which models write tool calls: a protocol, and a class for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from json import JSONDecoder
from typing import Any, NamedTuple, Protocol, TypeAlias

from blockdraft.serving.tool_calls.schema_types import ALL_TYPES, Schema, allowed_types, listed_values, types_of_value

Tools: TypeAlias = Mapping[str, Schema]  # JSON schemas of the tools' arguments, by the tools' names
# JSON as chat templates write it, since models have learned that. With unbounded whitespace, a weak model could write
# spaces forever. "lenient" ignores keywords that no grammar expresses, since others often wrote the schemas of tools.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
# With one of these keys, a schema may allow more than its `properties`.
OPEN_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
MAX_WORD = 12  # characters of an incomplete JSON token other than a string, such as -Infinity

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
LLAMA3_BEFORE = re.compile(r"[\s;]*")
LLAMA3_LINE = re.compile(r"\n[\s;]*")  # takes all empty lines at once, so that thousands cost no more than one
LLAMA3_KEYS = ('"name"', '"type"', '"parameters"', '"arguments"')

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
FUNCTION_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>\n?")
# A value ends at the first marker that another parameter or the end of the call follows.
PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


class Call(NamedTuple):
    """A tool call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Match(NamedTuple):
    """The start of a text: a call, or plain text.

    Attributes:
        length: Its characters, at least one. Plain text ends before the next possible call.
        call: The call; None for plain text.
    """

    length: int
    call: Call | None = None


class Format(Protocol):
    """How a family of models writes tool calls.

    Attributes:
        separator: Text between two calls.
        marked: Whether a marker distinguishes calls from other JSON.
        rules: Lark rules that the expressions of `grammar` use.
    """

    separator: str
    marked: bool
    rules: str

    def fits(self, template: str) -> bool:
        """Return whether a chat template asks for this format. At most one format fits a template."""
        ...

    def find(self, text: str, at_line_start: bool) -> int:
        """Return the index where the first call begins or may begin, or the length of the text.

        `at_line_start` tells whether the text follows a line break or a call, or starts the output.
        """
        ...

    def match(self, text: str, tools: Tools, final: bool) -> Match | None:
        """Return the start of a text, or None until enough text has come to decide. Later text changes no decision.

        The text starts at the index that `find` returned. If `final`, no more text comes, and a match is returned.
        """
        ...

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        """Return a call of one tool as an expression of llguidance's dialect of Lark. `added` as in `literal`."""
        ...


class InvalidCall(ValueError):
    """The text is not a call, whatever follows."""


def literal(text: str, added: Collection[str]) -> str:
    """Return a text as an expression of Lark. It names tokens added to the vocabulary, which bytes do not match."""
    tokens = [re.escape(token) for token in added if token in text]
    parts = re.split(f"({'|'.join(tokens)})", text) if tokens else [text]
    return " ".join(part if part in added else json.dumps(part) for part in parts if part)


def find_marker(text: str, marker: str) -> int:
    """Return the index of a marker, or of its start at the end of the text, or the length of the text."""
    index = text.find(marker)
    if index >= 0:
        return index
    partial = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - partial


def _json_expression(schema: Any) -> str:
    """Return JSON of a schema as an expression of Lark."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT} if isinstance(schema, dict) else schema)


def _closed(schema: Schema) -> Schema:
    """Forbid arguments that a tool's schema does not name, unless it has one of `OPEN_KEYS`."""
    schema = {"type": "object", "properties": {}, **schema}
    return schema if OPEN_KEYS & set(schema) else {**schema, "additionalProperties": False}


def _refuse_constant(constant: str) -> Any:
    raise InvalidCall(constant)


_DECODER = JSONDecoder(strict=False, parse_constant=_refuse_constant)  # models write bare line breaks into strings


def _decode_object(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """Decode the JSON object at an index and return it with the index of its end, or None until the end has come.

    Raises:
        InvalidCall: The text is not a JSON object.
    """
    if start < len(text) and text[start] != "{":
        raise InvalidCall("no object")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if "Unterminated string" in error.msg or error.pos + MAX_WORD > len(text):
            return None
        raise InvalidCall(str(error)) from error
    except InvalidCall:
        raise
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return None
    return value, end


def _decode(text: str) -> Any:
    """Decode a text that is JSON as a whole, or raise an InvalidCall."""
    try:
        return _DECODER.decode(text)
    except (RecursionError, ValueError) as error:
        raise InvalidCall(str(error)) from error


def _encode(value: Any) -> str:
    """Encode a value as JSON, or raise an InvalidCall if a number is infinite."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidCall(str(error)) from error
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return json.dumps(value)
    return text


def _json_call(value: dict[str, Any], needs_arguments: bool) -> Call:
    """Return the call that a decoded object stands for, or raise an InvalidCall.

    The arguments are an object or JSON text under "arguments" or "parameters". Some models write the call inside of
    "function". An object with other keys instead is no call, since its arguments would be lost.
    """
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, key = value.get("name"), next((key for key in ("arguments", "parameters") if key in value), None)
    unknown = key is None and (needs_arguments or set(value) - {"name", "type", "id"})
    if unknown or not isinstance(name, str) or not name:
        raise InvalidCall("no call")
    arguments = value[key] if key is not None and value[key] not in (None, "") else {}
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, dict):
        raise InvalidCall("no arguments")
    return Call(name, _encode(arguments))


def _end_of_call(text: str, end: int, call: Call, final: bool) -> Match | None:
    """Return a call that ends at an index or, if it follows, behind the marker `TOOL_CALL_END`."""
    rest = text[end:].lstrip()
    if rest.startswith(TOOL_CALL_END):
        return Match(len(text) - len(rest) + len(TOOL_CALL_END), call)
    if TOOL_CALL_END.startswith(rest):
        return Match(len(text), call) if final else None
    return Match(end, call)  # some models forget the marker


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and of Qwen 2.5 and 3."""

    separator, marked, rules = "\n", True, ""

    def fits(self, template: str) -> bool:
        return TOOL_CALL in template and FUNCTION not in template

    def find(self, text: str, at_line_start: bool) -> int:
        return find_marker(text, TOOL_CALL)

    def match(self, text: str, tools: Tools, final: bool) -> Match | None:
        if not text.startswith(TOOL_CALL):
            return None if TOOL_CALL.startswith(text) and not final else Match(1)
        no_call = Match(len(TOOL_CALL))
        try:
            decoded = _decode_object(text, len(text) - len(text[len(TOOL_CALL) :].lstrip()))
            if decoded is None:
                return no_call if final else None
            call = _json_call(decoded[0], needs_arguments=False)
        except InvalidCall:
            return no_call
        return _end_of_call(text, decoded[1], call, final)

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        start = literal(f'{TOOL_CALL}\n{{"name": {json.dumps(name)}, "arguments": ', added)
        return " ".join([start, _json_expression(_closed(schema)), literal("}\n" + TOOL_CALL_END, added)])


class Llama3:
    """`{"name": ..., "parameters": {...}}` without markers, of Llama 3.1 to 3.3; `;` separates several.

    Only an object at the beginning of a line that names one of the request's tools is a call.
    """

    separator, marked, rules = "; ", False, ""

    def fits(self, template: str) -> bool:
        return "<|python_tag|>" in template or '{"name": function name, "parameters":' in template

    def find(self, text: str, at_line_start: bool) -> int:
        if at_line_start and LLAMA3_BEFORE.sub("", text, count=1)[:1] in ("", "{"):
            return 0
        lines = (line for line in LLAMA3_LINE.finditer(text) if text[line.end() : line.end() + 1] in ("", "{"))
        return next((line.start() + 1 for line in lines), len(text))

    def match(self, text: str, tools: Tools, final: bool) -> Match | None:
        start = len(text) - len(LLAMA3_BEFORE.sub("", text, count=1))
        first_key = text[start + 1 :].lstrip()
        no_call = Match(min(start + 1, len(text)))
        if not any(first_key.startswith(key) or key.startswith(first_key) for key in LLAMA3_KEYS):
            return no_call
        try:
            decoded = _decode_object(text, start)
            if decoded is None:
                return no_call if final else None
            call = _json_call(decoded[0], needs_arguments=True)
        except InvalidCall:
            return no_call
        return Match(decoded[1], call) if call.name in tools else no_call

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        start = literal(f'{{"name": {json.dumps(name)}, "parameters": ', added)
        return " ".join([start, _json_expression(_closed(schema)), literal("}", added)])


class Qwen3Coder:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`, of Qwen3-Coder and 3.5.

    Values are bare text. The schema of the tool determines their types.
    """

    separator, marked = "\n", True
    rules = 'parameter_text[suffix="\\n</parameter>\\n"]: /(?s:.*)/'

    def fits(self, template: str) -> bool:
        return FUNCTION in template

    def find(self, text: str, at_line_start: bool) -> int:
        return min(find_marker(text, TOOL_CALL), find_marker(text, FUNCTION))

    def match(self, text: str, tools: Tools, final: bool) -> Match | None:
        marker = next((marker for marker in (TOOL_CALL, FUNCTION) if text.startswith(marker)), "<")
        head, no_call = FUNCTION_HEAD.match(text), Match(len(marker))
        if head is None:
            return None if _may_become_head(text) and not final else no_call
        schema = tools.get(head[1], {})
        values, index = dict[str, Any](), head.end()
        while (key := PARAMETER_HEAD.match(text, index)) and (end := PARAMETER_END.search(text, key.end())):
            value = text[key.end() : end.start()].removesuffix("\n")
            values[key[1]] = _parse_value(value, schema.get("properties", {}).get(key[1], True), schema)
            index = end.end()
        if not text.startswith(FUNCTION_END, index):
            incomplete = text.startswith(PARAMETER, index) or any(
                marker.startswith(text[index:]) for marker in (PARAMETER, FUNCTION_END)
            )
            return None if incomplete and not final else no_call
        call, index = Call(head[1], _encode(values)), index + len(FUNCTION_END)
        return _end_of_call(text, index, call, final) if marker == TOOL_CALL else Match(index, call)

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        schema = _closed(schema)
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = [literal(f"{TOOL_CALL}\n{FUNCTION}{name}>\n", added)]
        for key, inner in schema["properties"].items():
            end = literal("\n</parameter>\n", added)
            types = allowed_types(inner, schema)
            if values := listed_values(inner, schema):
                value = f"({' | '.join(literal(_bare_text(value), added) for value in values)}) {end}"
            elif "string" in types and types != ALL_TYPES:
                value = "parameter_text"
            else:
                inner = inner if isinstance(inner, dict) else {}
                value = f"({_json_expression({**inner, **definitions})}) {end}"
            parameter = literal(f"{PARAMETER}{key}>\n", added) + " " + value
            parts.append(parameter if key in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*parts, literal(FUNCTION_END + "\n" + TOOL_CALL_END, added)])


def _may_become_head(text: str) -> bool:
    rest = text.removeprefix(TOOL_CALL).lstrip() if text.startswith(TOOL_CALL) else text
    if rest.startswith(FUNCTION):
        return not re.search(r"[<>\n]", rest[len(FUNCTION) :])
    return FUNCTION.startswith(rest) or TOOL_CALL.startswith(text)


WORDS = {"true": True, "false": False, "none": None}  # as models write them in Python's spelling


def _parse_value(text: str, schema: Any, root: Schema) -> Any:
    """Return the value that a bare text stands for.

    The value is the text itself if the schema allows strings, unless the text is JSON of another allowed type. Without
    strings, or if the schema allows everything, it is the JSON value of the text. Text that is not JSON is a string.
    """
    for value in listed_values(schema, root) or ():
        if text == _bare_text(value):
            return value
    types, word = allowed_types(schema, root), text.strip().lower()
    if "string" not in types and word in WORDS and types & types_of_value(WORDS[word]):
        return WORDS[word]
    try:
        value = _decode(text)
        _encode(value)
    except InvalidCall:
        return text
    if "string" in types and types != ALL_TYPES and (isinstance(value, str) or not types & types_of_value(value)):
        return text
    return value


def _bare_text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value)


# All formats, by their names in error messages.
FORMATS: dict[str, Format] = {"hermes": Hermes(), "llama3": Llama3(), "qwen3_coder": Qwen3Coder()}
