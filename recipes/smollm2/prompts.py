"""Prompts of the drafter's training data: which task asks what, and which prompts are fit to be asked.

Tasks are numbered. Their kinds alternate in a fixed pattern, so any number of first tasks is the same mixture of chat,
mathematics and code. Half of them ask what the target itself writes in the user's place (Magpie, arXiv 2406.08464);
the others ask lines of public sets, which a folder of the user's holds. A public prompt is named by its set and its
line, and `public_prompt` makes it again.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PATTERN = ["magpie", "instructions", "magpie", "gsm8k_train", "magpie_code", "magpie"]
PATTERN += ["thealgorithms_python", "magpie", "magpie_maths", "math_train", "magpie", "leetcode_python"]
SYSTEM = {  # system messages under which the target writes prompts; None is that of its template
    "magpie": None,
    "magpie_code": "You are an AI assistant that helps people to write, explain and repair Python programs.",
    "magpie_maths": "You are an AI assistant that solves word problems and other problems of mathematics step by step.",
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WRITE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
GRAM = 13  # words that a training prompt may not share with a measured one
COMMON = re.compile(
    r"\b(the|an?|of|to|in|is|are|and|for|that|with|what|how|i|you|my|can|be|on|it|this|do|which|from|as|your)\b"
)


def measured_grams(files: Iterable[Path]) -> set[tuple[str, ...]]:
    """Return all runs of `GRAM` words in the texts of JSON-lines files."""
    found: set[tuple[str, ...]] = set()
    for file in files:
        for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n"):
            for text in _texts(json.loads(line)):
                found |= grams(text)
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def grams(text: str) -> set[tuple[str, ...]]:
    """Return the runs of words of a text."""
    words = re.findall(r"[a-z0-9]+", bare(text).lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def bare(text: str) -> str:
    """Return a prompt without the text that a template puts around it."""
    for part in (BOXED, *WRITE.split("{}")):
        text = text.replace(part.strip(), "")
    return text


def unfit(prompt: str, measured: set[tuple[str, ...]], asked: set[str]) -> str | None:
    """Return why a prompt is left out, or None if it is not. `asked` holds the `key` of every prompt before."""
    words = re.findall(r"[a-z']+", bare(prompt).lower())
    if not 3 <= len(words) <= 250 or len(prompt) > 1600:
        return "length"
    if sum(character.isascii() for character in prompt) < 0.97 * len(prompt):
        return "not English"
    if "<|" in prompt:
        return "special token"
    if not COMMON.search(" ".join(words)):
        return "not English"
    if len(set(words)) < 0.25 * len(words):
        return "repeats itself"
    if key(prompt) in asked:
        return "asked before"
    return None if measured.isdisjoint(grams(prompt)) else "measured"


def key(prompt: str) -> str:
    """Return the first 60 letters, which near-duplicate prompts share."""
    return "".join(re.findall(r"[a-z]+", bare(prompt).lower()))[:60]


class PublicPrompts:
    """Prompts of the sets in a folder, each set in a random order that is always the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders: dict[str, list[int]] = {}

    def name(self, source: str, count: int) -> dict[str, Any] | None:
        """Return the name of prompt number `count` of a set, or None if it has fewer lines."""
        if source not in self._orders:
            order = list(range(len(_lines(self.folder / f"{source}.jsonl"))))
            random.Random(source).shuffle(order)
            self._orders[source] = order
        order = self._orders[source]
        return {"source": source, "line": order[count]} if count < len(order) else None

    def text(self, source: str, line: int) -> str | None:
        """Return a prompt by its name, or None if its line holds no question."""
        return public_prompt(source, json.loads(_lines(self.folder / f"{source}.jsonl")[line]))


@cache
def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").rstrip("\n").split("\n")


def public_prompt(source: str, row: dict[str, Any]) -> str | None:
    """Return the user's message for a line of a set, or None if the line holds no question."""
    match source:
        case "instructions":
            return str(row["prompt"]).strip()
        case "gsm8k_train":
            return row["question"] + BOXED
        case "math_train":
            return row["problem"] + BOXED
        case "thealgorithms_python":
            return _function(row["text"])
        case "leetcode_python":
            return _solution(row["path"], row["text"])
    raise ValueError(f"{source} is no set of prompts; give one of {', '.join(sorted(set(PATTERN)))}.")


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _function(text: str) -> str | None:
    """Return the function with the longest docstring that has examples, without its body, as in HumanEval."""
    tree = _parsed(text)
    found = [
        node
        for node in (tree.body if tree else ())
        if isinstance(node, ast.FunctionDef) and ">>>" in (ast.get_docstring(node) or "")
    ]
    if not found:
        return None
    best = max(found, key=lambda node: len(ast.get_docstring(node) or ""))
    head = "\n".join(text.splitlines()[best.lineno - 1 : best.body[0].end_lineno])
    return WRITE.format(head + "\n")


def _solution(path: str, text: str) -> str | None:
    """Return the first method of a LeetCode solution, without its body, under the problem's name."""
    tree = _parsed(text)
    classes = [node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef)]
    methods = [node for node in (classes[0].body if classes else ()) if isinstance(node, ast.FunctionDef)]
    if not methods or not ast.get_docstring(methods[0]):
        return None
    name = Path(path).stem.replace("-", " ").replace("_", " ")
    head = "\n".join(text.splitlines()[methods[0].lineno - 1 : methods[0].body[0].end_lineno])
    return f'Solve the problem "{name}" in Python:\n```python\nclass Solution:\n{head}\n```'


def kind_of(task: int) -> tuple[str, int]:
    """Return the kind of a task, and how many tasks of that kind come before it."""
    rounds, place = divmod(task, len(PATTERN))
    kind = PATTERN[place]
    return kind, rounds * PATTERN.count(kind) + PATTERN[:place].count(kind)
