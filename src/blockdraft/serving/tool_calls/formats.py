"""The formats in which models write tool calls: a protocol, and a class for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from json import JSONDecoder
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from blockdraft.engine.json_schema import pointer, walk, with_pointers
from blockdraft.errors import UsageError
from blockdraft.serving.json_schemas import (
    ALL_TYPES,
    Schema,
    Tools,
    allowed_types,
    close,
    listed_values,
    types_of_value,
)

# JSON as chat templates write it, since models have learned that. With unbounded whitespace, a weak model could write
# spaces forever. "lenient" ignores keywords that no grammar expresses, since others often wrote the schemas of tools.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
MAX_WORD = 12  # characters of an incomplete JSON token other than a string, such as -Infinity

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
CALL_KEYS = {"name", "type", "id", "function", "parameters", "arguments"}
JSON_LINE = re.compile(r"^[\s;]*", re.MULTILINE)  # takes all empty lines at once
FIRST_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
JSON_GAP = re.compile(r"[\s;,]*")
# What models write around calls, and how it ends.
JSON_WRAPPERS = {"```": "```", "<tools>": "</tools>", "<|python_tag|>": ""}
FENCE = re.compile(r"```[\w+-]*[ \t]*\r?")  # without its line break

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"
FUNCTION_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>\n?")
# A value ends at the first marker that another parameter or the end of the call follows.
PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


class Call(NamedTuple):
    """A tool call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class CallMatch(NamedTuple):
    """The start of a text: calls, or plain text.

    Attributes:
        length: Its characters, at least one. Plain text ends before the next possible call.
        calls: The calls; none for plain text.
    """

    length: int
    calls: tuple[Call, ...] = ()


class ToolCallFormat(Protocol):
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

    def match(self, text: str, tools: Tools, final: bool) -> CallMatch | None:
        """Return the start of a text, or None until enough text has come to decide. Later text changes no decision.

        The text starts at the index that `find` returned. If `final`, no more text comes, and a match is returned.
        """
        ...

    def begun(self, text: str, tools: Tools) -> Call | None:
        """Return the call that an undecided text begins with, as far as its arguments are certain.

        They are the beginning of the arguments of the complete call. None where the text may be no call.
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


def json_expression(schema: Schema) -> str:
    """Return JSON of a schema as an expression of Lark."""
    return "%json " + json.dumps({**with_pointers(schema), "x-guidance": COMPACT})


def object_schema(schema: Schema) -> Schema:
    """Return the schema of a tool's arguments, an object without other arguments than the named ones."""
    closed: Schema = close({"type": "object", "properties": {}, **schema})
    return closed


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


def decode_arguments(text: str) -> str:
    """Return arguments that are a JSON object, normalized, or raise an InvalidCall. No text is no arguments."""
    value = _decode(text.strip() or "{}")
    if not isinstance(value, dict):
        raise InvalidCall("no arguments")
    return _encode(value)


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


def _json_call(value: dict[str, Any], marked: bool) -> Call:
    """Return the call that a decoded object stands for, or raise an InvalidCall.

    The arguments are an object or JSON text under "arguments" or "parameters". Some models write the call inside of
    "function", or the name in it. An object with other keys instead is no call, since its arguments would be lost.
    Without a marker before it, an object with any other key is none, such as the definition of a tool.
    """
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, key = value.get("name"), next((key for key in ("arguments", "parameters") if key in value), None)
    if name is None and key is not None:
        name = value.get("function")
    is_strict = key is None or not marked
    if (is_strict and set(value) - CALL_KEYS) or (key is None and not marked) or not isinstance(name, str) or not name:
        raise InvalidCall("no call")
    arguments = value[key] if key is not None and value[key] not in (None, "") else {}
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, dict):
        raise InvalidCall("no arguments")
    return Call(name, _encode(arguments))


def _end_of_calls(
    text: str, end: int, calls: tuple[Call, ...], final: bool, marker: str = TOOL_CALL_END
) -> CallMatch | None:
    """Return calls that end at an index or, if it follows, behind a marker. Models write a brace too many before it."""
    rest = text[end:].lstrip("} \t\r\n")
    if rest.startswith(marker):
        return CallMatch(len(text) - len(rest) + len(marker), calls)
    if marker.startswith(rest):
        return CallMatch(len(text), calls) if final else None
    return CallMatch(end, calls)  # some models forget the marker


CALL_HEAD = re.compile(rf'{TOOL_CALL}\s*\{{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
STRING_END = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')  # whole characters of a string


def begun_arguments(text: str) -> str:
    """Return what is certain of arguments whose JSON begins with a text, the beginning of the normalized arguments."""
    certain = _certain(text) if text.startswith("{") else None
    if certain is None:
        return ""
    begun, closing = certain
    try:
        return _encode_begun(_decode(begun + closing), len(closing))
    except InvalidCall:
        return ""


def _encode_begun(value: Any, num_open: int) -> str:
    """Encode a value as `_encode` will encode one that goes on, without its last characters; "" if that is unknown."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return ""
    return text[:-num_open]


def _certain(text: str) -> tuple[str, str] | None:
    """Return the beginning of a JSON object up to its last certain character, and what closes it.

    That character is in a string or ends a value. None if there is none, or if the object is complete.
    """
    closing, index, is_key, certain = list[str](), 0, False, None
    while index < len(text):
        character = text[index]
        index += 1
        if character == '"':
            end = STRING_END.match(text, index)
            assert end is not None
            index = end.end()
            if not is_key:
                certain = text[:index], '"' + "".join(reversed(closing))
            if index == len(text) or text[index] != '"':  # the string goes on
                return certain
            index += 1
            if not is_key:
                certain = text[:index], "".join(reversed(closing))
            is_key = False
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
            is_key = character == "{"
        elif character in "}]":
            if not closing or closing.pop() != character or not closing:
                return None
            certain, is_key = (text[:index], "".join(reversed(closing))), False
        elif character == ",":
            is_key = closing[-1:] == ["}"]
    return certain


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and of Qwen 2.5 and 3."""

    separator, marked, rules = "\n", True, ""

    def fits(self, template: str) -> bool:
        return TOOL_CALL in template and FUNCTION not in template

    def find(self, text: str, at_line_start: bool) -> int:
        return find_marker(text, TOOL_CALL)

    def match(self, text: str, tools: Tools, final: bool) -> CallMatch | None:
        if not text.startswith(TOOL_CALL):
            return None if TOOL_CALL.startswith(text) and not final else CallMatch(1)
        no_call = CallMatch(len(TOOL_CALL))
        try:
            decoded = _decode_object(text, len(text) - len(text[len(TOOL_CALL) :].lstrip()))
            if decoded is None:
                return no_call if final else None
            call = _json_call(decoded[0], marked=True)
        except InvalidCall:
            return no_call
        return _end_of_calls(text, decoded[1], (call,), final)

    def begun(self, text: str, tools: Tools) -> Call | None:
        head = CALL_HEAD.match(text)
        return None if head is None else Call(head[1], begun_arguments(text[head.end() :]))

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        start = literal(f'{TOOL_CALL}\n{{"name": {json.dumps(name)}, "arguments": ', added)
        return " ".join([start, json_expression(object_schema(schema)), literal("}\n" + TOOL_CALL_END, added)])


class PlainJson:
    """`{"name": ..., "parameters": {...}}` without markers, of Llama 3.1 to 3.3.

    Small models of other families write it too, with "arguments", in a fence or as a list. Only objects at the
    beginning of a line that name one of the request's tools are calls.

    Args:
        arguments: Key of the arguments in forced calls.
    """

    marked, rules = False, ""

    def __init__(self, arguments: str, separator: str) -> None:
        self._arguments, self.separator = arguments, separator

    def fits(self, template: str) -> bool:
        return "<|python_tag|>" in template or '{"name": function name, "parameters":' in template

    def find(self, text: str, at_line_start: bool) -> int:
        for line in JSON_LINE.finditer(text, 0 if at_line_start else 1):
            opening = text[line.end() : line.end() + 1]
            if opening in ("", "{", "[", "`"):
                return line.start()
            if opening == "<":  # a marker of another format may begin here
                return line.end()
        return len(text)

    def match(self, text: str, tools: Tools, final: bool) -> CallMatch | None:
        start = next(JSON_LINE.finditer(text)).end()
        no_call = CallMatch(min(start + 1, len(text)))
        if (opening := _opening(text, start)) is None:
            return no_call if final else None
        index, closing = opening
        in_list = text.startswith("[", index)
        index = _skip_space(text, index + in_list)
        calls, end = list[Call](), 0
        while _may_be_call(text, index, tools):
            try:
                decoded = _decode_object(text, index)
                if decoded is None:
                    if not final:
                        return None
                    break
                call = _json_call(decoded[0], marked=False)
            except InvalidCall:
                break
            if call.name not in tools:
                break
            calls.append(call)
            end = decoded[1]
            if closing == TOOL_CALL_END and not in_list:  # the next call is a match of its own
                return _end_of_calls(text, end, tuple(calls), final)
            index = next(JSON_GAP.finditer(text, end)).end()
        if index == len(text) and not final:
            return None
        if not calls:
            return no_call
        if in_list and text.startswith("]", _skip_space(text, end)):
            end = _skip_space(text, end) + 1
        return _end_of_calls(text, end, tuple(calls), final, closing)

    def begun(self, text: str, tools: Tools) -> Call | None:
        return None  # without a marker, what begins like a call is often text

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        start = literal(f'{{"name": {json.dumps(name)}, "{self._arguments}": ', added)
        return " ".join([start, json_expression(object_schema(schema)), literal("}", added)])


def _skip_space(text: str, index: int) -> int:
    """Return the index of the first character from an index on that is not whitespace."""
    return len(text) - len(text[index:].lstrip())


def _opening(text: str, start: int) -> tuple[int, str] | None:
    """Return the index of what is wrapped, and the marker that ends it, or None until enough text has come.

    Without a wrapper, the marker is the one of `Hermes`, whose first marker some models forget.
    """
    for wrapper, closing in JSON_WRAPPERS.items():
        if text.startswith(wrapper, start):
            end = next(FENCE.finditer(text, start)).end() if wrapper == "```" else start + len(wrapper)
            if wrapper == "```" and text[end : end + 1] != "\n":
                return None if end == len(text) else (start, closing)
            return _skip_space(text, end), closing
    is_partial = any(wrapper.startswith(text[start:]) for wrapper in JSON_WRAPPERS)
    return None if is_partial else (start, TOOL_CALL_END)


def _may_be_call(text: str, index: int, tools: Tools) -> bool:
    """Return whether the first key of an object at an index, and its value, may be those of a call."""
    if not text.startswith("{", index):
        return False
    if (name := FIRST_NAME.match(text, index)) is not None:
        return name[1] in tools
    first_key = text[index + 1 :].lstrip()
    return any(first_key.startswith(f'"{key}"') or f'"{key}"'.startswith(first_key) for key in CALL_KEYS)


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

    def match(self, text: str, tools: Tools, final: bool) -> CallMatch | None:
        marker = next((marker for marker in (TOOL_CALL, FUNCTION) if text.startswith(marker)), "<")
        head, no_call = FUNCTION_HEAD.match(text), CallMatch(len(marker))
        if head is None:
            return None if _may_become_head(text) and not final else no_call
        values, index = _parameters(text, head.end(), tools.get(head[1], {}))
        if not text.startswith(FUNCTION_END, index):
            incomplete = text.startswith(PARAMETER, index) or any(
                marker.startswith(text[index:]) for marker in (PARAMETER, FUNCTION_END)
            )
            return None if incomplete and not final else no_call
        calls, index = (Call(head[1], _encode(values)),), index + len(FUNCTION_END)
        return _end_of_calls(text, index, calls, final) if marker == TOOL_CALL else CallMatch(index, calls)

    def begun(self, text: str, tools: Tools) -> Call | None:
        head = FUNCTION_HEAD.match(text)
        if head is None:
            return None
        schema = tools.get(head[1], {})
        values, index = _parameters(text, head.end(), schema)
        key, num_open = PARAMETER_HEAD.match(text, index), 1
        if key and key.end() < len(text) and key[1] not in values and _is_bare(_property(schema, key[1]), schema):
            values[key[1]], num_open = _begun_value(text[key.end() :]), 2
        return Call(head[1], _encode_begun(values, num_open) if values else "")

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        schema = object_schema(schema)
        inside = ("$defs", "tool")  # where references of a single parameter find those of the tool
        definitions = {"$defs": {"tool": with_pointers(schema, inside)}}
        parts = [literal(f"{TOOL_CALL}\n{FUNCTION}{name}>\n", added)]
        for key, inner in schema["properties"].items():
            if inner is False:  # the parameter is not allowed
                continue
            end = literal("\n</parameter>\n", added)
            types = allowed_types(inner, schema)
            if values := listed_values(inner, schema):
                value = f"({' | '.join(literal(_bare_text(value), added) for value in values)}) {end}"
            elif "string" in types and types != ALL_TYPES:
                value = "parameter_text"
            else:
                if any("$ref" in part for _, part in walk(inner)):
                    inner = {"$ref": pointer((*inside, "properties", key)), **definitions}
                value = f"({json_expression(inner if isinstance(inner, dict) else {})}) {end}"
            parameter = literal(f"{PARAMETER}{key}>\n", added) + " " + value
            parts.append(parameter if key in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*parts, literal(FUNCTION_END + "\n" + TOOL_CALL_END, added)])


def _parameters(text: str, index: int, schema: Schema) -> tuple[dict[str, Any], int]:
    """Return the values of the complete parameters from an index on, by name, and the index of their end."""
    values = dict[str, Any]()
    while (key := PARAMETER_HEAD.match(text, index)) and (end := PARAMETER_END.search(text, key.end())):
        value = text[key.end() : end.start()].removesuffix("\n")
        values[key[1]] = _parse_value(value, _property(schema, key[1]), schema)
        index = end.end()
    return values, index


def _property(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, True)


def _is_bare(schema: Any, root: Schema) -> bool:
    """Return whether the value of every text is the text itself."""
    return allowed_types(schema, root) == {"string"} and not listed_values(schema, root)


def _begun_value(text: str) -> str:
    """Return what is certain of a parameter's value that begins with a text."""
    end = text.rfind(PARAMETER_CLOSE)
    rest = text[end + len(PARAMETER_CLOSE) :].lstrip()
    if end < 0 or not any(marker.startswith(rest) for marker in (PARAMETER, FUNCTION_END)):
        end = max(end + 1, 0) + find_marker(text[max(end + 1, 0) :], PARAMETER_CLOSE)
    return text[:end].removesuffix("\n")


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


# Models also write calls in formats that their templates do not ask for, so outputs are searched for all of them.
FORMATS: tuple[ToolCallFormat, ...] = (Hermes(), Qwen3Coder(), PlainJson("parameters", "; "))
THINK, THINK_END = "<think>", "</think>"


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template, of several the one for tools, or "" without one."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def format_of(tokenizer: PreTrainedTokenizerBase) -> ToolCallFormat:
    """Return the format in which the template asks for tool calls. One that is unknown is taken for plain JSON.

    Raises:
        UsageError: The template takes no tools.
    """
    template = template_of(tokenizer)
    if "tools" not in template:
        raise UsageError(
            "tools is given, and the model's chat template takes no tools; leave tools out, or serve another model."
        )
    return next((form for form in FORMATS if form.fits(template)), PlainJson("arguments", "\n"))


def allows_parallel_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template accepts a message with several calls, unlike those of Llama 3 and gpt-oss."""
    return not any(words in template_of(tokenizer) for words in ("single tool-call", "max 1 tool call"))


def may_reason(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the output may begin with reasoning."""
    return THINK_END in template_of(tokenizer)


def is_reasoning(prompt_text: str) -> bool:
    """Return whether the reasoning begins at the end of the prompt."""
    return prompt_text.rstrip().endswith(THINK)
