"""Answers on the terminal: tokens as they come, comparisons with plain decoding, and notes on the drafter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from blockdraft.cli.display import new_table
from blockdraft.drafters import Drafter
from blockdraft.engine import Chunk, Completion, Engine
from blockdraft.engine.text import AnswerText, encode, end_token_ids
from blockdraft.errors import counted
from blockdraft.types import Prompt, SamplingParams

DRAFTED = "green"
RUNS = 3  # of a comparison
WARM_UP_TOKENS = 8
SLOWER = 0.95  # speed-up below which drafting counts as slower


def stream_answer(console: Console, engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Print an answer as it comes, with accepted draft tokens in colour, and its statistics."""
    ids = encode(prompt, engine.target)
    chunks = engine.stream(ids, params)  # raises for a bad request before anything is printed
    ends = end_token_ids(params, engine.target)
    text = AnswerText(engine.target.tokenizer, params.stop, prompt=ids, end_ids=ends)
    end, summary = show_chunks(console, chunks, text)
    end.checked()
    summary.append(f", finish reason: {end.finish_reason}, backend: {engine.target.running}")
    if note := drafter_note(engine):
        summary.append(f", the drafter {note}")
    console.print("\n", summary, sep="")


def show_chunks(console: Console, chunks: Iterable[Chunk], text: AnswerText) -> tuple[Chunk, Text]:
    """Print an answer as it comes. A character that several tokens make has the colour of the last one.

    Returns:
        The last chunk, and a line with counts and speed.
    """
    num_tokens = num_drafted = 0
    try:
        for chunk in chunks:
            for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True):
                text.push(token)
                _write(console, text.take(), DRAFTED if drafted else None)
            num_tokens, num_drafted = num_tokens + len(chunk.token_ids), num_drafted + sum(chunk.drafted)
        text.finish()
        _write(console, text.take())
    finally:
        console.print()
    stats = chunk.stats
    speed = f", tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s"
    return chunk, Text.assemble(f"{counted(num_tokens, 'token')}, ", (f"{num_drafted} drafted", DRAFTED), speed)


def _write(console: Console, text: str, colour: str | None = None) -> None:
    """Write text without wrapping, markup, or a change of tabs."""
    console.print(Segments([Segment(text, Style(color=colour))]), end="", soft_wrap=True)


@dataclass(frozen=True)
class Comparison:
    """A prompt decoded with and without drafting.

    Attributes:
        drafted, plain: The run of median speed with drafting, and without.
        first_difference: Index of the first token that differs between any two runs; None if all are identical.
        drafter: `drafter_note` of the engine.
    """

    drafted: Completion
    plain: Completion
    first_difference: int | None
    drafter: str | None = None

    @property
    def speedup(self) -> float | None:
        """Drafted over plain tokens per second; None for an answer of one token, which takes no step."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else None


def compare_with_plain(engine: Engine, prompt: Prompt, params: SamplingParams) -> Comparison:
    """Decode a prompt with the engine and plainly, `RUNS` times each, interleaved, after a short warm-up.

    Args:
        params: Sampled runs need a seed, or they differ.
    """
    engines = (engine, Engine(engine.target))
    for method in engines:
        method.generate([prompt], replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    runs = [[method.generate([prompt], params)[0].checked() for method in engines] for _ in range(RUNS)]
    drafted, plain = (
        sorted(column, key=lambda run: run.stats.tokens_per_second)[RUNS // 2] for column in zip(*runs, strict=True)
    )
    columns = enumerate(zip_longest(*(run.token_ids for pair in runs for run in pair)))
    difference = next((position for position, tokens in columns if len(set(tokens)) > 1), None)
    return Comparison(drafted, plain, difference, drafter_note(engine))


def slower_note(engine: Engine, comparison: Comparison) -> str | None:
    """Return a note if drafting is slower than plain decoding, else None."""
    if engine.drafter.block_size == 1 or comparison.speedup is None or comparison.speedup >= SLOWER:
        return None
    remedy = "" if engine.controller.automatic else ", or --block-size auto, which drafts only as far as it pays off"
    return (
        f"Drafting is slower here than plain decoding (speed-up {comparison.speedup:.2f}); use --drafter none{remedy}."
    )


def show_comparison(console: Console, comparison: Comparison) -> None:
    headers = "method", ">tokens", ">tau", ">tokens/s", ">draft ms", ">verify ms", ">host ms"
    table = new_table(console, *headers, caption=f"Median of {RUNS} interleaved runs each, warm; ms per step.")
    for name, run in (("drafted", comparison.drafted), ("plain", comparison.plain)):
        stats = run.stats
        parts = (stats.draft_seconds, stats.verify_seconds, stats.host_seconds)
        table.add_row(
            name,
            str(len(run.token_ids)),
            f"{stats.tau:.2f}",
            f"{stats.tokens_per_second:.1f}",
            *(f"{1000 * seconds / max(len(stats.committed), 1):.2f}" for seconds in parts),
        )
    console.print()
    console.print(table)
    drafted = comparison.drafted.stats
    accepted = " ".join(f"{100 * share:.0f}" for share in drafted.acceptance_by_position)
    if accepted:
        console.print(f"accepted by position, %: {accepted}")
    if comparison.drafter:
        console.print(f"The drafter {comparison.drafter}.")
    speedup = "unknown (one token)"
    if comparison.speedup is not None:
        num_drafted = sum(count > 0 for count in drafted.drafted)
        speedup = f"{comparison.speedup:.2f} ({num_drafted} of {len(drafted.drafted)} steps drafted)"
    first = comparison.first_difference
    tokens = "identical" if first is None else f"differ, first at token {first + 1}"
    console.print(f"speed-up: {speedup}; tokens: {tokens}")


def draft_vocab(engine: Engine) -> int | None:
    """Return the number of tokens that the drafter can propose, or None for all."""
    return next((part.draft_vocab for part in engine.drafter.parts if part.draft_vocab is not None), None)


def drafter_bits(drafter: Drafter) -> int | list[int | None] | None:
    """Return the drafter's bits per weight: None if it is not quantized, a list where members of a hybrid differ."""
    bits = [part.bits for part in drafter.parts if part.runs_network]
    return bits if len({*bits}) > 1 else next(iter(bits), None)


def drafter_note(engine: Engine) -> str | None:
    """Describe the drafter's restricted vocabulary and quantization, or return None if it has neither."""
    vocab, bits = draft_vocab(engine), drafter_bits(engine.drafter)
    notes = [f"proposes {vocab} of {engine.target.vocab_size} tokens"] if vocab else []
    if bits:
        members = bits if isinstance(bits, list) else [bits]
        notes.append(f"has weights of {', '.join(f'{n} bits' if n else 'full precision' for n in members)}")
    return " and ".join(notes) or None


def as_dict(completion: Completion, comparison: Comparison | None, engine: Engine) -> dict[str, Any]:
    """Return an answer as `--json` prints it."""
    stats, target = completion.stats, engine.target
    answer: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "tau": stats.tau,
        "steps": len(stats.drafted),
        "drafted_steps": sum(count > 0 for count in stats.drafted),
        "acceptance_by_position": stats.acceptance_by_position,
        "tokens_per_second": stats.tokens_per_second,
        "backend": target.backend,
        "running": target.running,
        "draft_vocab": draft_vocab(engine),
        "drafter_bits": drafter_bits(engine.drafter),
    }
    if comparison is not None:
        answer["plain_tokens_per_second"] = comparison.plain.stats.tokens_per_second
        answer["speedup"] = comparison.speedup
        answer["identical"] = comparison.first_difference is None
    return answer
