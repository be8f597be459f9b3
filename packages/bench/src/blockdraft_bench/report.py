"""Results of a benchmark: tables in a terminal, results.json and results.png."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blockdraft.cli.display import SHARES, new_table, number, percent, percents
from blockdraft.errors import counted
from blockdraft.folders import make_folder, write_file
from blockdraft.timing import PARTS
from blockdraft_bench import picture
from blockdraft_bench.methods import PLAIN
from blockdraft_bench.results import Results
from blockdraft_bench.speed import Figures, Profile

RESULTS, PICTURE = "results.json", "results.png"

NOTES = (
    "tokens/s: tokens after each response's first, over wall time without prefill; median of {repeats} (slowest "
    "to fastest). speed-up: over none in the same repeat, median. tau: tokens per step. R: time of a step over that "
    "of none, likewise. S_i: share of steps in which the first i draft tokens were accepted. same: responses identical "
    "to those of none, with the same seed when sampling. loops: responses in which a run of 8 tokens occurs at least 4 "
    "times. Prompts whose plain response loops count in same and loops only."
)
SAMPLED_NOTES = (
    "same is ? for sampled draft tokens if decoding is not greedy: such responses have the target's distribution, and "
    "the tokens for a seed depend on the drafter."
)
PROFILE_NOTES = (
    "Means of one more round. draft pass, head, context: the drafter's layers, its output projection, and keys and "
    "values of committed tokens; a fused pass and head count as the pass. draft choice: choosing draft tokens and "
    "building the tree. observe: the drafter's bookkeeping of committed tokens. bookkeeping: planning, responses, "
    "statistics. host: all but target forward pass, draft pass, head and context."
)


def write(folder: Path, results: Results) -> None:
    """Write results.json, and results.png where matplotlib is installed, each completely or not at all.

    Raises:
        UsageError: A file cannot be written, for instance because the disk is full.
    """
    make_folder(folder)
    (folder / PICTURE).unlink(missing_ok=True)
    write_file(folder / RESULTS, results.as_json().encode())
    if (drawn := picture.draw(results)) is not None:
        write_file(folder / PICTURE, drawn)


def show(console: Console, results: Results) -> None:
    """Print a table for each prompt set and for all sets together, and the meaning of the columns."""
    tables = dict(results.sets)
    if len(tables) > 1:
        tables["all sets"] = results.methods
    arguments = results.arguments
    console.print(f"Target: backend {arguments['running']}, {arguments['dtype']}, on {arguments['device']}")
    notes = {name: f", which {note}" for name, note in arguments["drafter_notes"].items() if note}
    drafters = {name: arguments["kinds"][name] + notes.get(name, "") for name in results.methods if name != PLAIN}
    for drafter in dict.fromkeys(drafters.values()):
        console.print(f"Drafter {drafter}: {', '.join(name for name in drafters if drafters[name] == drafter)}")
    console.print()
    for name, methods in tables.items():
        console.print(_table(console, name, methods), "")
    console.print(NOTES.format(repeats=counted(arguments["repeats"], "repeat")))
    if any(figures.identical is None for figures in results.methods.values()):
        console.print(SAMPLED_NOTES)
    if results.profiles:
        console.print("", _profile_table(console, results.profiles), "")
        console.print(PROFILE_NOTES)


def _table(console: Console, name: str, methods: Mapping[str, Figures]) -> Table:
    plain = methods[PLAIN]
    headers = (">tokens/s", ">range", ">speed-up", ">tau", ">R", f">{SHARES}", ">same %", ">loops %")
    title = f"{name}: {counted(plain.prompts, 'prompt')}, {plain.timed_prompts} timed"
    table = new_table(console, "method", *headers, title=title)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for method, figures in methods.items():
        rates = figures.tokens_per_second_by_repeat
        table.add_row(
            method,
            number(figures.tokens_per_second, 1),
            f"{number(min(rates, default=None), 1)}-{number(max(rates, default=None), 1)}",
            number(figures.speedup, 2),
            number(figures.tau, 2),
            number(figures.step_cost, 2),
            percents(figures.acceptance_by_position),
            percent(figures.identical),
            percent(figures.repetitive),
        )
    return table


def _profile_table(console: Console, profiles: Mapping[str, Profile]) -> Table:
    methods = (f">{method}" for method in profiles)
    table = new_table(console, "part", *methods, title="Where the time of a step goes: ms (%)")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    for part in PARTS:
        spent = [(profile.seconds[part], profile.total) for profile in profiles.values()]
        table.add_row(part, *(f"{1000 * seconds:.3f} ({100 * seconds / total:4.1f})" for seconds, total in spent))
    table.add_row("step", *(f"{1000 * profile.total:.3f} (100.0)" for profile in profiles.values()))
    hosts = ((1000 * profile.host * profile.total, 100 * profile.host) for profile in profiles.values())
    table.add_row("host", *(f"{milliseconds:.3f} ({share:4.1f})" for milliseconds, share in hosts))
    return table
