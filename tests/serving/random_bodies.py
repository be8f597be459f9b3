"""Random requests made from the server's OpenAPI description: every route, and bodies that mostly fit it."""

from __future__ import annotations

import gzip
import json
import zlib
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

from serving_client import MODEL

ODD: list[Any] = [None, True, 0, -1, 1.0, 0.5, 1e300, 2**63, "", "a", "\x00", "\u2028", "<|im_end|>", [], [[]], {}]
ODD += [{"type": "function"}, [{"role": "user", "content": "x"}], {"$ref": "#"}, "{", '{"a":', [0] * 50, "9" * 400]
TEXTS = ["the ant", "", "é\u2028", "x" * 300, '{"a": 1}', "<tool_call>", "auto", "required", "json", "f", MODEL]
MISSING = ("/api/embed", "/api/embeddings", "/api/pull", "/api/create", "/api/copy", "/api/push")  # always 501
ENCODINGS = {"gzip": gzip.compress, "deflate": zlib.compress}


class RandomRequest(NamedTuple):
    method: str
    path: str
    content: bytes
    headers: dict[str, str]


class RequestMaker:
    """Makes random requests.

    Args:
        openapi: The server's description of its routes.
    """

    def __init__(self, openapi: dict[str, Any], seed: int) -> None:
        self.random = Random(seed)
        self.openapi = openapi
        self.odd = self.random.choice([0, 0.01, 0.05, 0.3])

    def request(self) -> RandomRequest:
        path = self.random.choice(sorted(self.openapi["paths"]))
        method = self.random.choice(sorted(self.openapi["paths"][path]))
        body = self.openapi["paths"][path][method].get("requestBody")
        place = path
        for parameter in ("response_id", "name"):
            place = place.replace("{" + parameter + "}", quote(self.random.choice([MODEL, "resp_1", "é/..", "%00"])))
        if body is None:
            return RandomRequest(method.upper(), place, b"", {"Content-Type": "application/json"})
        value = self.value(body["content"]["application/json"]["schema"])
        if isinstance(value, dict) and self.random.random() < 0.9:
            value["model"] = MODEL
            self._bound(value)
        content = json.dumps(value).encode()
        headers = {"Content-Type": "application/json"}
        if self.random.random() < 0.1:
            name = self.random.choice(sorted(ENCODINGS))
            content, headers = ENCODINGS[name](content), headers | {"Content-Encoding": name}
        if self.random.random() < 0.02:
            content = content[: self.random.randint(0, len(content))] + self.random.randbytes(2)
        return RandomRequest(method.upper(), place, content, headers)

    def _bound(self, value: dict[str, Any]) -> None:
        """Keep the output short, so that many requests take little time."""
        for name in ("max_tokens", "max_output_tokens", "n_predict"):
            if isinstance(value.get(name), int | float) or self.random.random() < 0.9:
                value[name] = self.random.choice([1, 2, 8])
        if isinstance(value.get("n"), int):
            value["n"] = self.random.choice([1, 2])
        options = value.get("options")
        value["options"] = (options if isinstance(options, dict) else {}) | {"num_predict": 4}

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Return a value of a schema, or now and then another."""
        if self.random.random() < self.odd or not isinstance(schema, dict) or depth > 9:
            return self.random.choice(ODD)
        if reference := schema.get("$ref"):
            return self.value(self.openapi["components"]["schemas"][reference.rpartition("/")[2]], depth + 1)
        if "const" in schema or "enum" in schema:
            return self.random.choice([schema["const"]] if "const" in schema else schema["enum"])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(self.random.choice(options), depth + 1)
        kind = schema.get("type")
        if kind == "object":
            properties = schema.get("properties", {})
            required = set(schema.get("required", ()))
            share = self.random.choice([0.05, 0.2, 0.6])
            names = [name for name in properties if name in required or self.random.random() < share]
            if not properties:
                return self.random.choice([{}, {"a": self.random.choice(ODD)}, {"type": "object", "properties": {}}])
            return {name: self.value(properties[name], depth + 1) for name in names}
        if kind == "array":
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
            high = min(schema.get("maximum", schema.get("exclusiveMaximum", 9)), low + 20)
            value = self.random.choice([low, self.random.uniform(low, high), high])
            return value if kind == "number" else self.random.choice([int(value), float(int(value))])
        if kind == "boolean":
            return self.random.random() < 0.5
        return None if kind == "null" else self.random.choice(TEXTS) if kind == "string" else self.random.choice(ODD)
