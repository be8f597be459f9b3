"""Results of servers under load, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from blockdraft.data.folder import make_folder, write_file
from blockdraft.errors import counted
from blockdraft.evaluation.servers.measure import Level, Measured

JSON, CSV = "server.json", "server.csv"
SHOWN_POSITIONS = 4  # of S_i in the table; the files have all
NOTES = (
    "tokens/s: of all requests together, while as many as asked for were under way. first, token: milliseconds to the "
    "first piece of an answer, and between tokens after it; medians over answers (95th percentile). tau: tokens of a "
    "cycle, by the server's metrics (of SGLang those of its newest cycles). S_i: share of cycles in which the first i "
    "guesses were accepted."
)


def as_json(found: Measured, arguments: Mapping[str, Any]) -> str:
    whole = asdict(found) | {"arguments": dict(arguments), "blockdraft": version("blockdraft")}
    return json.dumps(whole, indent=2) + "\n"


def as_csv(found: Measured) -> str:
    """CSV with a line for each level; S_1, S_2, ... are in one cell with spaces between them."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Level)], lineterminator="\n")
    table.writeheader()
    for level in found.levels:
        shares = " ".join(f"{share:.4f}" for share in level.acceptance_by_position)
        table.writerow(asdict(level) | {"acceptance_by_position": shares})
    return text.getvalue()


def write(folder: Path, found: Measured, arguments: Mapping[str, Any]) -> None:
    """Write server.json and server.csv, each whole or not at all."""
    make_folder(folder)
    write_file(folder / JSON, as_json(found, arguments).encode())
    write_file(folder / CSV, as_csv(found).encode())


def show(console: Console, found: Measured) -> None:
    """Print the results."""
    for name, about in found.servers.items():
        caching = {True: "on", False: "off", None: "not known"}[about.prefix_caching]
        console.print(
            f"{name}: {about.model} at {about.url}, engine {about.engine or 'not known'}, prefix caching {caching} "
            f"({about.seen_by})"
        )
    console.print()
    console.print(_table(found, box.SIMPLE if console.is_terminal else None))
    console.print()
    console.print(NOTES)
    if found.equality is not None:
        equality = found.equality
        console.print(f"\nGreedy answers of both servers: {equality.identical} of {equality.prompts} are identical.")
        for each in equality.differences:
            console.print(
                f"- prompt {each.prompt} of {each.prompt_set}, from character {each.at} on: {each.text!r} and "
                f"{each.other!r}",
                markup=False,
            )
    failed = sum(level.failed for level in found.levels)
    if failed:
        console.print(f"\n{counted(failed, 'request')} failed: {'; '.join(found.problems[:3])}", markup=False)


def _table(found: Measured, lines: box.Box | None) -> Table:
    table = Table(box=lines, pad_edge=False)
    for name in ("prompts", "server"):
        table.add_column(name, overflow="fold")
    headers = ["T", "at once", "requests", "tokens/s", "first ms", "token ms", "tau", f"S_1..S_{SHOWN_POSITIONS} %"]
    for header in [*headers, *(["speed-up"] if found.equality else [])]:
        table.add_column(header, justify="right")
    for level in found.levels:
        cells = [
            level.prompt_set,
            level.server,
            f"{level.temperature:g}",
            str(level.concurrency),
            f"{level.requests - level.failed}/{level.requests}" if level.failed else str(level.requests),
            _number(level.tokens_per_second, 1),
            _spread(level.first_median, level.first_p95, 1),
            _spread(level.token_median, level.token_p95, 2),
            _number(level.tau, 2),
            " ".join(f"{100 * share:.0f}" for share in level.acceptance_by_position[:SHOWN_POSITIONS]) or "?",
            _number(level.speedup, 2),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _spread(median: float | None, p95: float | None, digits: int) -> str:
    return "?" if median is None or p95 is None else f"{1000 * median:.{digits}f} ({1000 * p95:.{digits}f})"
