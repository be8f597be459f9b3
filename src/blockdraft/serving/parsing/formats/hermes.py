"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and of Qwen 2.5 and 3."""

from __future__ import annotations

import json
from collections.abc import Collection

from blockdraft.serving.parsing.formats.base import (
    Broken,
    Read,
    Schema,
    Tools,
    arguments_schema,
    call_of,
    json_grammar,
    literal,
    marker_at,
    read_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    separator, marked, rules = "\n", True, ""

    def fits(self, template: str) -> bool:
        return OPEN in template and "<function=" not in template

    def find(self, text: str, fresh: bool) -> int:
        return marker_at(text, OPEN)

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        if not text.startswith(OPEN):
            return None if OPEN.startswith(text) and not final else Read(1)
        begin = len(text) - len(text[len(OPEN) :].lstrip())
        try:
            found = read_json(text, begin)
            if found is None:
                return Read(len(OPEN)) if final else None
            value, end = found
            call = call_of(value.get("name"), value.get("arguments", {}))
        except Broken:
            return Read(len(OPEN))
        rest = text[end:].lstrip()
        if rest.startswith(CLOSE):
            return Read(len(text) - len(rest) + len(CLOSE), call)
        if CLOSE.startswith(rest):
            return Read(len(text), call) if final else None
        return Read(end, call)  # some models forget the end

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        opening = literal(f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ', added)
        return " ".join([opening, json_grammar(arguments_schema(schema)), literal("}\n" + CLOSE, added)])


FORMAT = Hermes()
