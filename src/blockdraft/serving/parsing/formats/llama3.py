"""`{"name": ..., "parameters": {...}}` with nothing around it, of Llama 3.1 to 3.3; several are divided by `;`.

Nothing marks such a call, so only an object that begins a line and names one of the request's tools is one.
"""

from __future__ import annotations

import json
import re
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
    read_json,
)

BEFORE = re.compile(r"[\s;]*")
LINE = re.compile(r"\n[\s;]*")  # takes all of it, so that a model that writes thousands of empty lines costs no more
KEYS = ('"name"', '"type"', '"parameters"', '"arguments"')


class Llama3:
    separator, marked, rules = "; ", False, ""

    def fits(self, template: str) -> bool:
        return "<|python_tag|>" in template or '{"name": function name, "parameters":' in template

    def find(self, text: str, fresh: bool) -> int:
        if fresh and BEFORE.sub("", text, count=1)[:1] in ("", "{"):
            return 0
        lines = (line for line in LINE.finditer(text) if text[line.end() : line.end() + 1] in ("", "{"))
        return next((line.start() + 1 for line in lines), len(text))

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        begin = len(text) - len(BEFORE.sub("", text, count=1))
        key = text[begin + 1 :].lstrip()
        no_call = Read(min(begin + 1, len(text)))
        if not any(key.startswith(known) or known.startswith(key) for known in KEYS):
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


FORMAT = Llama3()
