"""Weight and cost of a kind of drafter for a projection, from `DrafterSpec.cost`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from blockdraft.drafters import DraftCost, entries
from blockdraft.models import Drafter
from blockdraft.radar.shape import Shape

LIKELY = "dflash"  # kind of drafter that is trained for a model, and that one without a published one is projected with


@cache
def cost_of(kind: str) -> DraftCost:
    """Cost of a kind of drafter; that of most kinds where ours does not run it."""
    known = entries()
    return known[kind].cost if kind in known else DraftCost()


def cost_for(drafter: Drafter | None) -> DraftCost:
    """Cost of a drafter, as far as it is known to be another than its kind's."""
    cost = cost_of(kind_of(drafter))
    if drafter is None:
        return cost
    head, layers = drafter.draft_vocab or cost.head_vocabulary, drafter.layers or cost.layers
    return replace(cost, head_vocabulary=head, layers=layers)


def kind_of(drafter: Drafter | None) -> str:
    """Kind of a drafter; None stands for one that is still to be trained."""
    return drafter.kind if drafter else LIKELY


def draft_weights(shape: Shape, cost: DraftCost) -> int:
    """Weights of a drafter's network without embedding and head, which are the target's: layers as wide as the
    target's, and the fusion of what it taps."""
    attention = 2 * shape.hidden * shape.heads * shape.head_size + shape.hidden * shape.hidden // 2
    width = min(shape.intermediate, 4 * shape.hidden) if not shape.experts else 3 * shape.hidden
    return cost.layers * (attention + 3 * shape.hidden * width) + cost.target_layers * shape.hidden * shape.hidden


def head_weights(shape: Shape, cost: DraftCost) -> int:
    """Weights of the output head that a drafter runs."""
    return shape.hidden * min(cost.head_vocabulary or shape.vocabulary, shape.vocabulary)
