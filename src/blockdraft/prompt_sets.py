"""Prompt sets: files of JSON lines with one prompt each, and a few built-in prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import UsageError


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file.

    Attributes:
        name: Name of the file without its suffix.
        prompts: Texts in the order of the file.
    """

    name: str
    prompts: tuple[str, ...]


# Default prompts.
SAMPLES = PromptSet(
    "samples",
    (
        "What is 17 plus 25?",
        "Write a Python function that reverses a list.",
        "Name three things that float.",
        "A train goes 60 km in 45 minutes. How fast is it?",
        "Explain in one sentence why the sky is blue.",
        "Write a Python function that counts the vowels of a text.",
        "Tom has 3 boxes of 12 eggs and breaks 5. How many are whole?",
        "Translate 'good morning' into French.",
    ),
)


def read_prompt_sets(paths: Sequence[Path], limit: int | None = None) -> list[PromptSet]:
    """Read prompt files.

    Args:
        paths: Files of lines `{"turns": ["a user's text", ...]}`, of which the first turn is the prompt, or
            `{"prompt": "a text"}`. Other keys and blank lines are ignored.
        limit: Maximum number of prompts per file, from its beginning. Later lines are checked too.

    Raises:
        UsageError: There is no file, a file is empty or cannot be read, a line has another form, two files have the
            same name, or the limit is below 1.
    """
    if not paths:
        raise UsageError("There are no prompts; give at least one file (--prompts FILE).")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}.")
    sets = [PromptSet(path.stem, tuple(_read(path))[:limit]) for path in paths]
    names = [prompt_set.name for prompt_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two prompt files are called {name!r}, which names their results; rename one of them.")
    return sets


def _read(path: Path) -> list[str]:
    prompts = []
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows programs begin files with a byte order mark
            for number, line in enumerate(file, 1):
                try:
                    prompts += [_prompt(line)] if line.strip() else []
                except ValueError as error:
                    raise UsageError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    if not prompts:
        raise UsageError(f"{path} holds no prompts.")
    return prompts


def _prompt(line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f'this is no JSON ({error}); each line must be {{"prompt": "text"}} or {{"turns": ["text", ...]}}.'
        ) from error
    if not isinstance(record, dict) or ("turns" in record) == ("prompt" in record):
        raise UsageError('an object with either "turns" or "prompt" is needed.')
    if record.get("system"):
        raise UsageError('"system" is given, and prompts are a user\'s first message alone; leave it out.')
    if "turns" in record and not (isinstance(record["turns"], list) and record["turns"]):
        raise UsageError('"turns" must be a list of texts that is not empty.')
    text = record["turns"][0] if "turns" in record else record["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"the prompt must be a text that is not empty, got {text!r}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise UsageError(f"the prompt is no valid Unicode text ({error.reason}).") from error
    return text
