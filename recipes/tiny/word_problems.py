"""Arithmetic word problems with worked steps, in the manner of GSM8K; word_problems.txt holds the words and families.

``word_problem(rng)`` draws one family and returns ``(question, answer)``. An answer has one to five lines, each a
sentence with exactly one equation, followed by ``The answer is \\boxed{N}.``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

SENTENCE = re.compile(r"([?-])(?:\(([^)]*)\))? (.*)")
TIMES_WORD = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
FRACTIONS = {2: "half", 3: "one third", 4: "one quarter", 5: "one fifth"}
PERCENTS = [(10, 10), (20, 5), (25, 4), (50, 2), (30, 10), (40, 5), (75, 4)]  # with what the whole is a multiple of
PLURALS: dict[str, str] = {}  # that follow no rule


@dataclass(frozen=True)
class Person:
    """A first name with its pronouns; formats as the name."""

    name: str
    sub: str  # he, she
    obj: str  # him, her
    pos: str  # his, her

    def __str__(self) -> str:
        return self.name

    @property
    def cap(self) -> str:
        return self.sub.capitalize()


@dataclass(frozen=True)
class Item:
    """A countable noun."""

    one: str
    many: str

    def n(self, count: int) -> str:
        """Return '1 apple' or '5 apples'."""
        return f"{count} {self.one if count == 1 else self.many}"


def noun(one: str) -> Item:
    """Build an item, spelling its plural."""
    if one in PLURALS:
        return Item(one, PLURALS[one])
    if one.endswith(("s", "x", "ch", "sh")):
        return Item(one, one + "es")
    if one.endswith("y") and one[-2] not in "aeiou":
        return Item(one, one[:-1] + "ies")
    return Item(one, one + "s")


def nouns(text: str) -> list[Item]:
    """Split a comma-separated list of singular nouns."""
    return [noun(word.strip()) for word in text.split(",")]


def article(word: str) -> str:
    """Return the word with 'a' or 'an' before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def unit(count: int, word: str) -> str:
    """Return '1 hour' or '3 hours'."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def cents(amount: int) -> str:
    """Write an amount of cents in dollars: '$2.50', '$3'."""
    return f"${amount // 100}.{amount % 100:02d}" if amount % 100 else f"${amount // 100}"


def draws(rng: random.Random) -> dict[str, Any]:
    """Return the functions by which the families draw."""

    def two_days() -> list[str]:
        i = rng.randrange(6)
        return WORDS["DAYS"][i : i + 2]

    def percent_pair(most: int = 20) -> tuple[int, int]:
        """Return a percentage, and a whole of which it is an integer."""
        percent, step = rng.choice(PERCENTS)
        return percent, step * rng.randint(2, most)

    def shuffled(items: list[Any]) -> list[Any]:
        rng.shuffle(items)
        return items

    found = {"number": rng.randint, "choice": rng.choice, "sample": rng.sample, "share": rng.random}
    found |= {"one_person": lambda: rng.choice(WORDS["PEOPLE"]), "two_people": lambda: rng.sample(WORDS["PEOPLE"], 2)}
    found |= {"three_people": lambda: rng.sample(WORDS["PEOPLE"], 3)}
    return found | {"two_days": two_days, "percent_pair": percent_pair, "shuffled": shuffled}


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of a file under each heading, with continued lines joined and without comments."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("["):
            lines = found.setdefault(line.strip("[]"), [])
        elif line.startswith(" "):
            lines[-1] += " " + line.strip()
        elif line and not line.startswith("# "):
            lines.append(line)
    return found


def compiled(lines: list[str]) -> CodeType:
    """Return a family as code that sets question, steps and result."""
    drawn, parts, result = [], {"?": [], "-": []}, "None"
    for line in lines:
        if found := SENTENCE.fullmatch(line):
            mark, condition, sentence = found.groups()
            parts[mark].append(f'*([f"""{sentence}"""] if {condition or True} else [])')
        elif line.startswith("= "):
            result = line[2:]
        else:
            drawn.append(line)
    question, steps = (f"[{', '.join(part)}]" for part in parts.values())
    code = [*drawn, f"question, steps, result = ' '.join({question}), {steps}, {result}"]
    return compile("\n".join(code), "word_problems.txt", "exec")


FILE = sections(Path(__file__).with_name("word_problems.txt").read_text(encoding="utf-8"))
PLURALS |= dict(line.split(": ") for line in FILE.pop("plurals"))
WORDS: dict[str, Any] = {}
for kind, read in (("names", None), ("nouns", noun), ("words", None)):
    for line in FILE.pop(kind):
        name, _, listed = line.partition(": ")
        WORDS[name] = [read(word) if read else word for word in listed.split(", ")]
WORDS["PEOPLE"] = [Person(name, "she", "her", "her") for name in WORDS["WOMEN"]]
WORDS["PEOPLE"] += [Person(name, "he", "him", "his") for name in WORDS["MEN"]]
KNOWN = WORDS | {function.__name__: function for function in (noun, nouns, article, unit, cents)}
KNOWN |= {"TIMES_WORD": TIMES_WORD, "FRACTIONS": FRACTIONS}
FAMILIES = {name: compiled(lines) for name, lines in FILE.items()}


def word_problem(rng: random.Random) -> tuple[str, str]:
    """Draw one problem. Returns (question, answer)."""
    drawn: dict[str, Any] = KNOWN | draws(rng)
    exec(rng.choice(list(FAMILIES.values())), drawn)
    return drawn["question"], "\n".join([*drawn["steps"], f"The answer is \\boxed{{{drawn['result']}}}."])


if __name__ == "__main__":
    demo = random.Random()
    for _ in range(10):
        print("\n".join(word_problem(demo)), end="\n\n")
