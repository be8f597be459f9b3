"""The README and docs/editors.md print the figures of the benchmarks that they link to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EDITORS, README = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/editors.md", "README.md"))


def rows(file: str) -> list[list[str]]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    assert found is not None, text
    return float(found[0])


def assistant(kind: str, column: str) -> dict[str, float]:
    """Return a column of the assistant's table by server. The fastest llama-server is "llama"."""
    head, *_ = (row for row in rows("benchmarks/assistant/README.md") if column in row)
    own = [row for row in rows("benchmarks/assistant/README.md") if row[0] == kind]
    cells = {row[1]: row[head.index(column)] for row in own if len(row) == len(head)}
    return {"llama" if name.startswith("**") else name: number(cell) for name, cell in cells.items() if cell}


def close(printed: str, exact: float) -> bool:
    """Return whether a printed number is a rounded one."""
    text = re.search(r"[\d.]+", printed)
    assert text is not None, printed
    places = len(text[0].partition(".")[2])
    return abs(float(text[0]) - exact) <= 0.51 * 10**-places


@pytest.mark.parametrize(
    ("words", "kind", "server", "column"),
    [
        ("one name changed", "edit of a file", "blockdraft", "tokens/s"),
        ("`prediction`", "edit of a file", "blockdraft prediction", "tokens/s"),
        ("JSON schema", "JSON by schema", "blockdraft", "tokens/s"),
        ("write tests", "tests for a function", "blockdraft", "tokens/s"),
        ("commit message", "commit message", "blockdraft", "whole, s"),
    ],
)
def test_editors_print_the_assistants_figures(words: str, kind: str, server: str, column: str) -> None:
    [row] = [row for row in rows("docs/editors.md") if words in row[0] and len(row) == 4]
    speeds = assistant(kind, column)
    assert close(row[1], speeds["llama"]) and close(row[2], speeds[server]), (row, speeds)
    factor = assistant(kind, "x llama.cpp" if column == "tokens/s" else "x sooner")[server]
    assert close(row[3], factor), (row, factor)


def test_a_line_while_you_type() -> None:
    alone = {row[1]: float(row[2]) for row in rows("benchmarks/typing/README.md") if row[0] == "alone"}
    [row] = [row for row in rows("docs/editors.md") if "while you type" in row[0] and len(row) == 4]
    assert close(row[1], alone["llama-server"]) and close(row[2], alone["blockdraft"])
    printed = re.search(r"type in ([\d.]+) s, against ([\d.]+) s", README)
    assert printed is not None and close(printed[1], alone["blockdraft"]) and close(printed[2], alone["llama-server"])


def test_the_readmes_figure_of_edits() -> None:
    printed = re.search(r"a file returned with a change ([\d.]+)", README)
    speeds = assistant("edit of a file", "tokens/s")
    assert printed is not None and close(printed[1], speeds["blockdraft"] / speeds["blockdraft plain"])
