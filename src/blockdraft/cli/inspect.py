"""`blockdraft inspect`: what a checkpoint is, whether it fits a target, and how engines start with it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.options import Revision
from blockdraft.timing import telling

if TYPE_CHECKING:
    from blockdraft.tools.inspect import Report

TARGET_LAYERS = (
    "taps: blockdraft and z-lab count the layers whose outputs are read, from 0; others the layers that read them"
)
MARKS = {True: ("yes", "green"), False: ("no", "bold red"), None: ("not known", "")}


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE",
            help="Drafter, target, adapter or block-diffusion model, as a folder or GGUF file; bundled is the drafter "
            "that comes along for the target, bundled-dflash the tiny one that other engines read.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Target to check the drafter against: folder, hub name, GGUF file, name of the catalogue, or bundled.",
        ),
    ] = None,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show a checkpoint's kind, conventions and size, and how each engine starts with it.

    No weights are loaded. The exit code is 1 if the drafter does not fit the given target. A pipe gets JSON.
    """
    from blockdraft.tools.inspect import inspect as look

    loading.quiet()
    with telling(loading.tell, "Reading", at_once=False):
        report = look(path, target, revision)
    if as_json or not sys.stdout.isatty():
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report)
    if any(check.holds is False for check in report.fits):
        raise typer.Exit(1)


def show(report: Report) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = consoles.terminal()
    console.print(Text.assemble((report.what, "bold"), f", {report.layout}: {report.path}"), soft_wrap=True)
    for title, facts in (("", report.about), ("wants", report.wants), ("conventions", report.conventions)):
        if facts:
            table = Table(title=title or None, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
            if "target_layers" in facts:
                table.caption, table.caption_justify = TARGET_LAYERS, "left"
            for name, value in rows(facts):
                table.add_row(name, value)
            console.print(table)
    if report.fits:
        table = Table(title="fits", title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
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
    """Names and values as text; absent values are left out."""
    for name, value in facts.items():
        name = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from rows(value, f"{name}: ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for number, each in enumerate(value):
                yield (
                    f"{name}: {number}",
                    ", ".join(f"{key.replace('_', ' ')} {_word(one)}" for key, one in each.items()),
                )
        elif value is not None:
            yield name, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
