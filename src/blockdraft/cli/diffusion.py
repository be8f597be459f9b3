"""`blockdraft diffusion`: makes, trains, measures and samples block-diffusion language models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.generate import checked_text, read_prompt, read_prompts
from blockdraft.cli.help import add
from blockdraft.cli.options import Adapter, FieldOptions, Revision
from blockdraft.cli.train import RecipeCommand
from blockdraft.diffusion.settings import (
    ConvertSettings,
    DiffusionRecipe,
    LikelihoodSettings,
    NewSettings,
    SampleSettings,
)
from blockdraft.errors import UsageError
from blockdraft.settings import as_toml, read_settings

if TYPE_CHECKING:
    from blockdraft.diffusion.create import Created
    from blockdraft.diffusion.model import DiffusionModel
    from blockdraft.diffusion.sampler import Chunk, Sampler, Watch

Model = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Block-diffusion model, made by `blockdraft diffusion convert` or `train`.",
        rich_help_panel="Model",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Where the model runs, such as cpu or cuda:1; by default the first GPU, else cpu.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16",
        help="Numbers of the weights; by default float32 on a CPU and bfloat16 elsewhere.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens of a block; by default that of the model.", rich_help_panel="Model"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object instead of text.")]


def load(path: Path, device: str | None, dtype: str | None, block_size: int | None) -> DiffusionModel:
    from blockdraft.diffusion.folder import load_model

    loading.quiet()
    return load_model(path, device, dtype, block_size)


diffusion = typer.Typer(
    help="Make and use block-diffusion language models, which write whole blocks of text without a target.",
    no_args_is_help=True,
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new model, new or empty.")],
    settings: ConvertSettings,
    adapter: Adapter = None,
    revision: Revision = None,
) -> None:
    """Make a block-diffusion model of a causal language model. It must be trained before it writes well."""
    from blockdraft.cli import display
    from blockdraft.diffusion.create import convert as convert_model

    loading.quiet()
    with display.progress("tensors") as progress:
        found = convert_model(target, out, settings, revision, adapter, progress)
    _tell_made(out, found)


def new(
    *,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder or hub name whose tokenizer is used; by default the bundled tiny model."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new model, new or empty.")],
    settings: NewSettings,
) -> None:
    """Make a block-diffusion model with random weights and the tokenizer of another model."""
    from blockdraft.diffusion.create import new_model

    loading.quiet()
    _tell_made(out, new_model(like, out, settings))


def train(
    *,
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE.toml]", help="Values of recipe fields; others keep their defaults."),
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Block-diffusion model to begin with.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Texts or chats, as for `blockdraft data`. Repeat the option for several."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; more of them continue a run that has ended.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the trained model. Recipe, log and checkpoints go to DIR.run beside it. The same command "
            "resumes an interrupted run.",
        ),
    ] = None,
    records: FieldOptions,
    device: Device = None,
    show_recipe: Annotated[
        bool,
        typer.Option("--show-recipe", help="Print all fields of the recipe with their meaning, as TOML, and exit."),
    ] = False,
) -> None:
    """Train a block-diffusion model. It learns all tokens of texts, and those of the assistant in chats.

    Every recipe field is an option too: --batch 8, --block-size 4, --complementary true; --show-recipe lists them.

    `accelerate launch -m blockdraft diffusion train ...` trains on several devices. `touch DIR.run/finish`, or the
    signal USR1, ends the run early with a whole model.
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
    texts = read_texts(data, records.settings(), loaded)
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


def perplexity(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts or chats, as for `blockdraft data`.")],
    model: Model,
    settings: LikelihoodSettings,
    records: FieldOptions,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text for a block-diffusion model.

    It is an upper bound, with the interval that the random noise leaves. With blocks of one token it is exact.
    """
    from blockdraft.cli import display
    from blockdraft.diffusion.likelihood import likelihood
    from blockdraft.diffusion.text import read_texts

    loaded = load(model, device, dtype, block_size)
    texts = read_texts([file], records.settings(), loaded)
    with display.progress("batches") as progress:
        found = likelihood(loaded, texts, settings, progress)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    told = f"perplexity {found.perplexity:.4g}" if found.exact else f"perplexity at most {found.perplexity:.4g}"
    around = "" if found.exact else f" ({found.low:.4g} to {found.high:.4g}, {found.draws} draws)"
    print(f"{told}{around}, {found.bits_per_token:.4f} bits a token, {found.tokens} tokens")


def _tell_made(out: Path, found: Created) -> None:
    new = ", new to the tokenizer" if found.is_new else ""
    shift = "with" if found.config.token_shift else "without"
    loading.tell(
        f"{out}: blocks of {found.config.block_size}, {shift} token shift, mask token {found.mask_token} "
        f"(id {found.config.mask_token_id}{new})"
    )


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; without one, or with -, it is read from standard input.")
    ] = None,
    model: Model,
    settings: SampleSettings,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends an answer, which is cut before it. Repeat the option for several."),
    ] = None,
    infill: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Text with gaps to fill, such as "text [GAP] text", instead of a text to continue. Each gap gets '
            "--max-new-tokens tokens. It sees all text before it, and after it the rest of its block.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='File of prompts, lines of {"prompt": "text"} or {"turns": ["text", ...]}, that are answered at '
            "once. Each answer is printed as a JSON object on a line, as soon as it is done.",
        ),
    ] = None,
    show_steps: Annotated[
        bool,
        typer.Option("--show-steps", help="Show each pass; unknown tokens are grey boxes."),
    ] = False,
    steps_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture of the passes: a .gif is a film, a .png has one below the other."),
    ] = None,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write text, a block at a time."""
    single = {"a prompt": prompt is not None, "--infill": infill is not None, "--show-steps": show_steps}
    single |= {"--steps-file": steps_file is not None}
    if prompts is not None and any(single.values()):
        other = next(name for name, given in single.items() if given)
        raise UsageError(f"--prompts {prompts} and {other} do not go together; leave one of them away.")
    if infill is not None and (prompt is not None or stop):
        other = "a prompt" if prompt is not None else "--stop"
        raise UsageError(f"--infill and {other} do not go together; leave one of them away.")
    texts = [] if infill is not None else read_prompts(prompts) if prompts else [read_prompt(prompt)]

    from blockdraft.diffusion.sampler import Sampler
    from blockdraft.diffusion.text import count_unseen, encode_gaps, token_text

    if steps_file is not None:
        from blockdraft.diffusion.pictures import check_picture, draw_steps

        check_picture(steps_file)
    loaded = load(model, device, dtype, block_size)
    sampler = Sampler(loaded, settings, stop=stop or ())
    run: Callable[[Watch | None], Iterable[Chunk]] = lambda watch: sampler.stream(texts, watch)  # noqa: E731
    if infill is not None:
        tokens = encode_gaps(checked_text(infill), settings.max_new_tokens, loaded)
        behind, not_seen = count_unseen(tokens, loaded.config.block_size)
        if not_seen:
            print(
                f"{not_seen} of the {behind} tokens after the gap are in other blocks, so it does not see them; "
                f"--block-size {len(tokens)} makes one block of the whole text.",
                file=sys.stderr,
            )
        run = lambda watch: sampler.fill([tokens], watch)  # noqa: E731
    if prompts is not None or as_json:
        _print_json(sampler, run, max(len(texts), 1), keep_steps=show_steps)
    else:
        with _shown_steps(loaded) if show_steps else _plainly() as (watch, write):
            for chunk in run(watch):
                write(chunk)
    if steps_file is not None:
        draw_steps(steps_file, sampler.inputs[0], sampler.history[0], lambda token: token_text(token, loaded))


def _print_json(sampler: Sampler, run: Callable[[Watch | None], Iterable[Chunk]], count: int, keep_steps: bool) -> None:
    """Print a line for each answer, in the order in which they end."""
    answers = [{"index": i, "text": "", "token_ids": list[int]()} for i in range(count)]
    for chunk in run(None):
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
def _plainly() -> Iterator[tuple[None, Callable[[Chunk], None]]]:
    """Print blocks as they come."""
    yield None, lambda chunk: print(chunk.text, end="", flush=True)
    print()


@contextmanager
def _shown_steps(model: DiffusionModel) -> Iterator[tuple[Watch, Callable[[Chunk], None]]]:
    """Show each pass: a terminal shows the block change in place; otherwise standard error gets a line a pass."""
    from rich.live import Live
    from rich.text import Text

    from blockdraft.cli import display

    written = Text()
    if not sys.stdout.isatty():
        with _plainly() as (_, write):
            yield lambda row, block: print(repr(_spelled(model, block)), file=sys.stderr, flush=True), write
        return
    with Live(written, console=consoles.terminal(), auto_refresh=False, vertical_overflow="visible") as live:

        def watch(row: int, block: Sequence[int | None]) -> None:
            live.update(written + Text(_spelled(model, block), style=display.DRAFTED), refresh=True)

        def write(chunk: Chunk) -> None:
            written.append(chunk.text)
            live.update(written, refresh=True)

        yield watch, write


def _spelled(model: DiffusionModel, block: Sequence[int | None]) -> str:
    from blockdraft.diffusion.pictures import UNKNOWN
    from blockdraft.diffusion.text import token_text

    return "".join(UNKNOWN if token is None else token_text(token, model) for token in block)


add(diffusion, convert, short="out block_size")
add(diffusion, new, short="out like block_size")
add(diffusion, train, short="model data steps out show_recipe", kind=RecipeCommand)
add(diffusion, perplexity, short="model draws block_size as_json")
add(diffusion, generate, short="model max_new_tokens block_size infill prompts show_steps")
