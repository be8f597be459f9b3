"""`blockdraft diffusion`: makes, trains, measures and samples block-diffusion language models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from blockdraft.cli import display
from blockdraft.cli.display import exit_on_interrupt, standard, tell
from blockdraft.cli.generate import PromptArgument, checked_text, read_prompt, read_prompts
from blockdraft.cli.options import DATA, MODEL, RUN, CommandSpec, Only, add
from blockdraft.cli.target import AsJson, Folder, TargetSettings, exclude, quiet
from blockdraft.settings import Count, Flag, settings
from blockdraft_diffusion.settings import (
    ConvertSettings,
    DiffusionRecipe,
    LikelihoodSettings,
    NewSettings,
    SampleSettings,
)
from blockdraft_train.cli.data import RecordFields
from blockdraft_train.cli.recipe_command import RecipeCommand
from blockdraft_train.cli.train import SHOW_RECIPE, RecipeFile, ShowRecipe, check_given, missing_package
from blockdraft_train.settings_files import as_toml, read_settings

if TYPE_CHECKING:
    from blockdraft_diffusion.create import Created
    from blockdraft_diffusion.model import DiffusionModel
    from blockdraft_diffusion.sampler import BlockChunk, Sampler, Watch

UNKNOWN = "░"  # shown for an unknown token
diffusion = typer.Typer(
    help="Make and use block-diffusion language models, which write whole blocks of text without a target.",
    no_args_is_help=True,
)


@settings
class ModelSettings:
    """A block-diffusion model, and how it runs."""

    model: Annotated[Path, Flag(metavar="DIR")] = Field(
        description="Block-diffusion model, made by `blockdraft diffusion convert` or `train`."
    )
    block_size: Count | None = Field(None, description="Number of tokens per block; by default the model's.")
    device: str | None = Field(
        None, description="Device of the model, such as cpu or cuda:1; by default the first GPU, else the CPU."
    )
    dtype: Annotated[str | None, Flag(metavar="float32|bfloat16|float16")] = Field(
        None, description="Number format of the weights; by default float32 on a CPU and bfloat16 elsewhere."
    )

    def load(self) -> DiffusionModel:
        from blockdraft_diffusion.folder import load_model

        quiet()
        return load_model(self.model, self.device, self.dtype, self.block_size)


Model = Annotated[ModelSettings, Only(panel=MODEL)]


@settings
class NewModel:
    """Where a new model goes."""

    out: Folder = Field(description="Folder of the new model, new or empty.")
    like: Annotated[str | None, Flag(metavar="DIR")] = Field(
        None, description="Folder or hub name whose tokenizer is used; by default the bundled tiny model."
    )


def convert(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="Causal language model of the Llama or Qwen families, as a folder, hub name or GGUF file; by default "
            "the bundled tiny model.",
        ),
    ] = None,
    output: Annotated[NewModel, Only("out")],
    settings: ConvertSettings,
    model: Annotated[TargetSettings, Only("adapter revision", MODEL)],
) -> None:
    """Make a block-diffusion model of a causal language model. It must be trained before it writes well."""
    from blockdraft_diffusion.create import convert as convert_model

    quiet()
    with display.progress("tensors") as progress:
        created = convert_model(target, output.out, settings, model.revision, model.adapter, progress)
    _tell_created(output.out, created)


def new(*, output: NewModel, settings: NewSettings) -> None:
    """Make a block-diffusion model with random weights and the tokenizer of another model."""
    from blockdraft_diffusion.create import new_model

    quiet()
    _tell_created(output.out, new_model(output.like, output.out, settings))


def _tell_created(out: Path, created: Created) -> None:
    config = created.config
    new = ", new to the tokenizer" if created.is_new else ""
    shift = "with" if config.token_shift else "without"
    tell(
        f"{out}: blocks of {config.block_size}, {shift} token shift, mask token {created.mask_token} "
        f"(id {config.mask_token_id}{new})"
    )


@settings
class DiffusionTrainSettings:
    """What `blockdraft diffusion train` reads and writes, besides the recipe."""

    model: Annotated[Path | None, Flag(metavar="DIR")] = Field(None, description="Block-diffusion model to start from.")
    data: Annotated[tuple[str, ...], Flag(metavar="SOURCE", repeat=True)] = Field(
        (), description="Texts or chats, as for `blockdraft data`. Repeat the option for several."
    )
    steps: Count | None = Field(None, description="Optimizer steps; more of them continue a finished run.")
    out: Annotated[Path | None, Flag(metavar="DIR")] = Field(
        None,
        description="Folder of the trained model. Recipe, log and checkpoints go to DIR.run next to it. The same "
        "command resumes an interrupted run.",
    )
    device: str | None = Field(
        None, description="Device of the model, such as cpu or cuda:1; by default the first GPU, else the CPU."
    )
    show_recipe: ShowRecipe = Field(False, description=SHOW_RECIPE)


def train(
    *, context: typer.Context, recipe: RecipeFile = None, options: DiffusionTrainSettings, records: RecordFields
) -> None:
    """Train a block-diffusion model. It learns all tokens of texts, and those of the assistant in chats.

    Every recipe field is an option too: --batch 8, --block-size 4, --ema 0; --show-recipe lists them.

    `accelerate launch -m blockdraft diffusion train ...` trains on several devices. `touch DIR.run/finish`, or the
    signal USR1, ends the run early with a complete model.
    """
    settings = read_settings(DiffusionRecipe, recipe, context.obj)
    if options.show_recipe:
        print(as_toml(settings, described=True), end="")
        return
    out, steps = options.out, options.steps
    check_given({"--model": options.model, "--data": options.data, "--steps": steps, "--out": out})
    assert options.model is not None and steps is not None and out is not None

    from blockdraft_diffusion.text import read_texts

    try:
        from blockdraft_diffusion.train import train as train_model
        from blockdraft_train.checkpoints import after_interruption
        from blockdraft_train.devices import make_accelerator
        from blockdraft_train.graceful_shutdown import finish_on_signal
        from blockdraft_train.progress import Progress, run_folder
    except ModuleNotFoundError as error:
        raise missing_package("Training", error) from error

    accelerator = make_accelerator(settings, run_folder(out), options.device)
    model = ModelSettings(options.model, settings.block_size, str(accelerator.device), "float32").load()
    texts = read_texts(options.data, records, model)
    finish_on_signal(out)
    checkpoints = run_folder(out) / "checkpoints"

    def interrupted() -> str | None:
        return after_interruption(checkpoints) if accelerator.is_main_process else None

    with exit_on_interrupt(interrupted), display.progress("done") as progress:
        log = train_model(model, texts, steps, out, settings, Progress(progress, tell), accelerator)
    if accelerator.is_main_process:
        bits = next((line["held_out_bits"] for line in reversed(log) if "held_out_bits" in line), None)
        measured = "" if bits is None else f", {bits:.3f} bits per held-out token"
        tell(f"The model is in {out}{measured}; log and checkpoints are in {run_folder(out)}.")


def perplexity(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts or chats, as for `blockdraft data`.")],
    model: Model,
    settings: LikelihoodSettings,
    records: RecordFields,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text for a block-diffusion model.

    It is an upper bound, with the interval that the random noise leaves. With blocks of one token it is exact.
    """
    from blockdraft_diffusion.likelihood import likelihood
    from blockdraft_diffusion.text import read_texts

    loaded = model.load()
    texts = read_texts([file], records, loaded)
    with display.progress("batches") as progress:
        result = likelihood(loaded, texts, settings, progress)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    bound = "" if result.exact else "at most "
    interval = "" if result.exact else f" ({result.low:.4g} to {result.high:.4g}, {result.draws} draws)"
    figures = f"{result.bits_per_token:.4f} bits per token, {result.tokens} tokens"
    print(f"perplexity {bound}{result.perplexity:.4g}{interval}, {figures}")


@settings
class DiffusionGenerateSettings:
    """What `blockdraft diffusion generate` writes, and how it shows it."""

    stop: Annotated[tuple[str, ...], Flag(repeat=True)] = Field(
        (), description="Text that ends an answer, which is cut before it. Repeat the option for several."
    )
    infill: str | None = Field(
        None,
        description='Text with gaps to fill, such as "text [GAP] text", instead of a text to continue. Each gap gets '
        "--max-new-tokens tokens. It sees all text before it, and after it the rest of its block.",
    )
    prompts: Annotated[Path | None, Flag(metavar="FILE", panel=DATA)] = Field(
        None,
        description='File of prompts, one {"prompt": "text"} or {"turns": ["text", ...]} per line, which are answered '
        "together. Each answer is printed as one line of JSON as soon as it is done.",
    )
    show_steps: bool = Field(False, description="Show each pass; unknown tokens are grey boxes.")


def generate(
    *,
    prompt: PromptArgument = None,
    model: Model,
    settings: SampleSettings,
    options: DiffusionGenerateSettings,
    as_json: AsJson = False,
) -> None:
    """Write text, a block at a time."""
    if options.prompts is not None:
        exclude(
            f"--prompts {options.prompts}",
            ("a prompt", prompt),
            ("--infill", options.infill),
            ("--show-steps", options.show_steps),
        )
    if options.infill is not None:
        exclude("--infill", ("a prompt", prompt), ("--stop", options.stop))
    infill = None if options.infill is None else checked_text(options.infill)
    texts = [] if infill is not None else read_prompts(options.prompts) if options.prompts else [read_prompt(prompt)]

    from blockdraft_diffusion.sampler import Sampler
    from blockdraft_diffusion.text import count_unseen, encode_gaps

    loaded = model.load()
    sampler = Sampler(loaded, settings, stop=options.stop)
    sample: Callable[[Watch | None], Iterable[BlockChunk]] = partial(sampler.stream, texts)
    if infill is not None:
        tokens = encode_gaps(infill, settings.max_new_tokens, loaded)
        num_after, num_unseen = count_unseen(tokens, loaded.config.block_size)
        if num_unseen:
            tell(
                f"{num_unseen} of the {num_after} tokens after the gap are in other blocks, so it does not see them; "
                f"--block-size {len(tokens)} makes one block of the whole text."
            )
        sample = partial(sampler.fill, [tokens])
    if options.prompts is not None or as_json:
        _print_json(sampler, sample, max(len(texts), 1), keep_steps=options.show_steps)
    else:
        with _shown(loaded, options.show_steps) as (watch, write):
            for chunk in sample(watch):
                write(chunk)


def _print_json(
    sampler: Sampler, sample: Callable[[Watch | None], Iterable[BlockChunk]], count: int, keep_steps: bool
) -> None:
    """Print a line per answer, in the order in which they end."""
    answers = [{"index": i, "text": "", "token_ids": list[int]()} for i in range(count)]
    for chunk in sample(None):
        answer: dict[str, Any] = answers[chunk.index]
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        if chunk.finish_reason is None:
            continue
        given, new = sampler.inputs[chunk.index], list(answer["token_ids"])
        if None in given:
            new = [token for token, before in zip(new, given, strict=True) if before is None]
            answer["gap_token_ids"] = new
        answer |= {"finish_reason": chunk.finish_reason, "forwards": chunk.forwards}
        answer["tokens_per_forward"] = len(new) / max(chunk.forwards, 1)
        if keep_steps:
            answer["steps"] = [step.block for step in sampler.history[chunk.index]]
        print(json.dumps(answer), flush=True)


@contextmanager
def _shown(model: DiffusionModel, steps: bool) -> Iterator[tuple[Watch | None, Callable[[BlockChunk], None]]]:
    """Print blocks as they come. With `steps`, a terminal shows blocks change; else standard error has a line per pass.

    Yields:
        What to call after each pass, and for each block.
    """
    from rich.live import Live
    from rich.text import Text

    from blockdraft.cli.answers import DRAFTED
    from blockdraft_diffusion.text import token_text

    def spell(block: Sequence[int | None]) -> str:
        return "".join(UNKNOWN if token is None else token_text(token, model) for token in block)

    if not steps or not sys.stdout.isatty():
        watch_plain: Watch | None = (lambda row, block: tell(repr(spell(block)))) if steps else None
        yield watch_plain, lambda chunk: print(chunk.text, end="", flush=True)
        print()
        return
    written = Text()
    with Live(written, console=standard(), auto_refresh=False, vertical_overflow="visible") as live:

        def watch(row: int, block: Sequence[int | None]) -> None:
            live.update(written + Text(spell(block), style=DRAFTED), refresh=True)

        def write(chunk: BlockChunk) -> None:
            written.append(chunk.text)
            live.update(written, refresh=True)

        yield watch, write


add(diffusion, convert, common="out block_size")
add(diffusion, new, common="out like block_size")
add(diffusion, train, common="model data steps out show_recipe", kind=RecipeCommand)
add(diffusion, perplexity, common="model draws block_size as_json")
add(diffusion, generate, common="model max_new_tokens block_size infill prompts show_steps")

DIFFUSION = CommandSpec(diffusion, RUN)
