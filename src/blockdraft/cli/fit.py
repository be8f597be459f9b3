"""`blockdraft fit`: one command that makes a drafter for any target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.options import (
    Adapter,
    Device,
    Dtype,
    RecordOptions,
    Revision,
    TargetBackend,
    TrainingTarget,
)
from blockdraft.errors import UsageError
from blockdraft.tools.fit.settings import FitSettings
from blockdraft.types import DEFAULT_BACKEND


def fit(
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the drafter. Plan, data and logs go to DIR.fit and DIR.run beside it. The same command "
            "resumes an interrupted fit.",
        ),
    ] = None,
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Prompts of the kind that the target will get: files or datasets as for `blockdraft data`, whose "
            "answers are not used. Repeat the option for several. Without any, the target writes its own prompts.",
        ),
    ] = None,
    settings: FitSettings,
    records: RecordOptions,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure, print the plan with reasons and estimates, and stop.")
    ] = False,
) -> None:
    """Make a drafter for a target: choose a recipe, let the target answer prompts, train, measure.

    The first run measures target and machine and writes a plan, which later runs follow. Each step is one of the other
    commands, and is printed, so that you can run it alone.
    """
    from blockdraft.tools.fit.steps import Where

    try:
        from blockdraft.tools.fit.run import Fit, run_fit
    except ModuleNotFoundError as error:
        raise UsageError(f"Fitting takes {error.name}; run pip install 'blockdraft[train]'.") from error

    if out is None and not dry_run:
        raise UsageError("--out is missing; give the folder of the drafter, or --dry-run to see the plan alone.")
    known = None if backend == DEFAULT_BACKEND else backend
    place = out or Path("blockdraft-plan")  # where files of the measurements lie for a moment
    where = Where(place, target, dtype, device, known, adapter, revision)
    asked = Fit(where, settings, tuple(data or ()), records.settings())

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        lines = run_fit(asked, dry_run, note)
    except KeyboardInterrupt:
        note(f"Interrupted; the same command resumes the fit from {where.folder}.")
        raise typer.Exit(130) from None
    print("\n".join(lines))
