"""`blockdraft doctor`: why a drafter's guesses are rejected."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.options import TargetOptions, need_drafter, option
from blockdraft.evaluation.prompts import SAMPLES, read_prompt_sets
from blockdraft.evaluation.settings import Settings
from blockdraft.tools.doctor.settings import DoctorSettings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.tools.doctor.examine import Diagnosis

SHOWN_POSITIONS = 4  # of S_i; the JSON has all


def doctor(
    *,
    run: TargetOptions,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of a drafter; by default the one that comes along for the target."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, as for `blockdraft bench`, preferably of the kind that the drafter was trained on. By "
            "default a few questions, which are too short to show a wrong window.",
        ),
    ] = None,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    settings: DoctorSettings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find out why a drafter's guesses are refused.

    It decodes some prompts, asks the drafter again on the finished texts, and checks whether it would guess better if
    its checkpoint meant something else: taps, slots and features off by one, windows, causality, halves in another
    order, norms, draft vocabulary, rotary base, precision. The drafter is not rounded. Without --target it examines
    the bundled tiny pair, whatever has been pulled. The exit code is 1 if it finds a fault.
    """
    # A rounded drafter guesses other tokens than the network that the checks run, as if decoding were at fault.
    run = replace(run, target=run.target or "bundled", round_drafters=False)
    drafter = None if drafter == "bundled" else drafter
    need_drafter(run.target, drafter, "leave --target out for the bundled pair", lookup=False)
    texts = [prompt for one in read_prompt_sets(prompts, limit) for prompt in one.prompts] if prompts else None

    from blockdraft.cli import display
    from blockdraft.drafters import for_others
    from blockdraft.tools.doctor.examine import examine

    target = run.load()
    examined = for_others(drafter or "bundled", run.target, loading.tell)
    loading.tell(f"Target {target.path}, drafter {examined}.")
    with display.progress("checks") as progress:
        found = examine(target, examined, texts or SAMPLES.prompts, settings, progress)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(consoles.standard(), found)
    if found.fault is not None:
        raise typer.Exit(1)


def show(console: Console, found: Diagnosis) -> None:
    """Print a diagnosis."""
    from rich import box
    from rich.table import Table

    lines = box.SIMPLE if console.is_terminal else None
    console.print(f"{found.cycles} cycles, of which {100 * found.alike:.0f} % accept as many guesses as the drafter")
    console.print("alone guesses right at the same positions.\n")
    table = Table(box=lines, pad_edge=False)
    table.add_column("")
    table.add_column(f"S_1..S_{SHOWN_POSITIONS} %", justify="right")
    table.add_row("decoding", _percents(found.decoded))
    table.add_row("the drafter alone", _percents(found.own))
    console.print(table)
    console.print()
    table = Table(box=lines, pad_edge=False)
    table.add_column("check of the checkpoint", overflow="fold")
    for header in ("right guesses", f"S_1..S_{SHOWN_POSITIONS} %"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in found.tried:
        table.add_row(each.told, f"{each.accepted:.2f}", _percents(each.by_position))
    console.print(table)
    console.print(f"\n{f'Fault: {found.fault}. ' if found.fault else ''}{found.finding} {found.remedy}")


def _percents(shares: tuple[float, ...]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares[:SHOWN_POSITIONS])
