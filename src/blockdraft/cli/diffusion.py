"""`blockdraft diffusion`: block-diffusion language models, made, trained, measured and sampled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import loading
from blockdraft.cli.generate import read_prompt, read_prompts
from blockdraft.cli.options import Adapter, FieldOptions, Revision, with_options
from blockdraft.diffusion.settings import ConvertSettings, DiffusionRecipe, LikelihoodSettings, SampleSettings
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.diffusion.model import DiffusionModel
    from blockdraft.diffusion.sampler import Chunk, Sampler

UNKNOWN = "░"  # in place of a token that is not known yet

diffusion = typer.Typer(
    help="Block-diffusion language models: write whole blocks of text at once, without a target.", no_args_is_help=True
)

Model = Annotated[
    Path,
    typer.Option(metavar="DIR", help="A block-diffusion model, made by `blockdraft diffusion convert` or `train`."),
]
Device = Annotated[
    str | None, typer.Option(help="Where the model runs, such as cpu or cuda:1; by default the first GPU, else cpu.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16", help="Of the weights; by default float32 on a CPU and bfloat16 elsewhere."
    ),
]
BlockSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens of a block; by default what the model was made for.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


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
    new = ", new to the tokenizer" if found.is_new else ""
    shift = "with" if found.config.token_shift else "without"
    print(
        f"{out}: blocks of {found.config.block_size}, {shift} token shift, mask token {found.mask_token} "
        f"(id {found.config.mask_token_id}{new})",
        file=sys.stderr,
    )


@diffusion.command()
@with_options
def train(
    *,
    model: Model,
    data: Annotated[
        list[str],
        typer.Option(metavar="SOURCE", help="Texts or chats, as for `blockdraft data`; repeat it for several."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps; a run that has ended goes on with more.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the trained model. Recipe, log and checkpoints go to DIR.run beside it; the same command "
            "goes on with a run that was interrupted.",
        ),
    ],
    recipe: DiffusionRecipe,
    rows: FieldOptions,
    device: Device = None,
) -> None:
    """Train a block-diffusion model. Of texts it learns all tokens, of chats those of the assistant."""
    from blockdraft.cli import display
    from blockdraft.diffusion.text import read_texts

    try:
        from blockdraft.diffusion.train import train as train_model
        from blockdraft.training.records import run_folder
        from blockdraft.training.trainer import Telling
    except ModuleNotFoundError as error:
        raise UsageError(f"Training takes {error.name}; run pip install 'blockdraft[train]'.") from error

    loaded = _load(model, device, "float32", recipe.block_size)
    texts = read_texts(data, rows.rows(), loaded)
    try:
        with display.progress("done") as progress:
            telling = Telling(progress, lambda text: print(text, file=sys.stderr, flush=True))
            lines = train_model(loaded, texts, steps, out, recipe, telling)
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on from the newest checkpoint.", file=sys.stderr)
        raise typer.Exit(130) from None
    bits = next((line["held_out_bits"] for line in reversed(lines) if "held_out_bits" in line), None)
    told = "" if bits is None else f", {bits:.3f} bits per held-out token"
    print(f"The model is in {out}{told}; log and checkpoints are in {run_folder(out)}.", file=sys.stderr)


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

    loaded = _load(model, device, dtype, block_size)
    texts = read_texts([file], rows.rows(), loaded)
    with display.progress("batches") as progress:
        found = likelihood(loaded, texts, settings, progress)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    told = f"perplexity {found.perplexity:.4g}" if found.exact else f"perplexity at most {found.perplexity:.4g}"
    around = "" if found.exact else f" ({found.low:.4g} to {found.high:.4g}, {found.draws} draws)"
    print(f"{told}{around}, {found.bits_per_token:.4f} bits a token, {found.tokens} tokens")


@diffusion.command()
@with_options
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="What to go on from; without it, or with -, it is read from standard input.")
    ] = None,
    model: Model,
    settings: SampleSettings,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends an answer, which is cut before it. Repeat the option for several."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Answer all prompts of this file together, lines of {"prompt": "text"} or {"turns": ["text", ...]}, '
            "and print one JSON object a line, each as soon as it is done.",
        ),
    ] = None,
    show_steps: Annotated[
        bool,
        typer.Option("--show-steps", help="Show each pass: tokens that are not known yet are grey boxes."),
    ] = False,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write text, a block at a time."""
    if prompts is not None and (prompt is not None or show_steps):
        other = "--show-steps" if show_steps else "a prompt"
        raise UsageError(f"--prompts {prompts} and {other} do not go together; leave one of them away.")
    texts = read_prompts(prompts) if prompts else [read_prompt(prompt)]

    from blockdraft.diffusion.sampler import Sampler

    sampler = Sampler(_load(model, device, dtype, block_size), settings, stop=stop or ())
    if prompts is not None or as_json:
        _print_json(sampler, texts, keep_steps=show_steps)
        return
    with _shown_steps(sampler.model) if show_steps else _plainly() as (watch, write):
        for chunk in sampler.stream(texts, watch):
            write(chunk)


def _print_json(sampler: Sampler, prompts: Sequence[str], keep_steps: bool) -> None:
    """A line for each answer, in the order in which they end."""
    answers = [{"index": i, "text": "", "token_ids": list[int]()} for i in range(len(prompts))]
    steps: list[Sequence[int | None]] = []
    for chunk in sampler.stream(prompts, lambda row, block: steps.append(block) if keep_steps else None):
        answer: dict[str, Any] = answers[chunk.row]
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        if chunk.finish_reason is not None:
            answer |= {"finish_reason": chunk.finish_reason, "forwards": chunk.forwards}
            answer["tokens_per_forward"] = len(answer["token_ids"]) / max(chunk.forwards, 1)
            print(json.dumps(answer | ({"steps": steps} if keep_steps else {})), flush=True)


@contextmanager
def _plainly() -> Iterator[tuple[None, Callable[[Chunk], None]]]:
    """Blocks as they come."""
    yield None, lambda chunk: print(chunk.text, end="", flush=True)
    print()


@contextmanager
def _shown_steps(
    model: DiffusionModel,
) -> Iterator[tuple[Callable[[int, Sequence[int | None]], None], Callable[[Chunk], None]]]:
    """Each pass: on a terminal the block changes where it stands, else standard error gets a line a pass."""
    from rich.live import Live
    from rich.text import Text

    from blockdraft.cli import display

    tokenizer, written = model.text.tokenizer, Text()
    assert tokenizer is not None

    def spelled(block: Sequence[int | None]) -> str:
        return "".join(UNKNOWN if token is None else str(tokenizer.decode([token])) for token in block)

    if not sys.stdout.isatty():
        with _plainly() as (_, write):
            yield lambda row, block: print(repr(spelled(block)), file=sys.stderr, flush=True), write
        return
    with Live(written, console=display.terminal(), auto_refresh=False, vertical_overflow="visible") as live:

        def watch(row: int, block: Sequence[int | None]) -> None:
            live.update(written + Text(spelled(block), style=display.DRAFTED), refresh=True)

        def write(chunk: Chunk) -> None:
            written.append(chunk.text)
            live.update(written, refresh=True)

        yield watch, write


def _load(path: Path, device: str | None, dtype: str | None, block_size: int | None) -> DiffusionModel:
    from blockdraft.diffusion.folder import load_model

    loading.quiet()
    return load_model(path, device, dtype, block_size)
