"""Word problems, and the numbers that answer them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import UsageError

# What the bundled target was trained to be asked with, as in recipes/tiny.
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASKED_SEED, LEARNED_SEED = 20_000_003, 20_000_033  # no corpus of recipes/tiny is made with these


@dataclass(frozen=True)
class Problem:
    prompt: str
    result: str


def number_in(answer: str) -> str:
    """What the last box of an answer holds, or else what follows "####", as GSM8K has it; "" where there is neither."""
    _, mark, rest = answer.rpartition("\\boxed{")
    found = rest.partition("}")[0] if mark else answer.rpartition("####")[2] if "####" in answer else ""
    return found.strip().replace(",", "").replace("$", "")


def read_problems(path: Path) -> list[Problem]:
    """Problems of a file in the form of GSM8K, lines {"question", "answer"}.

    Raises:
        UsageError: It cannot be read, or a line is of another form or has no result.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); --problems takes JSON lines.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            problem = Problem(row["question"] + REQUEST, number_in(row["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            form = '{"question": "text", "answer": "text"}'
            raise UsageError(f"{path}, line {number}, is not of the form {form} ({error!r}).") from error
        if not problem.result:
            raise UsageError(
                f'{path}, line {number}: the answer has neither a \\boxed{{}} nor "####" before its result.'
            )
        found.append(problem)
    if not found:
        raise UsageError(f"{path} holds no problem.")
    return found


def own_problems(count: int, seed: int, known: Collection[Problem] = ()) -> list[Problem]:
    """Problems that recipes/tiny makes, none of them known or twice."""
    recipes = str(Path(__file__).parents[2] / "recipes" / "tiny")
    if recipes not in sys.path:
        sys.path.insert(0, recipes)
    from word_problems import word_problem

    rng, found = random.Random(seed), dict.fromkeys(known)
    while len(found) < len(known) + count:
        question, answer = word_problem(rng)
        found.setdefault(Problem(question + REQUEST, number_in(answer)))
    return list(found)[len(known) :]
