"""Defaults that depend on target and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.errors import counted
from blockdraft.targets import Target
from blockdraft_train.batches import Documents, split
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.settings import LONGEST
from blockdraft_train.recipe import Recipe
from blockdraft_train.variant import DerivedValue, Variant, find_variant

# Upper bounds, where target and data are large enough. Length and anchors are those of arXiv 2602.06036.
TOKENS_PER_ANCHOR, BATCH, HELD_OUT = 6, 8, 64


@dataclass(frozen=True)
class Resolved:
    """A recipe in which every value is set.

    Attributes:
        variant: Variant with that recipe.
        documents: Documents, cut to the recipe's length.
        trained, held_out: Indices of the documents to train on, and of those to measure on.
        notes: Sentences on values that differ from the usual.
    """

    variant: Variant[Any, Any, Any]
    documents: Documents
    trained: list[int]
    held_out: list[int]
    notes: list[str]


def resolve(
    variant_name: str,
    recipe: Recipe,
    target: Target,
    data: TokenData,
    processes: int,
    complaints: Complaints,
    earlier: Mapping[str, Any] | None = None,
) -> Resolved | None:
    """Derive the values that the recipe leaves open, and check that everything fits.

    Args:
        processes: Number of processes that share a batch.
        complaints: Gets a sentence for each thing that does not fit; the result may then be None.
        earlier: Recipe fields of the run that is resumed. They take precedence over derived values.
    """
    known, notes = earlier or {}, list[str]()
    values: dict[str, Any] = {}

    def take(name: str, choice: DerivedValue) -> Any:
        """Return the value of the recipe, else that of the earlier run, else this choice."""
        value = getattr(recipe, name)
        if value is None:
            value = known[name] if known.get(name) is not None else report(name, choice)
        values[name] = value
        return value

    def report(name: str, choice: DerivedValue) -> Any:
        if choice.why is not None:
            notes.append(f"{name.replace('_', ' ')} {_words(choice.value)}: {choice.why}")
        return choice.value

    context = target.max_context
    short = f"the target's context is {context} tokens" if context < LONGEST else None
    length = take("length", DerivedValue(min(LONGEST, context), short))
    if length > context:
        complaints.messages.append(
            f"length is {length} and the target's context is {context} tokens; give at most that, or leave it out."
        )
    take("anchors", DerivedValue(max(1, length // TOKENS_PER_ANCHOR)))
    documents = Documents(data, length)
    usable = len(documents.usable)
    tenth = max(usable // 10, min(1, usable - 1), 0)
    few = f"a tenth of the {counted(usable, 'document')}" if tenth < HELD_OUT else None
    count = take("held_out", DerivedValue(min(HELD_OUT, tenth), few))
    trained, held_out = list[int](), list[int]()
    with complaints.noting():
        trained, held_out = split(documents, count, recipe.seed)
    tokens = sum(documents.lengths[i] for i in trained)
    least = processes * recipe.accumulation
    sequences = max(1, -(-tokens // length))
    batch = -(-min(BATCH, sequences) // least) * least
    small = f"the documents fill {counted(sequences, 'sequence')} of {length} tokens" if sequences < BATCH else None
    uneven = f"a multiple of {processes} processes times accumulation {recipe.accumulation}" if BATCH % least else None
    if take("batch", DerivedValue(batch, small or uneven)) % least:
        complaints.messages.append(
            f"batch must be a multiple of {processes} processes times accumulation {recipe.accumulation}, "
            f"got {values['batch']}."
        )
    with complaints.noting():
        kind = find_variant(variant_name)
        before = len(complaints.messages)
        for name, choice in kind(recipe).defaults(target, data, complaints).items():
            is_set = getattr(recipe, name) is not None  # the choice is then what the recipe's value becomes
            values[name] = report(name, choice) if is_set else take(name, choice)
        if len(complaints.messages) == before:
            return Resolved(
                variant=kind(replace(recipe, **values)),
                documents=documents,
                trained=trained,
                held_out=held_out,
                notes=notes,
            )
    return None


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
