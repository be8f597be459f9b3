"""`blockdraft diffusion generate`: text from a block-diffusion model, and how it came about."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.diffusion_model import AsJson, BlockSize, Device, Dtype, Model, load
from blockdraft.cli.generate import checked_text, read_prompt, read_prompts
from blockdraft.cli.options import with_options
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.diffusion.model import DiffusionModel
    from blockdraft.diffusion.sampler import Chunk, Sampler, Watch


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
    infill: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Find what is missing, instead of going on: "text [GAP] text". Each gap gets --max-new-tokens tokens. '
            "It sees all that stands before it, and behind it what stands in its block.",
        ),
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
    steps_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the passes: as a film into a .gif, one below the other into a .png."),
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
    from blockdraft.diffusion.text import gapped, spelled, unseen

    if steps_file is not None:
        from blockdraft.diffusion.pictures import check_picture, draw_steps

        check_picture(steps_file)
    loaded = load(model, device, dtype, block_size)
    sampler = Sampler(loaded, settings, stop=stop or ())
    run: Callable[[Watch | None], Iterable[Chunk]] = lambda watch: sampler.stream(texts, watch)  # noqa: E731
    if infill is not None:
        tokens = gapped(checked_text(infill), settings.max_new_tokens, loaded)
        behind, not_seen = unseen(tokens, loaded.config.block_size)
        if not_seen:
            print(
                f"{not_seen} of the {behind} tokens behind the gap share no block with it and are not looked at; "
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
        draw_steps(steps_file, sampler.given[0], sampler.history[0], lambda token: spelled(token, loaded))


def _print_json(sampler: Sampler, run: Callable[[Watch | None], Iterable[Chunk]], count: int, keep_steps: bool) -> None:
    """A line for each answer, in the order in which they end."""
    answers = [{"index": i, "text": "", "token_ids": list[int]()} for i in range(count)]
    for chunk in run(None):
        answer: dict[str, Any] = answers[chunk.row]
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        if chunk.finish_reason is None:
            continue
        given, new = sampler.given[chunk.row], list(answer["token_ids"])
        if None in given:
            new = [token for token, before in zip(new, given, strict=True) if before is None]
            answer["gap_token_ids"] = new
        answer |= {"finish_reason": chunk.finish_reason, "forwards": chunk.forwards}
        answer["tokens_per_forward"] = len(new) / max(chunk.forwards, 1)
        if keep_steps:
            answer["steps"] = [step.block for step in sampler.history[chunk.row]]
        print(json.dumps(answer), flush=True)


@contextmanager
def _plainly() -> Iterator[tuple[None, Callable[[Chunk], None]]]:
    """Blocks as they come."""
    yield None, lambda chunk: print(chunk.text, end="", flush=True)
    print()


@contextmanager
def _shown_steps(model: DiffusionModel) -> Iterator[tuple[Watch, Callable[[Chunk], None]]]:
    """Each pass: on a terminal the block changes where it stands, else standard error gets a line a pass."""
    from rich.live import Live
    from rich.text import Text

    from blockdraft.cli import display

    written = Text()
    if not sys.stdout.isatty():
        with _plainly() as (_, write):
            yield lambda row, block: print(repr(_spelled(model, block)), file=sys.stderr, flush=True), write
        return
    with Live(written, console=display.terminal(), auto_refresh=False, vertical_overflow="visible") as live:

        def watch(row: int, block: Sequence[int | None]) -> None:
            live.update(written + Text(_spelled(model, block), style=display.DRAFTED), refresh=True)

        def write(chunk: Chunk) -> None:
            written.append(chunk.text)
            live.update(written, refresh=True)

        yield watch, write


def _spelled(model: DiffusionModel, block: Sequence[int | None]) -> str:
    from blockdraft.diffusion.pictures import UNKNOWN
    from blockdraft.diffusion.text import spelled

    return "".join(UNKNOWN if token is None else spelled(token, model) for token in block)
