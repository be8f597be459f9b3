"""Results of servers under load as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blockdraft.cli.display import SHARES, new_table, number, percents
from blockdraft.errors import counted
from blockdraft.folders import make_folder, write_file
from blockdraft_bench.servers.measure import LoadResults

JSON = "server.json"
NOTES = (
    "tokens/s: of all requests together, at full concurrency. first, token: milliseconds to the first piece of a "
    "response, and between tokens after it; medians over responses (95th percentile). tau: tokens per target forward "
    "pass, from the server's metrics (for SGLang those of its latest steps). S_i: share of steps in which the first i "
    "draft tokens were accepted."
)


def as_json(results: LoadResults, arguments: Mapping[str, Any]) -> str:
    whole = asdict(results) | {"arguments": dict(arguments), "blockdraft": version("blockdraft")}
    return json.dumps(whole, indent=2) + "\n"


def write(folder: Path, results: LoadResults, arguments: Mapping[str, Any]) -> None:
    """Write server.json, completely or not at all."""
    make_folder(folder)
    write_file(folder / JSON, as_json(results, arguments).encode())


def show(console: Console, results: LoadResults) -> None:
    for name, info in results.servers.items():
        caching = {True: "on", False: "off", None: "not known"}[info.prefix_caching]
        console.print(
            f"{name}: {info.model} at {info.url}, engine {info.engine or 'not known'}, prefix caching {caching} "
            f"({info.seen_by})"
        )
    console.print("", _table(console, results), "")
    console.print(NOTES)
    if results.equality is not None:
        equality = results.equality
        console.print(f"\nGreedy answers of both servers: {equality.identical} of {equality.prompts} are identical.")
        for difference in equality.differences:
            console.print(
                f"- prompt {difference.prompt} of {difference.prompt_set}, from character {difference.at} on: "
                f"{difference.text!r} and {difference.other!r}",
                markup=False,
            )
    failed = sum(level.failed for level in results.levels)
    if failed:
        console.print(f"\n{counted(failed, 'request')} failed: {'; '.join(results.problems[:3])}", markup=False)


def _table(console: Console, results: LoadResults) -> Table:
    headers = ["T", "at once", "requests", "tokens/s", "first ms", "token ms", "tau", SHARES]
    headers += ["speed-up"] if results.equality else []
    table = new_table(console, "prompts", "server", *(f">{header}" for header in headers))
    for column in table.columns[:2]:
        column.overflow = "fold"
    for level in results.levels:
        cells = [
            level.prompt_set,
            level.server,
            f"{level.temperature:g}",
            str(level.concurrency),
            f"{level.requests - level.failed}/{level.requests}" if level.failed else str(level.requests),
            number(level.tokens_per_second, 1),
            _spread(level.first_median, level.first_p95, 1),
            _spread(level.token_median, level.token_p95, 2),
            number(level.tau, 2),
            percents(level.acceptance_by_position) or "?",
            number(level.speedup, 2),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _spread(median: float | None, p95: float | None, digits: int) -> str:
    return "?" if median is None or p95 is None else f"{1000 * median:.{digits}f} ({1000 * p95:.{digits}f})"
