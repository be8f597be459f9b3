"""Random requests from the server's own OpenAPI document, and broken ones.

A case is a number: the same seed and number make the same request again. No answer may be 5xx, and none may be missing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import h11

from benchmarks.harness.command import tell
from benchmarks.server import tiny
from benchmarks.server.client import Exchange, exchange, parse
from benchmarks.server.servers import HOST, Server, ours

MODEL = "random"
AT_A_TIME, PATIENCE, MOST_FAILURES = 4, 60.0, 20
KEPT_EVERY = 200  # cases after which the place is kept
WORDS = ("", "a", "user", "assistant", "\x00", "\ud800", "é" * 20, "<tool_call>", "<think>", "{}", "../../etc",
         "x" * 5000)  # fmt: skip
ODD = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "", [], {})
HEADERS = ({"Content-Type": "text/plain"}, {"Content-Type": ""}, {"Accept": "nothing/x"}, {"Host": "example.org"},
           {"Origin": "https://example.org"}, {"Authorization": "Bearer x"}, {"X-Long": "x" * 5000}, {})  # fmt: skip


@dataclass(frozen=True)
class Case:
    path: str
    body: bytes
    headers: dict[str, str]


class Maker:
    """Makes requests from an OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.routes = [
            (path, route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"))
            for path, routes in sorted(document["paths"].items())
            for method, route in sorted(routes.items())
            if method == "post"
        ]

    def case(self, seed: int, number: int) -> Case:
        random = Random(f"{seed}-{number}")
        path, schema = random.choice(self.routes)
        value = self.value(schema or {}, random, 0)
        if isinstance(value, dict):
            self._settle(value, random)
        for _ in range(random.choice((0, 0, 0, 1, 1, 3))):
            value = self._mutated(value, random)
        if isinstance(value, dict):
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):  # long answers show nothing new
                if isinstance(value.get(name), int) and 8 < value[name] < 2**20:
                    value[name] = 8
        body = json.dumps(value).encode()
        if random.random() < 0.05:
            body = _torn(body, random)
        return Case(path, body, random.choice(HEADERS) if random.random() < 0.1 else {})

    def _settle(self, value: dict[str, Any], random: Random) -> None:
        """Make most requests valid."""
        if "model" in value and random.random() < 0.9:
            value["model"] = MODEL
        if random.random() < 0.8 and ("messages" in value or "prompt" in value or "input" in value):
            value.setdefault("max_tokens", random.randint(1, 8))
        for message in value.get("messages") or ():
            if isinstance(message, dict) and random.random() < 0.9:
                message["content"] = random.choice(("Hello", "How many?", "x " * 30))

    def value(self, schema: dict[str, Any], random: Random, depth: int) -> Any:
        """Something of this schema, or close to it."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.value(random.choice(schema[several]), random, depth)
        if "allOf" in schema:
            return self.value(schema["allOf"][0], random, depth)
        if "const" in schema or "enum" in schema:
            return random.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type") or random.choice(("string", "integer", "object", "null"))
        if kind == "object" or (kind == "array" and depth > 6):
            required, found = schema.get("required", ()), {}
            for name, each in schema.get("properties", {}).items():
                if name in required or random.random() < 0.15:
                    found[name] = self.value(each, random, depth + 1)
            if not schema.get("properties") and random.random() < 0.5:
                found[random.choice(WORDS)] = random.choice(ODD)
            return found if kind == "object" else []
        if kind == "array":
            most = min(schema.get("maxItems", 3), 3)
            items = schema.get("items") or {}
            count = random.randint(schema.get("minItems", 0), most)
            return [self.value(items, random, depth + 1) for _ in range(count)]
        if kind == "boolean":
            return random.random() < 0.5
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
            high = schema.get("maximum", schema.get("exclusiveMaximum", 300))
            value = random.uniform(max(low, -(10**6)), min(high, 10**6))
            value = random.choice((low, high, *[value] * 8))
            return int(value) if kind == "integer" else value
        return None if kind == "null" else random.choice(WORDS)

    def _mutated(self, value: Any, random: Random) -> Any:
        """The value with one part broken."""
        if isinstance(value, dict) and value and random.random() < 0.97:
            name = random.choice(list(value))
            what = random.random()
            if what < 0.2:
                return {other: value[other] for other in value if other != name}
            if what < 0.3:
                return value | {random.choice((*WORDS, "model", "stream", "n")): random.choice(ODD)}
            return value | {name: self._mutated(value[name], random)}
        if isinstance(value, list) and value and random.random() < 0.8:
            place = random.randrange(len(value))
            if random.random() < 0.2:
                return value * random.choice((0, 2, 50))
            return [*value[:place], self._mutated(value[place], random), *value[place + 1 :]]
        nested: Any = value
        if random.random() < 0.1:
            for _ in range(random.choice((1, 20, 400))):
                nested = [nested] if random.random() < 0.5 else {"a": nested}
            return nested
        return random.choice((*ODD, *WORDS))


def _torn(body: bytes, random: Random) -> bytes:
    """Bytes of a body cut off, changed, or doubled."""
    place, what = random.randrange(len(body) + 1), random.randrange(4)
    if what == 0:
        return body[:place]
    if what == 1:
        return body[:place] + bytes(random.randrange(256) for _ in range(random.randint(1, 8))) + body[place:]
    return body + body if what == 2 else b"\xef\xbb\xbf" + body


async def send(port: int, case: Case) -> tuple[int, str]:
    """Status (0 without a whole answer) and body."""
    try:
        found: Exchange = await asyncio.wait_for(exchange(HOST, port, case.path, case.body, case.headers), PATIENCE)
    except asyncio.TimeoutError:
        return 0, f"no end within {PATIENCE:g} s"
    except h11.LocalProtocolError as error:
        return -1, f"it cannot be sent: {error}"
    answer = parse(found)
    failed = [event for _, event in answer.events if "error" in event or event.get("type") == "error"]
    if failed and ("server_error" in str(failed[0]) or "api_error" in str(failed[0])):
        return 500, str(failed[0])
    return answer.status if answer.whole else 0, found.error or answer.body


async def cases(server: Server, maker: Maker, seed: int, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Send some cases; returns counts of statuses, and failures."""
    statuses, failures, numbers = Counter[str](), list[str](), iter(range(first, first + count))

    async def stream() -> None:
        for number in numbers:
            case = maker.case(seed, number)
            status, said = await send(server.port, case)
            statuses[str(status)] += 1
            if status == 0 or status >= 500:
                asked = f"case {number}, POST {case.path} {case.body[:300]!r} {case.headers}"
                failures.append(f"{asked}: {status} {said[:200]!r}")

    await asyncio.gather(*(stream() for _ in range(AT_A_TIME)))
    return statuses, failures


def run(count: int, seed: int, out: Path) -> list[str]:
    """Send cases up to this number, resuming; returns failures."""
    path = out / f"fuzz-{seed}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"done": 0, "statuses": {}, "failures": []}
    with tempfile.TemporaryDirectory() as folder:
        target = tiny.random_target(Path(folder) / MODEL)
        server = ours(target, "prompt_lookup", out / "fuzz.log", 1)
        try:
            maker = Maker(json.loads(server.get("/openapi.json")))
            while kept["done"] < count and len(kept["failures"]) < MOST_FAILURES:
                part = min(KEPT_EVERY, count - kept["done"])
                statuses, failures = asyncio.run(cases(server, maker, seed, kept["done"], part))
                kept["done"] += part
                kept["statuses"] = dict(Counter(kept["statuses"]) + statuses)
                kept["failures"] += failures
                path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
                said = dict(sorted(kept["statuses"].items()))
                tell(f"{kept['done']} of {count}: {said}, {len(kept['failures'])} failed")
        finally:
            status = server.close()
    return [*kept["failures"], *([f"the server ended with {status}"] if status else [])]
