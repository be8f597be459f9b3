"""`blockdraft inspect`: what a checkpoint is, whether it fits a target, and how engines start with it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from blockdraft.cli.display import new_table, standard, tell
from blockdraft.cli.options import MACHINE, CommandSpec
from blockdraft.cli.target import AsJson, quiet
from blockdraft.settings import Flag, settings
from blockdraft.timing import telling

if TYPE_CHECKING:
    from blockdraft_tools.inspect import Report

LAYERS = (
    "target layers: blockdraft and z-lab count the layers whose outputs are read, from 0; others the layers that read "
    "them"
)
MARKS = {True: ("yes", "green"), False: ("no", "bold red"), None: ("not known", "")}


@settings
class InspectSettings:
    """What a checkpoint is checked against."""

    target: Annotated[str | None, Flag(metavar="DIR")] = Field(
        None,
        description="Target to check the drafter against: folder, hub name, GGUF file, name of the catalogue, or "
        "bundled.",
    )
    revision: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Branch, tag or commit of the target's repository on the hub."
    )


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE",
            help="Drafter, target, adapter or block-diffusion model, as a folder or GGUF file; bundled is the target's "
            "bundled drafter.",
        ),
    ],
    *,
    options: InspectSettings,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's kind, conventions and size, and how each engine starts with it.

    No weights are loaded. The exit code is 1 if the drafter does not fit the given target. A pipe gets JSON.
    """
    from blockdraft_tools.inspect import inspect as inspect_checkpoint

    quiet()
    with telling(tell, "Reading", at_once=False):
        report = inspect_checkpoint(path, options.target, options.revision)
    if as_json or not sys.stdout.isatty():
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report)
    if any(check.holds is False for check in report.fits):
        raise typer.Exit(1)


def show(report: Report) -> None:
    from rich.text import Text

    console = standard()
    console.print(Text.assemble((report.what, "bold"), f", {report.layout}: {report.path}"), soft_wrap=True)
    for title, facts in (("", report.about), ("wants", report.wants), ("conventions", report.conventions)):
        if facts:
            caption = LAYERS if "target_layers" in facts else None
            table = new_table(console, "", "", title=title or None, show_header=False, caption=caption)
            for name, value in rows(facts):
                table.add_row(name, value)
            console.print(table)
    if report.fits:
        table = new_table(console, "", "", "", title="fits", show_header=False)
        for check in report.fits:
            mark, style = MARKS[check.holds]
            table.add_row(check.name, mark, check.detail, style=style)
        console.print(table)
    for engine, start in report.starts.items():
        console.print(Text.assemble((engine, "bold"), "" if start.reason is None else f": {start.reason}"))
        for command in (None if start.line is None else start.typed, start.remedy):
            if command is not None:
                console.print(textwrap.indent(command, "  ") if "\n" not in command else command, soft_wrap=True)


def rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values as text. Absent values are left out."""
    for key, value in facts.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from rows(value, f"{name}: ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for number, entry in enumerate(value):
                yield f"{name}: {number}", ", ".join(f"{k.replace('_', ' ')} {_word(v)}" for k, v in entry.items())
        elif value is not None:
            yield name, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


INSPECT = CommandSpec(inspect, MACHINE)
