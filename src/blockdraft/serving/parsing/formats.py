"""Formats in which models write tool calls: the protocol, shared functions, and a class for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from json import JSONDecoder
from typing import Any, NamedTuple, Protocol, TypeAlias

Schema: TypeAlias = dict[str, Any]
# JSON schemas of the tools' arguments, by the tools' names.
Tools: TypeAlias = Mapping[str, Schema]
# JSON as chat templates write it, since models have learnt that. Unbounded whitespace would let a weak model write
# spaces for ever. "lenient" ignores keywords that no grammar expresses, since tools are often described by others.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
# With one of these keys, a schema may allow more than its `properties`.
OPEN_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
LONGEST_WORD = 12  # most characters of an incomplete JSON token other than a string, such as -Infinity

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
LLAMA3_BEFORE = re.compile(r"[\s;]*")
# Takes all empty lines at once, so that thousands of them cost no more than one.
LLAMA3_LINE = re.compile(r"\n[\s;]*")
LLAMA3_KEYS = ('"name"', '"type"', '"parameters"', '"arguments"')

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
FUNCTION_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>\n?")
# A value ends at the first marker that is followed by another parameter or by the end of the call.
PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


class Call(NamedTuple):
    """A tool call.

    Attributes:
        arguments: JSON text of an object.
    """

    name: str
    arguments: str


class Read(NamedTuple):
    """What a text begins with: a call, or plain text.

    Attributes:
        length: Its characters, at least one. Plain text ends at the latest where a call may begin.
        call: The call; None for plain text.
    """

    length: int
    call: Call | None = None


class Format(Protocol):
    """How a family of models writes tool calls.

    The results must not depend on how much of the text has come: a decision holds however the text goes on.
    """

    @property
    def separator(self) -> str:
        """Text between two calls."""
        ...

    @property
    def marked(self) -> bool:
        """Whether calls begin with a marker that tells them from other JSON."""
        ...

    @property
    def rules(self) -> str:
        """Rules of Lark used by the expressions of `grammar`."""
        ...

    def fits(self, template: str) -> bool:
        """Whether a chat template asks for this format. At most one format fits a template."""
        ...

    def find(self, text: str, fresh: bool) -> int:
        """Index where the first call begins, or may turn out to begin; the text's length if nowhere.

        Args:
            fresh: Whether the text begins at the start of a line, of the answer, or behind a call.
        """
        ...

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        """What a text begins with; None until enough text has come to decide.

        Args:
            text: Text from the index that `find` returned.
            final: Whether no more text will come; the result is then never None.
        """
        ...

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        """A call of one tool, as an expression of llguidance's dialect of Lark.

        Args:
            added: Texts of tokens that were added to the vocabulary; see `literal`.
        """
        ...


def literal(text: str, added: Collection[str]) -> str:
    """A text as an expression of Lark.

    Tokens that were added to the vocabulary are named in it, since bytes do not match them.
    """
    named = [re.escape(token) for token in added if token in text]
    parts = re.split(f"({'|'.join(named)})", text) if named else [text]
    return " ".join(part if part in added else json.dumps(part) for part in parts if part)


def json_grammar(schema: Schema) -> str:
    """JSON as an expression of Lark."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def arguments_schema(schema: Schema) -> Schema:
    """A tool's schema for a grammar. Arguments without a name in it are forbidden, unless it has one of `OPEN_KEYS`."""
    schema = {"type": "object", "properties": {}, **schema}
    return schema if OPEN_KEYS & set(schema) else {**schema, "additionalProperties": False}


def marker_at(text: str, marker: str) -> int:
    """Index of a marker, or of its first characters at the end of the text; the text's length if nowhere."""
    at = text.find(marker)
    if at >= 0:
        return at
    held = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - held


class Broken(ValueError):
    """The text is not valid JSON, however it goes on."""


def _refuse(constant: str) -> Any:
    raise Broken(constant)


_DECODER = JSONDecoder(strict=False, parse_constant=_refuse)  # models write bare line breaks into strings


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON object that begins at index `at` of a text, and the index of its end; None until the end has come.

    Raises:
        Broken: The text there is not a JSON object.
    """
    if at < len(text) and text[at] != "{":
        raise Broken("no object")
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if "Unterminated string" in error.msg or error.pos + LONGEST_WORD > len(text):
            return None
        raise Broken(str(error)) from error
    except Broken:
        raise
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        return None


def call_of(name: object, arguments: object) -> Call:
    """A call of decoded JSON values.

    Raises:
        Broken: The name is not a text, or the arguments are not an object.
    """
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI's API writes arguments
        arguments = read_whole(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Broken("no call")
    return Call(name, json_text(arguments))


def read_whole(text: str) -> Any:
    """The value of a text that is JSON as a whole.

    Raises:
        Broken: The text is not.
    """
    try:
        return _DECODER.decode(text)
    except (RecursionError, ValueError) as error:
        raise Broken(str(error)) from error


def json_text(value: Any) -> str:
    """A value as JSON text.

    Raises:
        Broken: A number is infinite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise Broken(str(error)) from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only escape
        return json.dumps(value)
    return text


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and of Qwen 2.5 and 3."""

    separator, marked, rules = "\n", True, ""

    def fits(self, template: str) -> bool:
        return TOOL_CALL in template and "<function=" not in template

    def find(self, text: str, fresh: bool) -> int:
        return marker_at(text, TOOL_CALL)

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        if not text.startswith(TOOL_CALL):
            return None if TOOL_CALL.startswith(text) and not final else Read(1)
        begin = len(text) - len(text[len(TOOL_CALL) :].lstrip())
        try:
            found = read_json(text, begin)
            if found is None:
                return Read(len(TOOL_CALL)) if final else None
            value, end = found
            call = call_of(value.get("name"), value.get("arguments", {}))
        except Broken:
            return Read(len(TOOL_CALL))
        rest = text[end:].lstrip()
        if rest.startswith(TOOL_CALL_END):
            return Read(len(text) - len(rest) + len(TOOL_CALL_END), call)
        if TOOL_CALL_END.startswith(rest):
            return Read(len(text), call) if final else None
        return Read(end, call)  # some models forget the end marker

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        opening = literal(f'{TOOL_CALL}\n{{"name": {json.dumps(name)}, "arguments": ', added)
        return " ".join([opening, json_grammar(arguments_schema(schema)), literal("}\n" + TOOL_CALL_END, added)])


class Llama3:
    """`{"name": ..., "parameters": {...}}` without markers, of Llama 3.1 to 3.3; `;` separates several.

    Only an object at the beginning of a line that names one of the request's tools is a call.
    """

    separator, marked, rules = "; ", False, ""

    def fits(self, template: str) -> bool:
        return "<|python_tag|>" in template or '{"name": function name, "parameters":' in template

    def find(self, text: str, fresh: bool) -> int:
        if fresh and LLAMA3_BEFORE.sub("", text, count=1)[:1] in ("", "{"):
            return 0
        lines = (line for line in LLAMA3_LINE.finditer(text) if text[line.end() : line.end() + 1] in ("", "{"))
        return next((line.start() + 1 for line in lines), len(text))

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        begin = len(text) - len(LLAMA3_BEFORE.sub("", text, count=1))
        key = text[begin + 1 :].lstrip()
        no_call = Read(min(begin + 1, len(text)))
        if not any(key.startswith(known) or known.startswith(key) for known in LLAMA3_KEYS):
            return no_call
        try:
            found = read_json(text, begin)
            if found is None:
                return no_call if final else None
            value, end = found
            call = call_of(value.get("name"), value.get("parameters", value.get("arguments")))
        except Broken:
            return no_call
        return Read(end, call) if call.name in tools else no_call

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        opening = literal(f'{{"name": {json.dumps(name)}, "parameters": ', added)
        return " ".join([opening, json_grammar(arguments_schema(schema)), literal("}", added)])


class Qwen3Coder:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`, of Qwen3-Coder and
    Qwen 3.5.

    Values are bare text; the tool's schema tells their types.
    """

    separator, marked = "\n", True
    rules = 'parameter_text[suffix="\\n</parameter>\\n"]: /(?s:.*)/'

    def fits(self, template: str) -> bool:
        return FUNCTION in template

    def find(self, text: str, fresh: bool) -> int:
        return min(marker_at(text, TOOL_CALL), marker_at(text, FUNCTION))

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        marker = next((one for one in (TOOL_CALL, FUNCTION) if text.startswith(one)), "<")
        head = FUNCTION_HEAD.match(text)
        if head is None:
            return None if _may_begin(text) and not final else Read(len(marker))
        values, at = dict[str, Any](), head.end()
        properties = tools.get(head[1], {}).get("properties", {})
        while (key := PARAMETER_HEAD.match(text, at)) and (end := PARAMETER_END.search(text, key.end())):
            values[key[1]] = _value(text[key.end() : end.start()].removesuffix("\n"), properties.get(key[1], {}))
            at = end.end()
        if not text.startswith(FUNCTION_END, at):
            goes_on = text.startswith(PARAMETER, at) or any(
                one.startswith(text[at:]) for one in (PARAMETER, FUNCTION_END)
            )
            return None if goes_on and not final else Read(len(marker))
        call, at = Call(head[1], json_text(values)), at + len(FUNCTION_END)
        rest = text[at:].lstrip()
        if marker == TOOL_CALL and rest.startswith(TOOL_CALL_END):
            return Read(len(text) - len(rest) + len(TOOL_CALL_END), call)
        if marker == TOOL_CALL and TOOL_CALL_END.startswith(rest):
            return Read(len(text), call) if final else None
        return Read(at, call)

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        schema = arguments_schema(schema)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = [literal(f"{TOOL_CALL}\n{FUNCTION}{name}>\n", added)]
        for key, inner in schema["properties"].items():
            inner = inner if isinstance(inner, dict) else {}
            if _is_text(inner) and "enum" not in inner:
                value = "parameter_text"
            else:
                texts = [literal(one, added) for one in inner["enum"]] if _is_text(inner) else []
                value = f"({' | '.join(texts) or json_grammar(inner | shared)}) " + literal("\n</parameter>\n", added)
            parameter = literal(f"{PARAMETER}{key}>\n", added) + " " + value
            parts.append(parameter if key in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*parts, literal(FUNCTION_END + "\n" + TOOL_CALL_END, added)])


def _may_begin(text: str) -> bool:
    """Whether a text may still become the head of a call."""
    rest = text.removeprefix(TOOL_CALL).lstrip() if text.startswith(TOOL_CALL) else text
    if rest.startswith(FUNCTION):
        return not re.search(r"[<>\n]", rest[len(FUNCTION) :])
    return FUNCTION.startswith(rest) or TOOL_CALL.startswith(text)


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _value(text: str, schema: Any) -> Any:
    """The value of a bare text: its JSON value, or the text itself if that is its type or it is not JSON."""
    if _is_text(schema):
        return text
    try:
        value = read_whole(text)
        json_text(value)
        return value
    except Broken:
        return text


# All formats, by their names in error messages.
FORMATS: dict[str, Format] = {"hermes": Hermes(), "llama3": Llama3(), "qwen3_coder": Qwen3Coder()}
