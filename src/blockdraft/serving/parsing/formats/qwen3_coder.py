"""`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`, of Qwen3-Coder and Qwen 3.5.

Values are bare text; what they stand for is in the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from blockdraft.serving.parsing.formats.base import (
    Broken,
    Call,
    Read,
    Schema,
    Tools,
    arguments_schema,
    json_grammar,
    json_text,
    literal,
    marker_at,
    read_whole,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER = "<parameter="
HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
KEY = re.compile(r"<parameter=([^<>\n]+)>\n?")
# The end of a value is the first one that another parameter or the end of the call follows.
VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


class Qwen3Coder:
    separator, marked = "\n", True
    rules = 'parameter_text[suffix="\\n</parameter>\\n"]: /(?s:.*)/'

    def fits(self, template: str) -> bool:
        return FUNCTION in template

    def find(self, text: str, fresh: bool) -> int:
        return min(marker_at(text, OPEN), marker_at(text, FUNCTION))

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        marker = next((one for one in (OPEN, FUNCTION) if text.startswith(one)), "<")
        head = HEAD.match(text)
        if head is None:
            return None if _may_begin(text) and not final else Read(len(marker))
        values, at = dict[str, Any](), head.end()
        properties = tools.get(head[1], {}).get("properties", {})
        while (key := KEY.match(text, at)) and (end := VALUE_END.search(text, key.end())):
            values[key[1]] = _value(text[key.end() : end.start()].removesuffix("\n"), properties.get(key[1], {}))
            at = end.end()
        if not text.startswith(END, at):
            goes_on = text.startswith(PARAMETER, at) or any(one.startswith(text[at:]) for one in (PARAMETER, END))
            return None if goes_on and not final else Read(len(marker))
        call, at = Call(head[1], json_text(values)), at + len(END)
        rest = text[at:].lstrip()
        if marker == OPEN and rest.startswith(CLOSE):
            return Read(len(text) - len(rest) + len(CLOSE), call)
        if marker == OPEN and CLOSE.startswith(rest):
            return Read(len(text), call) if final else None
        return Read(at, call)

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        schema = arguments_schema(schema)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = [literal(f"{OPEN}\n{FUNCTION}{name}>\n", added)]
        for key, inner in schema["properties"].items():
            inner = inner if isinstance(inner, dict) else {}
            if _is_text(inner) and "enum" not in inner:
                value = "parameter_text"
            else:
                texts = [literal(one, added) for one in inner["enum"]] if _is_text(inner) else []
                value = f"({' | '.join(texts) or json_grammar(inner | shared)}) " + literal("\n</parameter>\n", added)
            parameter = literal(f"{PARAMETER}{key}>\n", added) + " " + value
            parts.append(parameter if key in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*parts, literal(END + "\n" + CLOSE, added)])


def _may_begin(text: str) -> bool:
    """Whether this may still become the head of a call."""
    rest = text.removeprefix(OPEN).lstrip() if text.startswith(OPEN) else text
    if rest.startswith(FUNCTION):
        return not re.search(r"[<>\n]", rest[len(FUNCTION) :])
    return FUNCTION.startswith(rest) or OPEN.startswith(text)


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _value(text: str, schema: Any) -> Any:
    """What a bare text stands for; the text itself where it is no JSON."""
    if _is_text(schema):
        return text
    try:
        value = read_whole(text)
        json_text(value)
        return value
    except Broken:
        return text


FORMAT = Qwen3Coder()
