"""Random JSON schemas, and what must hold for the answer to each: no server error, JSON, and errors that say why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from serving_client import MODEL, Client

from blockdraft.engine.json_schema import walk

TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
NAMES = ["a", "b", "a b", "", "é", "$ref", "properties", "type", "a/b", "x<y>"]
PATTERNS = ["^a+$", "b", "^[a-z]{1,3}$", "(?=a)b", "(?<!x)y", r"\d+", r"^\w*$", "[", "a|b", "^(a|bc){2}$"]
REFERENCES = ["#", "#/$defs/a", "#/$defs/a%20b", "#/$defs/x<y>", "#/$defs/x%3Cy%3E", "#/$defs/a~1b", "#/properties/a"]
REFERENCES += ["#/nowhere", "#anchor", "http://localhost/schema", "other.json", "#/$defs/%", "#/allOf/0"]
FORMATS = ["date", "date-time", "uuid", "email", "ipv4", "uri", "nothing"]
TOKENS = 64


class SchemaMaker:
    """Makes random schemas, most of which are valid and some of which are malformed somewhere."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.wrong = self.random.choice([0, 0, 0.02, 0.1])

    def value(self, depth: int = 0) -> Any:
        pick = self.random.randrange(8 if depth < 2 else 6)
        if pick == 6:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 2))]
        if pick == 7:
            return {self.random.choice(NAMES): self.value(depth + 1) for _ in range(self.random.randint(0, 2))}
        return [None, True, self.random.randint(-9, 99), 0.5, "x", self.random.choice(["", "é\n", '"', "a" * 40])][pick]

    def names(self, depth: int) -> dict[str, Any]:
        return {self.random.choice(NAMES): self.schema(depth + 1) for _ in range(self.random.randint(1, 3))}

    def some(self, depth: int) -> list[Any]:
        return [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]

    def schema(self, depth: int = 0) -> Any:
        if self.random.random() < self.wrong:
            return self.value()
        if depth > 2 or self.random.random() < 0.1:
            return self.random.choice([True, {}, False, {"type": self.random.choice(TYPES)}, {"enum": ["x", 1]}])
        keywords = self.random.sample(sorted(KEYWORDS), self.random.randint(1, 4))
        is_wrong = lambda: self.random.random() < self.wrong  # noqa: E731
        return {key: self.value() if is_wrong() else KEYWORDS[key](self, depth) for key in keywords}

    def root(self) -> Any:
        schema = self.schema()
        if isinstance(schema, dict) and self.random.random() < 0.5:
            schema["$defs"] = {name: self.schema(1) for name in self.random.sample([*NAMES, "a"], 3)}
        return schema


KEYWORDS: dict[str, Any] = {
    "type": lambda m, d: m.random.choice([m.random.choice(TYPES), m.random.choice(TYPES), m.random.sample(TYPES, 2)]),
    "properties": lambda m, d: m.names(d),
    "required": lambda m, d: m.random.choices(NAMES, k=m.random.randint(0, 2)),
    "additionalProperties": lambda m, d: m.random.choice([False, m.schema(d + 1)]),
    "patternProperties": lambda m, d: {m.random.choice(PATTERNS): m.schema(d + 1)},
    "items": lambda m, d: m.schema(d + 1),
    "prefixItems": lambda m, d: m.some(d),
    "allOf": lambda m, d: m.some(d),
    "anyOf": lambda m, d: m.some(d),
    "oneOf": lambda m, d: m.some(d),
    "not": lambda m, d: m.schema(d + 1),
    "if": lambda m, d: m.schema(d + 1),
    "contains": lambda m, d: m.schema(d + 1),
    "propertyNames": lambda m, d: m.schema(d + 1),
    "dependentRequired": lambda m, d: {"a": ["b"]},
    "enum": lambda m, d: [m.value() for _ in range(m.random.randint(0, 3))],
    "const": lambda m, d: m.value(),
    "default": lambda m, d: m.value(),
    "examples": lambda m, d: [{"$ref": "http://localhost"}],
    "pattern": lambda m, d: m.random.choice(PATTERNS),
    "format": lambda m, d: m.random.choice(FORMATS),
    "minLength": lambda m, d: m.random.randint(0, 4),
    "maxLength": lambda m, d: m.random.randint(0, 9),
    "minimum": lambda m, d: m.random.choice([0, -1.5, 7]),
    "exclusiveMaximum": lambda m, d: m.random.choice([0, 9, 0.1]),
    "multipleOf": lambda m, d: m.random.choice([1, 0.1, 5, 0, -1]),
    "minItems": lambda m, d: m.random.randint(0, 3),
    "maxItems": lambda m, d: m.random.randint(0, 3),
    "uniqueItems": lambda m, d: m.random.choice([True, False]),
    "minProperties": lambda m, d: m.random.randint(0, 2),
    "maxProperties": lambda m, d: m.random.randint(0, 2),
    "$ref": lambda m, d: m.random.choice(REFERENCES),
    "$anchor": lambda m, d: "anchor",
    "$id": lambda m, d: m.random.choice(["other.json", "http://localhost/schema", "urn:a"]),
    "$comment": lambda m, d: "x",
    "title": lambda m, d: "x",
}


def suite_schemas(folder: Path) -> Iterator[Any]:
    """Yield all schemas of the official test suite of JSON Schema."""
    for file in sorted(folder.rglob("*.json")):
        cases = json.loads(file.read_text(encoding="utf-8"))
        yield from (case["schema"] for case in cases if isinstance(case, dict) and "schema" in case)


def check_schema(client: Client, schema: Any, strict: bool) -> int:
    """Send a schema as the format of a response, check the response, and return its status."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the ant"}], "response_format": form}
    body |= {"max_tokens": TOKENS, "temperature": 1, "seed": 1}
    answer = client.post("/v1/chat/completions", body)
    context = f"strict {strict}: {json.dumps(schema)[:2000]}\n{answer.status_code}: {answer.text[:600]}"
    assert answer.status_code in (200, 400), context
    if answer.status_code == 400:
        message = answer.json()["error"]["message"]
        assert names_a_keyword(message, schema), context
        return 400
    [choice] = answer.json()["choices"]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        value = json.loads(text)
        assert not strict or "warnings" not in answer.json(), context
        check_value(value, schema, context, strict)
    else:
        assert is_prefix(text), f"{context}\n{text!r}"
    return 200


def names_a_keyword(message: str, schema: Any) -> bool:
    """Return whether an error names a keyword of the schema, or that the schema itself is none."""
    if not isinstance(schema, dict):
        return "schema" in message
    keywords = {key for _, part in walk(schema) for key in part}
    words = set(re.findall(r"[$\w]+", message))
    return bool(keywords & words) or "false allows no value" in message or "nest" in message


def check_value(value: Any, schema: Any, context: str, strict: bool) -> None:
    """Check a complete value with the package jsonschema, where that is installed and the schema is one to it."""
    try:
        import jsonschema
    except ImportError:
        return
    if not strict:
        return  # keywords may have been left out
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        faults = list(kind(schema).iter_errors(value))
    except Exception:  # a schema that jsonschema cannot read
        return
    assert not faults, f"{context}\n{value!r}: {faults[0].message}"


STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
SCALAR = re.compile(rf'{STRING}"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
PARTIAL = re.compile(
    rf"{STRING}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|-|-?(?:0|[1-9]\d*)(?:\.|(?:\.\d+)?[eE][+-]?)"
    "|t(?:ru?)?|f(?:al?s?)?|n(?:ul?)?"
)


def is_prefix(text: str) -> bool:
    """Return whether a text is the beginning of JSON."""
    stack, expected, index = list[str](), "value", 0
    text = text.rstrip("\ufffd")  # part of a character
    while True:
        while index < len(text) and text[index] in " \t\r\n":
            index += 1
        if index == len(text):
            return True
        character = text[index]
        if expected == "end":
            return False
        if expected in ("value", "value or ]") and character in "[{":
            stack.append(character)
            expected, index = "value or ]" if character == "[" else "name or }", index + 1
        elif (character == "]" and expected in ("value or ]", "comma") and stack[-1] == "[") or (
            character == "}" and expected in ("name or }", "comma") and stack[-1] == "{"
        ):
            stack.pop()
            expected, index = "comma" if stack else "end", index + 1
        elif expected == "comma" and character == ",":
            expected, index = "value" if stack[-1] == "[" else "name", index + 1
        elif expected == "colon" and character == ":":
            expected, index = "value", index + 1
        elif expected not in ("comma", "colon") and (match := SCALAR.match(text, index)):
            if expected.startswith("name"):
                if character != '"':
                    return False
                expected = "colon"
            else:
                expected = "comma" if stack else "end"
            index = match.end()
            if index < len(text) and PARTIAL.fullmatch(text, match.start()):
                return True
        else:
            return expected not in ("comma", "colon") and PARTIAL.fullmatch(text, index) is not None
