"""What a recipe leaves to target and data is settled here, and whatever does not fit is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from blockdraft.data.documents import TokenData
from blockdraft.data.settings import LONGEST
from blockdraft.errors import Complaints, counted
from blockdraft.targets import Target
from blockdraft.training.batches import Documents, split
from blockdraft.training.recipe import Recipe
from blockdraft.training.variant import Choice, Variant, find_variant

# Where target and data are not too small for them. Length and anchors are those of arXiv 2602.06036.
TOKENS_PER_ANCHOR, BATCH, HELD_OUT = 6, 8, 64
FEW_STEPS = 100


class Settled(NamedTuple):
    """Attributes:
    variant: With a recipe in which nothing is left open.
    documents: Cut to its length.
    trained, held_out: Indices of the documents.
    notes: Sentences on what was settled otherwise than usual.
    """

    variant: Variant[Any, Any, Any]
    documents: Documents
    trained: list[int]
    held_out: list[int]
    notes: list[str]


def settle(
    variant_name: str,
    recipe: Recipe,
    target: Target,
    data: TokenData,
    processes: int,
    complaints: Complaints,
    earlier: Mapping[str, Any] | None = None,
) -> Settled | None:
    """Fill in what the recipe leaves open.

    Args:
        processes: How many share a batch.
        complaints: Gets what does not fit; then the result may be None.
        earlier: Values of the run that is gone on with; they are kept where the recipe leaves them open.
    """
    known, notes = earlier or {}, list[str]()
    values: dict[str, Any] = {}

    def take(name: str, choice: Choice) -> Any:
        """The recipe's value; where it leaves that open, the earlier run's or this choice."""
        value = getattr(recipe, name)
        if value is None:
            value = known[name] if known.get(name) is not None else tell(name, choice)
        values[name] = value
        return value

    def tell(name: str, choice: Choice) -> Any:
        if choice.why is not None:
            notes.append(f"{name.replace('_', ' ')} {_words(choice.value)}: {choice.why}")
        return choice.value

    context = target.max_context
    short = f"the target's context is {context} tokens" if context < LONGEST else None
    length = take("length", Choice(min(LONGEST, context), short))
    if length > context:
        complaints.messages.append(
            f"length is {length} and the target's context is {context} tokens; give at most that, or leave it out."
        )
    take("anchors", Choice(max(1, length // TOKENS_PER_ANCHOR)))
    documents = Documents(data, length)
    usable = len(documents.usable)
    tenth = max(usable // 10, min(1, usable - 1), 0)
    few = f"a tenth of the {counted(usable, 'document')}" if tenth < HELD_OUT else None
    held = take("held_out", Choice(min(HELD_OUT, tenth), few))
    trained, held_out = list[int](), list[int]()
    with complaints.noting():
        trained, held_out = split(documents, held, recipe.seed)
    tokens = sum(documents.lengths[i] for i in trained)
    least = processes * recipe.accumulation
    rows = max(1, -(-tokens // length))
    batch = -(-min(BATCH, rows) // least) * least
    small = f"the documents fill {counted(rows, 'row')} of {length} tokens" if rows < BATCH else None
    uneven = f"a multiple of {processes} processes times accumulation {recipe.accumulation}" if BATCH % least else None
    if take("batch", Choice(batch, small or uneven)) % least:
        complaints.messages.append(
            f"batch is {values['batch']}; it must be a multiple of {processes} processes times accumulation "
            f"{recipe.accumulation}."
        )
    with complaints.noting():
        kind = find_variant(variant_name)
        before = len(complaints.messages)
        for name, choice in kind(recipe).settle(target, data, complaints).items():
            given = getattr(recipe, name) is not None  # then it is what becomes of the recipe's value
            values[name] = tell(name, choice) if given else take(name, choice)
        if len(complaints.messages) == before:
            return Settled(kind(replace(recipe, **values)), documents, trained, held_out, notes)
    return None


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
