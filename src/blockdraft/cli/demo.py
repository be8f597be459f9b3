"""`blockdraft demo`: three questions, answered with and without drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.display import BYTES, new_table, progress, standard, tell
from blockdraft.cli.target import load
from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.cli.answers import Comparison

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
MAX_NEW_TOKENS = 96


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Use the bundled tiny model, and download nothing.")] = False,
) -> None:
    """Answer three questions with and without drafting, and compare tokens and speed.

    The model is SmolLM2 135M, which is pulled first if it is missing (93 MB). If that fails, the bundled tiny model is
    used.
    """
    name = "bundled" if tiny else _pulled()

    from blockdraft.cli import answers
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine

    target = load(name, threads="auto")
    drafter = load_drafter(target=target)
    engine = Engine(target, drafter, 1)
    console, params = standard(), SamplingParams(MAX_NEW_TOKENS)
    kind = "lookup, which repeats parts of the text" if drafter.path is None else "its own"
    console.print(f"Model: {name}, {target.running}. Drafter: {kind}.\n", soft_wrap=True)
    comparisons: dict[str, Comparison] = {}
    for topic, question in (TINY_QUESTIONS if name == "bundled" else QUESTIONS).items():
        console.print(f"> {question}\n", soft_wrap=True)
        if console.is_terminal:
            answers.stream_answer(console, engine, question, params)
        comparisons[topic] = answers.compare_with_plain(engine, question, params)
        console.print("" if console.is_terminal else f"{comparisons[topic].drafted.text}\n", soft_wrap=True)
    show(console, comparisons)
    if any(comparison.first_difference is not None for comparison in comparisons.values()):
        raise typer.Exit(1)


def _pulled() -> str:
    """Return the name of the default model, and pull it if necessary; or "bundled" if that fails."""
    from blockdraft.models import DEFAULT, known, pulled
    from blockdraft.models.pull import pull

    if pulled(known(DEFAULT)) is None:
        try:
            with progress(BYTES) as show_progress:
                pull(known(DEFAULT), tell=tell, progress=show_progress)
        except UsageError as error:
            tell(f"{error}\nThe bundled tiny model is shown instead.")
            return "bundled"
    return DEFAULT


def show(console: Console, comparisons: dict[str, Comparison]) -> None:
    """Print the table of all questions."""
    from blockdraft.cli.answers import RUNS

    headers = "question", ">tokens", ">plain tokens/s", ">drafted tokens/s", ">speed-up", ">tau", "answers"
    caption = f"Median of {RUNS} interleaved runs. Drafting pauses when it would be slower."
    table = new_table(console, *headers, caption=caption)
    for topic, comparison in comparisons.items():
        plain, drafted = comparison.plain.stats, comparison.drafted.stats
        table.add_row(
            topic,
            str(len(comparison.drafted.token_ids)),
            f"{plain.tokens_per_second:.0f}",
            f"{drafted.tokens_per_second:.0f}",
            "?" if comparison.speedup is None else f"{comparison.speedup:.2f}",
            f"{drafted.tau:.2f}",
            "identical" if comparison.first_difference is None else "DIFFER",
        )
    console.print(table)
