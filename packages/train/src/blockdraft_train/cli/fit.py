"""`blockdraft fit`: one command that makes a drafter for any target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from blockdraft.cli.display import exit_on_interrupt, tell
from blockdraft.cli.options import DATA, MAKE, CommandSpec
from blockdraft.cli.target import TrainingTarget
from blockdraft.errors import UsageError
from blockdraft.settings import Flag, settings
from blockdraft.types import DEFAULT_BACKEND
from blockdraft_train.cli.data import Records
from blockdraft_train.cli.train import missing_package
from blockdraft_train.fit.settings import FitSettings

if TYPE_CHECKING:
    from blockdraft_train.fit.steps import Where


@settings
class FitOut:
    """What `blockdraft fit` reads and writes."""

    out: Annotated[Path | None, Flag(metavar="DIR")] = Field(
        None,
        description="Folder of the drafter. Plan, data and logs go to DIR.fit and DIR.run next to it. The same command "
        "resumes an interrupted fit.",
    )
    data: Annotated[tuple[str, ...], Flag(metavar="SOURCE", repeat=True, panel=DATA)] = Field(
        (),
        description="Prompts of the kind that the target will get: files or datasets as for `blockdraft data`, whose "
        "responses are not used. Repeat the option for several. By default the target writes its own prompts. With "
        "--init, one folder of conversations, written by `blockdraft serve --record` or `blockdraft data`.",
    )
    dry_run: bool = Field(False, description="Measure, print the plan with reasons and estimates, and stop.")


def fit(*, options: FitOut, model: TrainingTarget, settings: FitSettings, records: Records) -> None:
    """Make a drafter for a target: choose a recipe, let the target answer prompts, train, measure.

    The first run measures target and machine and writes a plan, which later runs follow. Each step is one of the other
    commands, and is printed, so that you can run it alone.
    """
    from blockdraft_train.fit.steps import Where

    try:
        from blockdraft_train.fit.run import Fit, run_fit
    except ModuleNotFoundError as error:
        raise missing_package("Fitting", error) from error

    if options.out is None and not options.dry_run:
        raise UsageError("--out is missing; give the folder of the drafter, or --dry-run to see the plan alone.")
    out = options.out or Path("blockdraft-plan")  # holds files of the measurements for a while
    backend = None if model.backend == DEFAULT_BACKEND else model.backend
    place = Where(out, model.target, model.dtype, model.device, backend, model.adapter, model.revision)
    if settings.init is not None:
        print("\n".join(_continued(place, options, settings)))
        return
    with exit_on_interrupt(f"Interrupted; the same command resumes the fit from {place.folder}."):
        lines = run_fit(Fit(place, settings, options.data, records), options.dry_run, tell)
    print("\n".join(lines))


def _continued(place: Where, options: FitOut, settings: FitSettings) -> list[str]:
    """Continue a drafter, and return lines about the outcome."""
    from blockdraft_train.fit.continuing import continue_fit

    if options.dry_run:
        raise UsageError("--dry-run is for new drafters; leave it out with --init.")
    if len(options.data) != 1:
        raise UsageError(f"--data names {len(options.data)} folders; with --init, give one folder of conversations.")
    with exit_on_interrupt(f"Interrupted; the same command resumes the training in {place.folder}."):
        return continue_fit(place, settings, Path(options.data[0]), tell)


FIT = CommandSpec(fit, MAKE, common="out target data hours dry_run")
