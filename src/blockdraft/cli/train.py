"""`blockdraft train`: trains a drafter for a target."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.help import Command
from blockdraft.cli.options import Adapter, Device, Dtype, Revision, TargetBackend, TrainingTarget
from blockdraft.errors import Complaints, UsageError
from blockdraft.types import DEFAULT_BACKEND


class RecipeCommand(Command):
    """A command whose unknown options are recipe fields, which depend on the variant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        own, ctx.obj = split_flags(args, known)
        return super().parse_args(ctx, own)

    def typed(self, ctx: Any) -> dict[str, tuple[str, Any]]:
        fields = {name.replace("-", "_"): (f"--{name}", text) for name, text in (ctx.obj or {}).items()}
        return super().typed(ctx) | fields


def train(
    context: typer.Context,
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="Kind of drafter, such as dflash.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE.toml]", help="File with values of recipe fields; others keep their defaults."),
    ] = None,
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder made by `blockdraft data`.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the drafter. Recipe, log, curves and checkpoints go to DIR.run beside it. The same command "
            "resumes an interrupted run.",
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Prompts to measure tau on, lines of {"prompt": "text"} or {"turns": ["text"]}. By default the '
            "beginnings of held-out documents.",
        ),
    ] = None,
    to_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="NAME", help="Format of the drafter, as in `blockdraft export`; by default its own."
        ),
    ] = None,
    extend: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Steps to add to a run that has ended; a larger --steps or --epochs does so too.",
        ),
    ] = 0,
    other_answers: Annotated[
        bool, typer.Option("--other-responses", help="Allow answers that another model than the target wrote.")
    ] = False,
    unfinished_data: Annotated[
        bool,
        typer.Option("--unfinished-data", help="Allow data that are still being made, and train on what there is."),
    ] = False,
    target_dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    show_recipe: Annotated[
        bool,
        typer.Option("--show-recipe", help="Print all fields of the recipe with their meaning, as TOML, and exit."),
    ] = False,
) -> None:
    """Train a drafter for a target.

    Every recipe field is an option too: --layers 3, --learning-rate 1e-3, --objective decay=0.5,forward_kl=0.5.
    `blockdraft train dflash --show-recipe` lists the fields.

    `accelerate launch -m blockdraft train ...` trains on several devices. `touch DIR.run/finish`, or the signal USR1,
    ends the run early with a whole drafter. Ctrl-C and the signal TERM save the run, which the same command resumes.
    """
    from blockdraft.settings import as_toml, read_settings
    from blockdraft.training.variant import find_variant

    settings: Any = read_settings(find_variant(variant).recipe_class, recipe, context.obj)
    if show_recipe:
        print(as_toml(settings, explained=True), end="")
        return
    missing = [name for name, value in (("--data", data), ("--out", out)) if value is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; name a folder.")
    assert data is not None and out is not None

    from blockdraft.cli import display
    from blockdraft.data.documents import read_data
    from blockdraft.data.hidden_states import read_hidden_states
    from blockdraft.drafters import as_given
    from blockdraft.evaluation.prompts import read_prompt_sets
    from blockdraft.formats import find_layout, read_config
    from blockdraft.formats.gguf import is_gguf, open_gguf
    from blockdraft.formats.gguf.kinds import kind_in

    try:
        from blockdraft.training.checkpoints import after_interruption
        from blockdraft.training.devices import make_accelerator
        from blockdraft.training.export import format_for
        from blockdraft.training.graceful_shutdown import Stopped, finish_on_signal
        from blockdraft.training.objectives import find_objective
        from blockdraft.training.progress import Progress, run_folder
        from blockdraft.training.recipe import begun_with
        from blockdraft.training.trainer import train as train_drafter
    except ModuleNotFoundError as error:
        raise UsageError(f"Training takes {error.name}; run pip install 'blockdraft[train]'.") from error

    complaints, prompts = Complaints(), None
    with complaints.noting():
        if to_format is not None:
            find_layout(to_format)
    for name in settings.objective:
        with complaints.noting():
            find_objective(name)
    with complaints.noting():
        documents = read_data(data, unfinished_data)
    with complaints.noting():
        if prompts_file is not None:
            prompts = read_prompt_sets([prompts_file])[0].prompts
    with complaints.noting():
        if settings.hidden_states not in (None, "memory"):
            read_hidden_states(settings.hidden_states)
    with complaints.noting():
        if (init := begun_with(settings)) is not None:
            kind_in(open_gguf(init)) if is_gguf(init) else read_config(init)
    with complaints.noting():
        accelerator = make_accelerator(settings, run_folder(out), device)
    complaints.check()
    if not documents.finished and accelerator.is_main_process:
        loading.tell(f"{data} is still being made; training takes the {len(documents)} documents that exist now.")
    loaded = loading.load(
        target or "bundled", target_dtype, accelerator.device, backend, adapter=adapter, revision=revision
    )

    finish_on_signal(out)
    try:
        with display.progress("done") as progress:
            callbacks = Progress(progress, loading.tell)
            layout = to_format
            if loaded.path is None or not is_gguf(loaded.path):  # which the format could not name
                layout = layout or find_variant(variant).layout(settings)
            written = None if layout is None else format_for(layout, loaded, target, revision=revision)
            lines = train_drafter(
                variant,
                loaded,
                documents,
                out,
                settings,
                accelerator,
                prompts=prompts,
                progress=callbacks,
                written=written,
                more=extend,
                other_answers=other_answers,
            )
    except KeyboardInterrupt as interruption:
        if accelerator.is_main_process:
            loading.tell(after_interruption(run_folder(out) / "checkpoints"))
        raise typer.Exit(interruption.exit_status if isinstance(interruption, Stopped) else 130) from None
    if accelerator.is_main_process:
        console = consoles.standard()
        display.show_training(console, lines)
        console.print(f"\nThe drafter is in {out}, recipe, log and curves are in {run_folder(out)}. Use it:")
        named = target or "bundled"  # without a name, other commands may take SmolLM2
        console.print(f"blockdraft generate --target {named} --drafter {as_given(out)} PROMPT", soft_wrap=True)


def split_flags(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into the command's own words and recipe fields: `--name value` or `--name=value`.

    Args:
        known: Options of the command.

    Raises:
        ValueError: A field has no value.
    """
    own, fields, left = list[str](), dict[str, str](), list(arguments)
    while left:
        one = left.pop(0)
        name, equals, value = one.partition("=")
        if not name.startswith("--") or name in known:
            own.append(one)
            continue
        if not equals:
            if not left:
                raise UsageError(f"{name} has no value; recipe fields are given as --name value.")
            value = left.pop(0)
        fields[name.removeprefix("--")] = value
    return own, fields
