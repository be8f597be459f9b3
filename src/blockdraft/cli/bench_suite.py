"""`blockdraft bench --suite`: the sets of a paper, and its figures beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import option
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import CHAIN, PLAIN, Method
from blockdraft.evaluation.suite.settings import SuiteSettings
from blockdraft.evaluation.suite.tasks import SUITES
from blockdraft.types import DraftModel, SamplingParams

if TYPE_CHECKING:
    from blockdraft.cli.loading import TargetOptions

PANEL = "The sets of a paper"
METHODS = f"{PLAIN},{CHAIN}"  # what the paper compares
# Options of `bench` that do nothing here.
NOT_HERE = {"prompts", "batch_size", "repeats", "profile", "pictures"}


@dataclass(frozen=True)
class SuiteOptions:
    """Which sets are measured, and what stands beside them."""

    suite: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(SUITES),
            help="Measure the sets of the DFlash paper (arXiv 2602.06036), with as many of its prompts, and print its "
            f"figures beside ours. Methods are {METHODS} unless named, and answers have up to "
            f"{SuiteSettings.max_new_tokens} tokens. --temperature 0,1 measures at both. With --out it goes on where "
            "it was interrupted, set by set.",
            rich_help_panel=PANEL,
        ),
    ] = None
    suite_data: Annotated[Path | None, option(SuiteSettings, "suite_data", metavar="DIR", rich_help_panel=PANEL)] = (
        SuiteSettings.suite_data
    )
    tasks: Annotated[str | None, option(SuiteSettings, "tasks", metavar="NAME,...", rich_help_panel=PANEL)] = (
        SuiteSettings.tasks
    )
    paper_model: Annotated[str | None, option(SuiteSettings, "paper_model", metavar="NAME", rich_help_panel=PANEL)] = (
        SuiteSettings.paper_model
    )

    def settings(self, context: typer.Context) -> SuiteSettings:
        """With what was given of the options that other ways of measuring have too, by defaults of their own."""
        own = {each.name for each in fields(SuiteSettings)} - {each.name for each in fields(self)}
        shared = {name: context.params[name] for name in own if given(context, name)}
        return SuiteSettings(suite_data=self.suite_data, tasks=self.tasks, paper_model=self.paper_model, **shared)


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_options(context: typer.Context, of_suite: bool) -> None:
    """Raise a UsageError where options were given that do nothing."""
    own = {each.name for each in fields(SuiteOptions)}
    for name in filter(lambda name: given(context, name), context.params):
        said = "--" + name.replace("_", "-")
        if of_suite and name in NOT_HERE:
            raise UsageError(f"{said} does nothing for --suite, which has its own prompts and asks each once; drop it.")
        if not of_suite and name in own:
            raise UsageError(f"{said} is about the sets of a paper; add --suite {'|'.join(SUITES)}, or leave it away.")


def measure_suite(
    suite: str,
    settings: SuiteSettings,
    run: TargetOptions,
    methods: Sequence[Method],
    drafter: str | None,
    model: DraftModel,
    sampling: Sequence[SamplingParams],
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure what is not settled yet, writing after each set, and print all.

    Args:
        sampling: One for each temperature.
        out: None writes nothing.
    """
    from contextlib import nullcontext

    from blockdraft.cli import display
    from blockdraft.evaluation.results import hardware
    from blockdraft.evaluation.speed import load_methods
    from blockdraft.evaluation.suite import measure, report, results
    from blockdraft.evaluation.suite.paper import model_of
    from blockdraft.evaluation.suite.reading import chosen_tasks, read_tasks
    from blockdraft.folders import held

    tasks = chosen_tasks(suite, settings.tasks)
    prompts = read_tasks(tasks, settings.suite_data, settings.limit)
    target = run.load()
    machine = hardware(target.device)
    asked: dict[str, Any] = {
        "suite": suite,
        "drafter": drafter,
        **{name: value for name, value in asdict(model).items() if value},
        "methods": {method.name: asdict(method.drafting) for method in methods},
        **{name: getattr(settings, name) for name in ("limit", "max_new_tokens", "seed")},
        **{name: getattr(sampling[0], name) for name in ("top_k", "top_p")},
        **asdict(run),
        "dtype": str(target.dtype).removeprefix("torch."),
        "running": target.running,
        "machine": machine["gpu"] or machine["cpu"],
    }
    about = {name: asked[name] for name in ("dtype", "running", "machine")}
    about |= {"hardware": machine, "blockdraft": version("blockdraft")}
    new = results.Results(asked, about, settings.paper_model or model_of(target.architecture))
    temperatures = [params.temperature for params in sampling]
    with held(out, "blockdraft bench") if out is not None else nullcontext():
        found = new if out is None else results.resumed(new, out, overwrite)
        left = [
            (task, params) for params in sampling for task in tasks if not found.settled(task.name, params.temperature)
        ]
        if left:
            measure.check_prompts(target, prompts, sampling[0])
        engines = load_methods(methods, target, 1, model) if left else {}
        sampled = {method.name for method in methods if method.drafting.sampled}
        try:
            with display.progress("prompts") as progress:
                for task, params in left:
                    trials = measure.decode_task(engines, task, prompts[task.name], params, progress)
                    found = found.plus(measure.rows_of(task.name, params.temperature, trials, sampled))
                    if out is not None:
                        results.write(out, found)
        except KeyboardInterrupt:
            kept = "nothing was written" if out is None else f"the same command goes on with what {out} lacks"
            print(f"Interrupted; {kept}.", file=sys.stderr)
            raise typer.Exit(130) from None
    found = found.only([task.name for task in tasks], temperatures)
    if as_json:
        print(found.as_json(), end="")
    else:
        report.show(display.terminal() if sys.stdout.isatty() else display.plain(), found, tasks)
    sys.stdout.flush()
