"""`blockdraft demo`: three questions, with and without drafting."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from blockdraft.cli import consoles, loading
from blockdraft.cli.models import progress
from blockdraft.errors import UsageError
from blockdraft.settings import settings
from blockdraft.types import Drafting, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.cli.display import Comparison
    from blockdraft.targets import Target

TEXT = (
    "Anna lives in a small house near the river. Every morning Anna walks to the market with her dog. She buys bread, "
    "milk and apples. In the afternoon Anna reads a book under the old tree, and in the evening she cooks soup for her "
    "friends."
)
QUESTIONS = {
    "a chat answer": "What is gravity? Explain it to a child in a few sentences.",
    "a small program": "Write a Python function that returns the largest number in a list.",
    "a text with a change": f"Replace the name Anna by Maria in this text. Say only the new text.\n\n{TEXT}",
}
TINY_QUESTIONS = {  # of the kinds that the bundled model knows
    "a word problem": "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?",
    "another": "A baker makes 4 trays of 6 rolls. She sells 9 rolls. How many rolls are left?",
    "a small program": "Write a solution to the following problem and make sure that it passes the tests:\n"
    '```python\ndef count_evens(numbers):\n    """Return how many of the numbers are even."""\n\n```',
}
CONTEXT, REPEATS = 64, 15  # tokens before the forwards that are timed, and their number
CHECKED = 8  # tokens of the longer forward
SUPPOSED_TAU = 3.0


@settings
class DemoSettings:
    """Settings of the demonstration.

    Attributes:
        tiny: Show the bundled tiny model, and download nothing.
        max_new_tokens: Most tokens of an answer; speeds are taken from the second on.
    """

    tiny: bool = False
    max_new_tokens: Annotated[int, Field(ge=2)] = 96


def demo(*, how: DemoSettings) -> None:
    """Answer three questions with and without drafting, and compare tokens and speed.

    The model is SmolLM2 135M, which is pulled first if it is not here (93 MB). Where that is not possible, it is the
    bundled tiny model.
    """
    name = "bundled" if how.tiny else _pulled()

    from blockdraft.cli import display
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine

    target = loading.load(name, threads="auto")
    drafter = load_drafter(target=target)
    engine = Engine(target, drafter, 1, Drafting("auto"))
    console, params = consoles.standard(), SamplingParams(how.max_new_tokens)
    draft_tokens = "prompt_lookup, which guesses what the text repeats" if drafter.path is None else "its own"
    console.print(f"Model: {name}, {target.running}. Drafter: {draft_tokens}.\n", soft_wrap=True)
    found: dict[str, Comparison] = {}
    for kind, question in (TINY_QUESTIONS if name == "bundled" else QUESTIONS).items():
        console.print(f"> {question}\n", soft_wrap=True)
        if console.is_terminal:
            display.stream_answer(console, engine, question, params)
            with display.notice(console, "measuring ..."):
                found[kind] = display.compare_with_plain(engine, question, params)
            console.print()
        else:
            found[kind] = display.compare_with_plain(engine, question, params)
            console.print(f"{found[kind].drafted.text}\n", soft_wrap=True)
    show(console, found)
    console.print(worth(forward_cost(target, CHECKED)), soft_wrap=True)
    if any(each.first_difference is not None for each in found.values()):
        raise typer.Exit(1)


def _pulled() -> str:
    """The name of the model to show, which is pulled if need be and possible."""
    from blockdraft.models import DEFAULT, known, pulled
    from blockdraft.models.pull import pull

    if pulled(known(DEFAULT)) is None:
        try:
            with progress() as shown:
                pull(known(DEFAULT), tell=loading.tell, progress=shown)
        except UsageError as error:
            loading.tell(f"{error}\nThe bundled tiny model is shown instead.")
            return "bundled"
    return DEFAULT


def show(console: Console, found: dict[str, Comparison]) -> None:
    """Print the table of all questions."""
    from rich import box
    from rich.table import Table

    from blockdraft.cli.display import RUNS

    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False, caption_justify="left")
    table.caption = f"Medians of {RUNS} runs each, in turns; drafting pauses where it does not pay."
    table.add_column("question")
    for header in ("tokens", "plain tokens/s", "drafted tokens/s", "speed-up", "tau"):
        table.add_column(header, justify="right")
    table.add_column("answers")
    for kind, one in found.items():
        plain, drafted = one.plain.stats, one.drafted.stats
        table.add_row(
            kind,
            str(len(one.drafted.token_ids)),
            f"{plain.tokens_per_second:.0f}",
            f"{drafted.tokens_per_second:.0f}",
            "?" if one.speedup is None else f"{one.speedup:.2f}",
            f"{drafted.tau:.2f}",
            "identical" if one.first_difference is None else "DIFFER",
        )
    console.print(table)


def forward_cost(target: Target, tokens: int) -> float:
    """Time of a forward over several tokens, over that of one."""
    import torch

    from blockdraft.decode.proposal import chain_parents

    cache = target.new_cache(1, target.row_slots(CONTEXT + tokens))
    cache.commit([range(CONTEXT)])  # as if so many tokens had been read
    seconds: dict[int, list[float]] = {1: [], tokens: []}
    for _ in range(REPEATS):
        for count, times in seconds.items():
            began = time.perf_counter()
            target.forward(torch.zeros(1, count, dtype=torch.long), chain_parents(1, count), cache)
            times.append(time.perf_counter() - began)
    return statistics.median(seconds[tokens]) / statistics.median(seconds[1])


def worth(cost: float) -> str:
    """What a drafter is worth where a forward over `CHECKED` tokens costs so many times one over a single token."""
    gain = SUPPOSED_TAU / cost
    return (
        f"On this processor a forward over {CHECKED} tokens takes {cost:.2f} times as long as one over a single token. "
        f"A drafter that makes {SUPPOSED_TAU:g} tokens of it (tau) would make decoding {gain:.2f} times as fast, less "
        "its own time."
    )
