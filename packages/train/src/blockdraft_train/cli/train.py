"""`blockdraft train`: trains a drafter for a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from blockdraft.cli import display
from blockdraft.cli.display import new_table, standard, tell
from blockdraft.cli.options import DATA, MAKE, MODEL, CommandSpec, Only
from blockdraft.cli.target import TRAINING, TargetSettings
from blockdraft.errors import UsageError
from blockdraft.settings import Flag, Natural, settings
from blockdraft_train.cli.recipe_command import RecipeCommand
from blockdraft_train.complaints import Complaints
from blockdraft_train.variants import variant_names

SHOWN_EVALUATIONS = 12
ShowRecipe = Annotated[bool, Flag()]
SHOW_RECIPE = "Print all fields of the recipe with their meaning, as TOML, and exit."
RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE.toml]", help="File with values of recipe fields; others keep their defaults."),
]


@settings
class TrainSettings:
    """What `blockdraft train` reads and writes, besides the recipe."""

    data: Annotated[Path | None, Flag(metavar="DIR", panel=DATA)] = Field(
        None, description="Folder made by `blockdraft data`."
    )
    out: Annotated[Path | None, Flag(metavar="DIR")] = Field(
        None,
        description="Folder of the drafter. Recipe, log, curves and checkpoints go to DIR.run next to it. The same "
        "command resumes an interrupted run.",
    )
    prompts: Annotated[Path | None, Flag(metavar="FILE", panel=DATA)] = Field(
        None,
        description='Prompts to measure tau on, one {"prompt": "text"} or {"turns": ["text"]} per line; by default the '
        "beginnings of held-out documents.",
    )
    format: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Format of the drafter, as in `blockdraft export`; by default its own."
    )
    extend: Annotated[Natural, Flag(metavar="STEPS")] = Field(
        0, description="Steps to add to a finished run. A larger --steps or --epochs does so too."
    )
    other_responses: bool = Field(False, description="Allow responses that another model than the target wrote.")
    unfinished_data: bool = Field(
        False, description="Allow data that are still being written, and train on what there is."
    )
    show_recipe: ShowRecipe = Field(False, description=SHOW_RECIPE)


def train(
    context: typer.Context,
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help=f"Kind of drafter: {', '.join(variant_names())}.")],
    recipe: RecipeFile = None,
    *,
    options: TrainSettings,
    model: Annotated[TargetSettings, Only(TRAINING, MODEL, dtype="--target-dtype")],
) -> None:
    """Train a drafter for a target.

    Every recipe field is an option too: --layers 3, --learning-rate 1e-3, --objective decay=0.5,forward_kl=0.5.
    `blockdraft train dflash --show-recipe` lists the fields.

    `accelerate launch -m blockdraft train ...` trains on several devices. `touch DIR.run/finish`, or the signal USR1,
    ends the run early with a complete drafter. Ctrl-C and SIGTERM save the run, which the same command resumes.
    """
    from blockdraft_train.settings_files import as_toml, read_settings
    from blockdraft_train.variant import find_variant

    settings: Any = read_settings(find_variant(variant).recipe_class, recipe, context.obj)
    if options.show_recipe:
        print(as_toml(settings, described=True), end="")
        return
    check_given({"--data": options.data, "--out": options.out})
    assert options.data is not None and options.out is not None
    out = options.out

    from blockdraft.drafters import as_given, check_place, drafter_files
    from blockdraft.formats import find_layout, read_config
    from blockdraft.formats.gguf import is_gguf, open_gguf
    from blockdraft.formats.gguf.kinds import kind_in
    from blockdraft.prompt_sets import read_prompt_sets
    from blockdraft_train.data.documents import read_data
    from blockdraft_train.data.hidden_states import read_hidden_states

    try:
        from blockdraft_tools.export import format_for
        from blockdraft_train.checkpoints import after_interruption
        from blockdraft_train.devices import make_accelerator
        from blockdraft_train.graceful_shutdown import Stopped, finish_on_signal
        from blockdraft_train.job import TrainingJob
        from blockdraft_train.objectives import find_objective
        from blockdraft_train.progress import Progress, run_folder
        from blockdraft_train.recipe import begun_with
        from blockdraft_train.trainer import train as train_drafter
    except ModuleNotFoundError as error:
        raise missing_package("Training", error) from error

    complaints = Complaints()
    if options.format is not None:
        complaints.noted(find_layout, options.format)
    for name in settings.objective:
        complaints.noted(find_objective, name)
    documents = complaints.noted(read_data, options.data, options.unfinished_data)
    prompts = complaints.noted(read_prompt_sets, [options.prompts]) if options.prompts else None
    if settings.hidden_states not in (None, "memory"):
        complaints.noted(read_hidden_states, settings.hidden_states)
    with complaints.noting():
        if (given := begun_with(settings)) is not None:
            init = Path(given) if Path(given).exists() else drafter_files(given, model.target)
            if not init.exists():
                check_place(init)
            kind_in(open_gguf(init)) if is_gguf(init) else read_config(init)
            settings = replace(settings, init=str(init))
    accelerator = complaints.noted(make_accelerator, settings, run_folder(out), model.device)
    complaints.check()
    assert documents is not None and accelerator is not None
    if not documents.finished and accelerator.is_main_process:
        tell(f"{options.data} is still being written; training takes the {len(documents)} documents that exist now.")
    # Forward passes of training are too long for CUDA graphs, and gradients need whole weights.
    target = model.load(accelerator.device, compile="off" if accelerator.device.type == "cuda" else "auto")

    finish_on_signal(out)
    try:
        with display.progress("done") as progress:
            layout = options.format
            if target.path is None or not is_gguf(target.path):  # the format could not name a GGUF file
                layout = layout or find_variant(variant).layout(settings, target)
            written = None if layout is None else format_for(layout, target, model.target, revision=model.revision)
            job = TrainingJob(
                variant,
                target,
                documents,
                out,
                settings,
                accelerator,
                prompts=prompts[0].prompts if prompts else None,
                progress=Progress(progress, tell),
                written=written,
                more=options.extend,
                other_responses=options.other_responses,
            )
            log = train_drafter(job)
    except KeyboardInterrupt as interruption:
        if accelerator.is_main_process:
            tell(after_interruption(run_folder(out) / "checkpoints"))
        raise typer.Exit(interruption.exit_status if isinstance(interruption, Stopped) else 130) from None
    if accelerator.is_main_process:
        show(log)
        console = standard()
        console.print(f"\nThe drafter is in {out}, recipe, log and curves are in {run_folder(out)}. Use it:")
        name = model.target or "bundled"  # without a name, other commands may take SmolLM2
        console.print(f"blockdraft generate --target {name} --drafter {as_given(out)} PROMPT", soft_wrap=True)


def show(log: list[dict[str, Any]]) -> None:
    """Print a table of the last evaluations of a training run."""
    console = standard()
    headers = "step", ">loss", ">held-out loss", ">accepted length", ">tau", ">accuracy"
    table = new_table(console, *headers)
    table.caption = (
        "accepted length: leading correct draft tokens at fixed anchors, plus the bonus; tau: tokens per target "
        "forward pass of the engine; accuracy: correct draft tokens by position, %."
    )
    for line in [line for line in log if "tau" in line or "held_out_loss" in line][-SHOWN_EVALUATIONS:]:
        numbers = (line.get(name) for name in ("loss", "held_out_loss", "held_out_accepted_length", "tau"))
        accuracy = " ".join("?" if a is None else f"{100 * a:.0f}" for a in line.get("held_out_accuracy") or [])
        table.add_row(str(line["step"]), *("?" if n is None else f"{n:.3f}" for n in numbers), accuracy)
    console.print(table)


def check_given(options: dict[str, object]) -> None:
    """Raise a UsageError for options without a value, by flag."""
    if missing := [flag for flag, value in options.items() if not value]:
        raise UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")


def missing_package(options: str, error: ModuleNotFoundError) -> UsageError:
    return UsageError(f"{options} takes {error.name}; run pip install {error.name}.")


TRAIN = CommandSpec(train, MAKE, common="target data out prompts show_recipe", kind=RecipeCommand)
