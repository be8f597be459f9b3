"""Retired words do not come back into names, docstrings, comments, messages and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Parts of names, between underscores or capitals: use the word on the right.
NAMES = {
    "guess": "draft token",
    "guesses": "draft tokens",
    "tap": "target layer",
    "taps": "target layers",
    "tapped": "target layer",
    "chances": "acceptance probabilities",
    "trust": "calibration",
    "hopes": "upper bound",
    "wipe": "zero",
    "wiped": "zeroed",
    "told": "logged, or what it is",
    "looping": "repetitive",
}
ALLOWED_NAMES = {"trust_remote_code", "require_tap"}  # of other projects
# Phrases of prose, in comments, strings and docs.
PHRASES = {
    r"guess(es|ed)?": "draft token",
    r"(an? |the |last |first )tap|taps|tapped": "target layers",
    r"chances": "acceptance probabilities",
    r"hopes": "upper bounds",
    r"wip(e|es|ed)": "zero",
    r"round_bits": "qat_bits",
    r"in turns(?![)(\]}:]| if | for )": "interleaved",
    r"(answers? (that )?loops?|looping answers?)": "repetitive output",
    r"(weights? )?of few bits": "quantized",
    r"features of (the )?(nodes?|layers?|tokens?|target)": "hidden states",
}
# Where a target layer is a weight of a short convolution.
CONVOLUTIONS = (
    "src/blockdraft/drafters/dflash2/",
    "src/blockdraft/kernels/cpu/",
    "src/blockdraft/nn/recurrent_mixer.py",
    "tests/kernels/cpu/",
)
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "docs", "examples", "recipes", "src", "tests", ".")
    for pattern in (("*.md",) if folder == "." else ("**/*.py", "**/*.md", "**/*.[ch]"))
    for path in (ROOT / folder).glob(pattern)
    if path != Path(__file__)
)


@cache
def replacement_of(name: str) -> str | None:
    """Return the replacement of a name that holds a retired word, else None."""
    if name in ALLOWED_NAMES or ("_" not in name and name == name.lower()):
        return None
    return next((NAMES[part.lower()] for part in re.findall(r"[A-Z]?[a-z]+", name) if part.lower() in NAMES), None)


def retired(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the retired word and its replacement, for each in a text."""
    for match in re.finditer(r"[A-Za-z_][A-Za-z0-9_]*", text):
        if (instead := replacement_of(match[0])) is not None:
            yield text.count("\n", 0, match.start()) + 1, match[0], instead
    for pattern, instead in PHRASES.items():
        for match in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, match[0], instead


@pytest.mark.parametrize("folder", sorted({file.partition("/")[0] for file in FILES if "/" in file} | {"."}))
def test_no_retired_words(folder: str) -> None:
    lines = []
    for file in FILES:
        if (file.partition("/")[0] if "/" in file else ".") != folder:
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        if file.startswith(CONVOLUTIONS):
            text = re.sub(r"\btaps\b", "", text)
        lines += [f"{file}:{number}: {word!r}; write {instead!r}" for number, word, instead in retired(text)]
    assert not lines, "\n".join(lines)
