"""`blockdraft doctor`: finds out why draft tokens are rejected."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from blockdraft.cli import display
from blockdraft.cli.display import SHARES, new_table, percents, standard, tell
from blockdraft.cli.options import DRAFTING, MEASURE, MODEL, CommandSpec, Only
from blockdraft.cli.target import TARGET, AsJson, DecodingSettings, Files, threads_in_words
from blockdraft.prompt_sets import SAMPLES, read_prompt_sets
from blockdraft.settings import Count, Flag, settings
from blockdraft_bench.settings import MeasureSettings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft_train.doctor.examine import Diagnosis


@settings
class ExaminedTarget(DecodingSettings):
    """The target of the drafter that `blockdraft doctor` examines."""

    target: Annotated[str | None, Flag(metavar="DIR|NAME")] = Field(
        None, description=f"{TARGET}the bundled tiny model, whatever has been pulled."
    )


@settings
class DoctorSettings:
    """The drafter that `blockdraft doctor` examines."""

    drafter: Annotated[str | None, Flag(metavar="DIR|NAME", panel=DRAFTING)] = Field(
        None, description="Folder, GGUF file or hub name of a drafter; by default the target's bundled one."
    )
    prompts: Files = Field(
        (),
        description="Prompts, as for `blockdraft bench`, preferably of the kind that the drafter was trained on. By "
        "default a few questions, which are too short to show a wrong window.",
    )
    max_new_tokens: Count = Field(96, description="Maximum length of a response in tokens.")


def doctor(
    *,
    model: Annotated[ExaminedTarget, Only(panel=MODEL)],
    options: DoctorSettings,
    measurement: Annotated[MeasureSettings, Only("limit")],
    as_json: AsJson = False,
) -> None:
    """Find out why a drafter's draft tokens are rejected.

    It decodes some prompts, runs the drafter again on the finished texts, and checks whether it would do better if its
    checkpoint meant something else: target layers, positions and hidden states off by one, windows, causality, halves
    in another order, norms, draft vocabulary, rotary base, precision. The drafter is not quantized. The exit code is 1
    if it finds a fault.
    """
    # A quantized drafter proposes other tokens than the network that the checks run, as if decoding were at fault.
    model = replace(model, target=model.target or "bundled", round_drafters=False)
    sets = read_prompt_sets(list(options.prompts), measurement.limit) if options.prompts else []
    texts = [prompt for prompt_set in sets for prompt in prompt_set.prompts] or SAMPLES.prompts

    from blockdraft.drafters import drafter_files
    from blockdraft_train.doctor.examine import examine

    examined = drafter_files(options.drafter or "bundled", model.target)
    target = model.load_for()
    tell(f"Target {target.path}, drafter {examined}.\nThreads: {threads_in_words()}.")
    with display.progress("checks") as progress:
        diagnosis = examine(target, examined, texts, options.max_new_tokens, progress)
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        show(standard(), diagnosis)
    if diagnosis.fault is not None:
        raise typer.Exit(1)


def show(console: Console, diagnosis: Diagnosis) -> None:
    console.print(
        f"{diagnosis.steps} steps, of which {100 * diagnosis.alike:.0f} % accept as many draft tokens as the drafter\n"
        "alone gets right at the same positions.\n"
    )
    table = new_table(console, "", f">{SHARES}")
    table.add_row("decoding", percents(diagnosis.decoded))
    table.add_row("the drafter alone", percents(diagnosis.own))
    console.print(table)
    console.print()
    table = new_table(console, "check of the checkpoint", ">correct draft tokens", f">{SHARES}")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for check in diagnosis.tried:
        table.add_row(check.assumption, f"{check.accepted:.2f}", percents(check.by_position))
    console.print(table)
    fault = f"Fault: {diagnosis.fault}. " if diagnosis.fault else ""
    console.print(f"\n{fault}{diagnosis.finding} {diagnosis.remedy}")


DOCTOR = CommandSpec(doctor, MEASURE, common="target drafter prompts as_json")
