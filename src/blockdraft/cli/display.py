"""What commands show: the answer as it comes, its statistics, comparisons, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from blockdraft.drafters import Drafter, hits
from blockdraft.engine import Chunk, Completion, Costs, Engine, Stats
from blockdraft.engine.adaptive import costs as stored_costs
from blockdraft.engine.text import AnswerText
from blockdraft.tools.quantize.run import Perplexity
from blockdraft.types import SamplingParams

DRAFTED = "green"
SHOWN_EVALUATIONS = 12  # of a training run
LINE_SECONDS = 60.0  # between lines of progress without a terminal
RUNS = 3  # of a comparison
WARM_UP_TOKENS = 8
# Drafting is called slower below these shares of plain decoding's speed: one for a comparison in turns, one for stored
# times of another day.
SLOWER, SLOWER_THAN_STORED = 0.95, 0.85


def stream_answer(console: Console, engine: Engine, prompt: str, params: SamplingParams) -> Stats:
    """Print the answer as it comes, with guessed tokens in colour, and its statistics, which are also returned."""
    chunks = engine.stream(prompt, params)  # refuses bad requests before anything is printed
    end, summary = show_chunks(console, chunks, AnswerText(engine.target.tokenizer, params.stop))
    stats = end.checked().stats
    summary.append(f", finish reason: {end.finish_reason}, backend: {engine.target.running}")
    if note := drafter_note(engine):
        summary.append(f", the drafter {note}")
    console.print("\n", summary, sep="")
    return stats


def show_chunks(console: Console, chunks: Iterable[Chunk], text: AnswerText) -> tuple[Chunk, Text]:
    """Print an answer as it comes, with guessed tokens in colour.

    A character that several tokens make has the colour of the last one.

    Returns:
        The last chunk, and a line with counts and speed.
    """
    tokens, from_draft = 0, 0
    try:
        for chunk in chunks:
            for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True):
                text.push(token)
                _write(console, text.take(), DRAFTED if drafted else None)
            tokens, from_draft = tokens + len(chunk.token_ids), from_draft + sum(chunk.drafted)
        text.finish()
        _write(console, text.take())
    finally:
        console.print()
    stats = chunk.stats
    speed = f", tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s"
    return chunk, Text.assemble(f"{_number(tokens, 'token')}, ", (f"{from_draft} drafted", DRAFTED), speed)


def _write(console: Console, text: str, colour: str | None = None) -> None:
    """Write text as it is: without wrapping, markup, or a change of tabs."""
    console.print(Segments([Segment(text, Style(color=colour))]), end="", soft_wrap=True)


@contextmanager
def notice(console: Console, text: str) -> Iterator[None]:
    """Show a line during a block. It does not move, since an animation would take time from what is measured."""
    _write(console, text + "\r")
    try:
        yield
    finally:
        _write(console, " " * len(text) + "\r")


@contextmanager
def progress(noun: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error how far a long command is: a bar on a terminal, else a line at the beginning and end of
    each stage, and one a minute between them.

    Args:
        noun: What is counted, such as "answers".

    Yields:
        Function that is called with the stage (and news of it, such as a loss), the number done, and the total. The bar
        moves in these calls only, since an animation would take time from what is measured.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        stage = TextColumn("{task.description}", markup=False)
        columns = stage, BarColumn(), MofNCompleteColumn(), TextColumn(f"{noun}, left:")
        with Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("")

            def draw(stage: str, done: int, total: int) -> None:
                bar.update(task, description=stage, completed=done, total=total, refresh=True)

            yield draw
        return
    began = told = called = time.monotonic()
    last: int | None = None

    def write_line(stage: str, done: int, total: int) -> None:
        nonlocal began, told, called, last
        new, last = last is None or done < last, done
        began = called if new else began
        called = now = time.monotonic()
        if new or done == total or now - told >= LINE_SECONDS:
            told = now
            left = f", about {_duration((now - began) / done * (total - done))} left" if 0 < done < total else ""
            print(f"{stage}: {done} of {total} {noun}{left}", file=sys.stderr, flush=True)

    yield write_line


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class Comparison:
    """A prompt decoded with and without drafts.

    Attributes:
        drafted, plain: The run of median speed with drafts, and without.
        first_difference: Index of the first token that differs between runs; None if all are identical.
        drafter: What `drafter_note` says.
    """

    drafted: Completion
    plain: Completion
    first_difference: int | None
    drafter: str | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second with drafts over those without; None for an answer of one token, which takes no cycle."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else None


def compare_with_plain(engine: Engine, prompt: str, params: SamplingParams) -> Comparison:
    """Decode a prompt with the engine and plainly, `RUNS` times in turns after a short warm-up.

    Args:
        params: They need a seed unless they are greedy, or the runs differ.
    """
    plain_engine = Engine(engine.target)
    methods = (engine, plain_engine)
    for method in methods:
        method.generate([prompt], replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    runs = [[method.generate([prompt], params)[0].checked() for method in methods] for _ in range(RUNS)]
    drafted, plain = (
        sorted(column, key=lambda run: run.stats.tokens_per_second)[RUNS // 2] for column in zip(*runs, strict=True)
    )
    answers = [run.token_ids for pair in runs for run in pair]
    columns = enumerate(zip_longest(*answers))
    difference = next((i for i, tokens in columns if len(set(tokens)) > 1), None)
    return Comparison(drafted, plain, difference, drafter_note(engine))


def slower_note(engine: Engine, stats: Stats, measured: Comparison | None) -> str | None:
    """A note for a user whose drafting is slower than plain decoding; None if it is not, or if nothing is known.

    Args:
        measured: A comparison. Without one the stored times of cycles decide, for drafts of a fixed size.
    """
    if engine.drafter.block_size == 1 or not stats.committed:
        return None
    if measured is not None:
        ratio = measured.speedup
        slower = ratio is not None and ratio < SLOWER
        said = f"speed-up {ratio:.2f}" if slower else ""
    else:
        # "auto" does not draft where drafting is slower.
        known = (
            None if engine.controller.automatic else stored_costs.load(stored_costs.path(engine.target, engine.drafter))
        )
        plain = 0.0 if known is None else 1 / known.plain_cycle(1)
        slower = stats.tokens_per_second < SLOWER_THAN_STORED * plain
        said = f"{stats.tokens_per_second:.0f} tokens/s, and {plain:.0f} by the stored times of plain cycles"
    if not slower:
        return None
    auto = "" if engine.controller.automatic else ", or --block-size auto, which drafts only as far as it pays"
    return f"Drafting is slower here than plain decoding ({said}); use --drafter none{auto}."


def show_comparison(console: Console, comparison: Comparison) -> None:
    lines = box.SIMPLE if console.is_terminal else None
    table = Table(box=lines, pad_edge=False, caption_justify="left")
    table.caption = f"Median of {RUNS} runs each, in turns, warm; ms per cycle."
    table.add_column("method")
    for header in ("tokens", "tau", "tokens/s", "draft ms", "verify ms", "host ms"):
        table.add_column(header, justify="right")
    for name, run in (("drafted", comparison.drafted), ("plain", comparison.plain)):
        stats = run.stats
        cycles = max(len(stats.committed), 1)
        parts = (stats.draft_seconds, stats.verify_seconds, stats.host_seconds)
        table.add_row(
            name,
            str(len(run.token_ids)),
            f"{stats.tau:.2f}",
            f"{stats.tokens_per_second:.1f}",
            *(f"{1000 * seconds / cycles:.2f}" for seconds in parts),
        )
    console.print()
    console.print(table)
    accepted = " ".join(f"{100 * share:.0f}" for share in comparison.drafted.stats.acceptance_by_position)
    if accepted:
        console.print(f"accepted by position, %: {accepted}")
    drafted = comparison.drafted.stats.drafted
    ratio = "unknown (one token)"
    if comparison.speedup is not None:
        ratio = f"{comparison.speedup:.2f} ({sum(n > 0 for n in drafted)} of {len(drafted)} cycles drafted)"
    if comparison.first_difference is None:
        same = "identical"
    else:
        same = f"differ, first at token {comparison.first_difference + 1}"
    if comparison.drafter:
        console.print(f"The drafter {comparison.drafter}.")
    console.print(f"speed-up: {ratio}; tokens: {same}")


def show_costs(console: Console, costs: Costs, block_size: int, running: str) -> None:
    """Print a table of cycle times; R is the time of a cycle with drafts over that of one without."""
    lines = box.SIMPLE if console.is_terminal else None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(costs.date))
    cycles = Table(box=lines, pad_edge=False)
    chains = [n for n in (3, 7, 15) if n < block_size] if costs.knows(tree=False) else []
    trees = [16, 32, 64] if costs.knows(tree=True) else []
    for header in ("rows", "plain ms", *(f"R, chain of {n}" for n in chains), *(f"R, tree of {n}" for n in trees)):
        cycles.add_column(header, justify="right")
    for rows, plain in zip(costs.rows, costs.plain, strict=True):
        times = [costs.cycle(rows, n, tree)[n] for tree, sizes in ((False, chains), (True, trees)) for n in sizes]
        cycles.add_row(str(rows), f"{1000 * plain:.2f}", *(f"{each / plain:.2f}" for each in times))
    # Title and caption of the table itself would break at its width, which may be small.
    console.print(f"Cycles, {running}, {when}")
    console.print(cycles)
    if chains or trees:
        console.print("R: a cycle that drafts over a plain one; drafting pays where tau > R")


def show_perplexity(console: Console, found: Perplexity) -> None:
    """Print a table of perplexities before and after rounding."""
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    table.add_column("weights")
    for header in ("perplexity", "over the model's own"):
        table.add_column(header, justify="right")
    for name, value in (
        ("as they were", found.source),
        ("rounded to the nearest", found.nearest),
        ("calibrated", found.calibrated),
    ):
        table.add_row(name, f"{value:.3f}", f"{value / found.source:.4f}")
    console.print(table)


def show_training(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the last evaluations of a training run."""
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False, caption_justify="left")
    table.caption = (
        "accepted length: leading right guesses at fixed anchors, and the bonus; tau: tokens per target forward of the "
        "engine; accuracy: right guesses by position, %."
    )
    for header in ("step", "loss", "held-out loss", "accepted length", "tau", "accuracy"):
        table.add_column(header, justify="right")
    for line in [line for line in lines if "tau" in line or "held_out_loss" in line][-SHOWN_EVALUATIONS:]:
        numbers = (line.get(name) for name in ("loss", "held_out_loss", "held_out_accepted_length", "tau"))
        accuracy = " ".join("?" if a is None else f"{100 * a:.0f}" for a in line.get("held_out_accuracy") or [])
        table.add_row(str(line["step"]), *("?" if n is None else f"{n:.3f}" for n in numbers), accuracy)
    console.print(table)


def draft_vocab(engine: Engine) -> int | None:
    """Number of tokens that the drafter may guess; None if these are all."""
    return next((part.draft_vocab for part in engine.drafter.parts if part.draft_vocab is not None), None)


def drafter_bits(drafter: Drafter) -> int | list[int | None] | None:
    """Bits to which the drafter's weights are rounded; None if they are not. A list where those of the networks of a
    combination differ."""
    found = [part.bits for part in drafter.parts if part.has_pass]
    return found if len({*found}) > 1 else next(iter(found), None)


def drafter_note(engine: Engine) -> str | None:
    """The same in words, with the tokens that it may guess; None if these are all and nothing is rounded."""
    kept, bits = draft_vocab(engine), drafter_bits(engine.drafter)
    said = [f"guesses among {kept} of {engine.target.vocab_size} tokens"] if kept else []
    if bits:
        each = [f"{one} bits" if one else "full precision" for one in (bits if isinstance(bits, list) else [bits])]
        said.append(f"has weights of {', '.join(each)}")
    return " and ".join(said) or None


def ahead_note(drafter: Drafter) -> str | None:
    """Share of the outcomes that were drafted for ahead of time; None if nothing was drafted ahead."""
    foreseen, tried = hits(drafter)
    return f"Drafted ahead: {foreseen} of {tried} outcomes were foreseen ({foreseen / tried:.0%})." if tried else None


def as_dict(completion: Completion, comparison: Comparison | None, engine: Engine) -> dict[str, Any]:
    """An answer as `--json` prints it."""
    stats, target = completion.stats, engine.target
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "tau": stats.tau,
        "cycles": len(stats.drafted),
        "drafted_cycles": sum(n > 0 for n in stats.drafted),
        "acceptance_by_position": stats.acceptance_by_position,
        "tokens_per_second": stats.tokens_per_second,
        "backend": target.backend,
        "running": target.running,
        "draft_vocab": draft_vocab(engine),
        "drafter_bits": drafter_bits(engine.drafter),
    }
    if comparison is not None:
        found["plain_tokens_per_second"] = comparison.plain.stats.tokens_per_second
        found["speedup"] = comparison.speedup
        found["identical"] = comparison.first_difference is None
    return found


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
