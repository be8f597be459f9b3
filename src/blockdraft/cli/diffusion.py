"""`blockdraft diffusion`: block-diffusion language models, made, trained, measured and sampled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.diffusion_model import AsJson, BlockSize, Device, Dtype, Model, load
from blockdraft.cli.diffusion_text import generate
from blockdraft.cli.options import Adapter, FieldOptions, Revision, with_options
from blockdraft.cli.train import RecipeCommand
from blockdraft.diffusion.settings import ConvertSettings, DiffusionRecipe, LikelihoodSettings, NewSettings
from blockdraft.errors import UsageError
from blockdraft.settings import as_toml, read_settings

if TYPE_CHECKING:
    from blockdraft.diffusion.convert import Converted

diffusion = typer.Typer(
    help="Block-diffusion language models: write whole blocks of text at once, without a target.", no_args_is_help=True
)


@diffusion.command()
@with_options
def convert(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="A causal language model of the Llama or Qwen families, as a folder or hub name; by default the "
            "bundled target.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new model, new or empty.")],
    settings: ConvertSettings,
    adapter: Adapter = None,
    revision: Revision = None,
) -> None:
    """Make a block-diffusion model of a causal language model. It has to be trained before it writes well."""
    from blockdraft.cli import display
    from blockdraft.diffusion.convert import convert as convert_model

    loading.quiet()
    with display.progress("tensors") as progress:
        found = convert_model(target, out, settings, revision, adapter, progress)
    _tell_made(out, found)


@diffusion.command()
@with_options
def new(
    *,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Take the tokenizer of this folder or hub name; by default the bundled target's."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new model, new or empty.")],
    settings: NewSettings,
) -> None:
    """Make a block-diffusion model from nothing, with random weights and the tokenizer of another model."""
    from blockdraft.diffusion.new import new_model

    loading.quiet()
    _tell_made(out, new_model(like, out, settings))


@diffusion.command(cls=RecipeCommand)
@with_options
def train(
    *,
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE.toml]", help="Values of recipe fields; others keep their defaults."),
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="The block-diffusion model to begin with.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Texts or chats, as for `blockdraft data`; repeat it for several."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps; a run that has ended goes on with more.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the trained model. Recipe, log and checkpoints go to DIR.run beside it; the same command "
            "goes on with a run that was interrupted.",
        ),
    ] = None,
    rows: FieldOptions,
    device: Device = None,
    show_recipe: Annotated[
        bool,
        typer.Option("--show-recipe", help="Print all fields of the recipe with their meaning, as TOML, and exit."),
    ] = False,
) -> None:
    """Train a block-diffusion model. Of texts it learns all tokens, of chats those of the assistant.

    Every recipe field is an option too: --batch 8, --block-size 4, --complementary true; --show-recipe lists them. On
    many devices: `accelerate launch -m blockdraft diffusion train ...`. To end early with a whole model:
    `touch DIR.run/finish`, or send the signal USR1.
    """
    settings = read_settings(DiffusionRecipe, recipe, context.obj)
    if show_recipe:
        print(as_toml(settings, explained=True), end="")
        return
    if model is None or not data or steps is None or out is None:
        needed = {"--model": model, "--data": data, "--steps": steps, "--out": out}
        missing = [name for name, value in needed.items() if not value]
        raise UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")

    from blockdraft.cli import display
    from blockdraft.diffusion.text import read_texts

    try:
        from blockdraft.diffusion.train import train as train_model
        from blockdraft.training.checkpoints import after_interruption
        from blockdraft.training.devices import make_accelerator
        from blockdraft.training.graceful_shutdown import finish_on_signal
        from blockdraft.training.progress import Progress, run_folder
    except ModuleNotFoundError as error:
        raise UsageError(f"Training takes {error.name}; run pip install 'blockdraft[train]'.") from error

    accelerator = make_accelerator(settings, run_folder(out), device)
    loaded = load(model, str(accelerator.device), "float32", settings.block_size)
    texts = read_texts(data, rows.rows(), loaded)
    finish_on_signal(out)
    try:
        with display.progress("done") as progress:
            callbacks = Progress(progress, loading.tell)
            lines = train_model(loaded, texts, steps, out, settings, callbacks, accelerator)
    except KeyboardInterrupt:
        if accelerator.is_main_process:
            loading.tell(after_interruption(run_folder(out) / "checkpoints"))
        raise typer.Exit(130) from None
    if accelerator.is_main_process:
        bits = next((line["held_out_bits"] for line in reversed(lines) if "held_out_bits" in line), None)
        told = "" if bits is None else f", {bits:.3f} bits per held-out token"
        loading.tell(f"The model is in {out}{told}; log and checkpoints are in {run_folder(out)}.")


@diffusion.command()
@with_options
def perplexity(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts or chats, as for `blockdraft data`.")],
    model: Model,
    settings: LikelihoodSettings,
    rows: FieldOptions,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure how likely a text is to a block-diffusion model: a bound, with the interval that it lies in by the noise
    drawn; with blocks of one token, the perplexity itself."""
    from blockdraft.cli import display
    from blockdraft.diffusion.likelihood import likelihood
    from blockdraft.diffusion.text import read_texts

    loaded = load(model, device, dtype, block_size)
    texts = read_texts([file], rows.rows(), loaded)
    with display.progress("batches") as progress:
        found = likelihood(loaded, texts, settings, progress)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    told = f"perplexity {found.perplexity:.4g}" if found.exact else f"perplexity at most {found.perplexity:.4g}"
    around = "" if found.exact else f" ({found.low:.4g} to {found.high:.4g}, {found.draws} draws)"
    print(f"{told}{around}, {found.bits_per_token:.4f} bits a token, {found.tokens} tokens")


def _tell_made(out: Path, found: Converted) -> None:
    new = ", new to the tokenizer" if found.is_new else ""
    shift = "with" if found.config.token_shift else "without"
    loading.tell(
        f"{out}: blocks of {found.config.block_size}, {shift} token shift, mask token {found.mask_token} "
        f"(id {found.config.mask_token_id}{new})"
    )


diffusion.command()(generate)
