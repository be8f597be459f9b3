"""Requests of a coding assistant, made from source files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from random import Random
from typing import Any

EDIT, JSON, TESTS, COMMIT = "edit of a file", "JSON by schema", "tests for a function", "commit message"
KINDS = (EDIT, JSON, TESTS, COMMIT)
LINES = range(60, 86)  # of an edited file
NAME_LENGTH, NAME_USES = 5, range(4, 13)  # of the renamed variable
FUNCTION_LINES = range(6, 31)  # of the function that is tested or committed


@dataclass(frozen=True)
class Task:
    """A request for a chat completion.

    Attributes:
        name: Which of its kind.
        fields: Fields of the request.
        prediction: The predicted output, or an empty text.
    """

    kind: str
    name: int
    fields: dict[str, Any]
    prediction: str = ""


def make_tasks(texts: Sequence[str], count: int, kinds: Sequence[str] = KINDS) -> list[Task]:
    """Return some tasks of each kind, all kinds in each round.

    Raises:
        ValueError: Too few files suit.
    """
    texts = Random(0).sample(texts, len(texts))
    makers = {EDIT: _edits(texts), JSON: _records(Random(1)), TESTS: _tests(texts), COMMIT: _commits(texts)}
    chosen = {kind: list(islice(makers[kind], count)) for kind in kinds}
    if few := [kind for kind, fields in chosen.items() if len(fields) < count]:
        raise ValueError(f"The files suit {len(chosen[few[0]])} requests of the kind {few[0]!r}; {count} were asked.")
    return [Task(kind, i, *chosen[kind][i]) for i in range(count) for kind in kinds]


def _chat(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **fields}


def _edits(texts: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    for text in texts:
        name = _frequent_name(text) if len(text.splitlines()) in LINES else None
        if name is not None:
            ask = f"Rename `{name}` to `current_{name}`. Return the whole file and nothing else."
            yield _chat(f"{ask}\n\n```python\n{text}```", 1600), f"```python\n{text}```"


def _tests(texts: Sequence[str]) -> Iterator[tuple[dict[str, Any]]]:
    for text in texts:
        if function := _function(text):
            yield (_chat(f"Write pytest tests for this function.\n\n```python\n{function}\n```", 320),)


def _commits(texts: Sequence[str]) -> Iterator[tuple[dict[str, Any]]]:
    for text in texts:
        if function := _function(text):
            before, after = (part.splitlines(keepends=True) for part in (text.replace(function, ""), text))
            diff = "".join(unified_diff(before, after, "a/module.py", "b/module.py"))
            ask = "Write a commit message for this change: a subject line, and a body of two or three sentences."
            yield (_chat(f"{ask}\n\n```diff\n{diff}```", 160),)


def _frequent_name(text: str) -> str | None:
    """Return the variable that occurs most often, or None if none suits."""
    tree = _parsed(text)
    if tree is None:
        return None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    counts = Counter(re.findall(r"\w+", text))
    names = {name for name in names if len(name) >= NAME_LENGTH and not name.startswith("_")}
    fit = [name for name in sorted(names) if counts[name] in NAME_USES]
    return max(fit, key=counts.__getitem__, default=None)


def _function(text: str) -> str | None:
    """Return the first function of a fitting length that is not decorated and not a test, or None."""
    tree = _parsed(text)
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.FunctionDef) and not (node.decorator_list or node.name.startswith("test")):
            source = ast.get_source_segment(text, node)
            if source is not None and len(source.splitlines()) in FUNCTION_LINES:
                return source
    return None


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # another language
        return None


TEXT, WHOLE, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
FIELDS: dict[str, dict[str, Any]] = {
    "ticket_number": WHOLE,
    "reported_on": TEXT,
    "reporter_name": TEXT,
    "reporter_email": TEXT,
    "company": TEXT,
    "city": TEXT,
    "country": TEXT,
    "product": TEXT,
    "product_version": TEXT,
    "operating_system": TEXT,
    "processor": TEXT,
    "memory_gigabytes": WHOLE,
    "error_code": TEXT,
    "error_message": TEXT,
    "severity": {"enum": ["low", "medium", "high", "critical"]},
    "is_reproducible": TRUTH,
    "affected_users": WHOLE,
    "workaround": TEXT,
    "assigned_team": TEXT,
    "needs_answer_by": TEXT,
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
REPORT = (
    "On {day} March 2026 {name} of {company} in {city}, {country}, wrote from {email} that {product} {version} stops "
    "after an hour on {system} ({processor}, {memory} GB of memory). The log ends with {code}: {message}. It happens "
    "every time, to all {users} users of the department, and they call it {severity}. Restarting the service each "
    "morning helps until noon. The {team} team has ticket {ticket} and must answer by {later} March 2026."
)
CHOICES = {
    "name": ("Mara Lindqvist", "Tomas Herrera", "Aiko Brandt", "Samuel Okafor"),
    "company": ("Northwind Freight", "Halden Optics", "Ruiz and Daughters", "Blue Quay Insurance"),
    "city": ("Gothenburg", "Valencia", "Leipzig", "Port Harcourt"),
    "country": ("Sweden", "Spain", "Germany", "Nigeria"),
    "product": ("Ledger Sync", "Route Planner", "Archive Server", "Print Gateway"),
    "system": ("Debian 12", "Windows Server 2022", "Ubuntu 24.04", "macOS 15"),
    "processor": ("AMD Ryzen 9 7950X", "Intel Core i7-13700", "Apple M3 Pro", "Ampere Altra Q80"),
    "code": ("E-4012", "SYNC-77", "0x8007000E", "PG-1183"),
    "message": ("the queue is full", "no lease could be renewed", "out of memory", "the peer closed the stream"),
    "severity": ("low", "medium", "high", "critical"),
    "team": ("storage", "network", "desktop", "platform"),
}
NUMBERS = {"day": (1, 14), "later": (15, 31), "memory": (8, 128), "users": (3, 90), "ticket": (10000, 99999)}


def _records(random: Random) -> Iterator[tuple[dict[str, Any]]]:
    form = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA, "strict": True}}
    while True:
        facts: dict[str, Any] = {name: random.choice(choices) for name, choices in CHOICES.items()}
        facts |= {name: random.randint(*limits) for name, limits in NUMBERS.items()}
        facts |= {"version": f"{random.randint(2, 9)}.{random.randint(0, 30)}.{random.randint(0, 9)}"}
        facts |= {"email": f"{facts['name'].lower().replace(' ', '.')}@example.com"}
        text = f"Extract the ticket as JSON.\n\n{REPORT.format(**facts)}"
        yield (_chat(text, 640, response_format=form),)
