"""Cycle times that `blockdraft calibrate` measured on this machine, in the place of a projection's roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from blockdraft.engine.adaptive.costs import Costs, Pair, of_target
from blockdraft.errors import UsageError
from blockdraft.models import Drafter, Model, bundled_drafter, known, model_of, pulled
from blockdraft.models.catalogue import BUNDLED
from blockdraft.radar.shape import Shape

KINDS = {"bfloat16": "bf16", "float32": "fp32"}  # weights by their names here


def calibrated(shape: Shape, weights: str) -> tuple[Costs, Drafter | None] | None:
    """Newest costs of a model with a kind of weights, as many threads running it as now; None if there are none.

    Returns:
        Costs, and the drafter that they are of. Those of drafters whose tau nobody published keep plain cycles alone.
    """
    model = _model(shape)
    place: str | Path | None = shape.place
    if place is None and model is not None and model.file is not None and weights == model.file.weights:
        place, weights = pulled(model), "file"
    if place is None:
        return None
    for pair, costs in of_target(place):
        if KINDS.get(pair.weights, pair.weights) == weights and pair.threads == torch.get_num_threads():
            drafter = _published(pair, model)
            return (costs if drafter else replace(costs, chain=tuple(() for _ in costs.rows))), drafter
    return None


def _model(shape: Shape) -> Model | None:
    try:
        return known(shape.name)
    except UsageError:
        return model_of(shape.place)


def _published(pair: Pair, model: Model | None) -> Drafter | None:
    ours = None if model is None else bundled_drafter(model)
    if model is None or ours is None or pair.drafter is None or Path(pair.drafter) != ours.resolve():
        return None
    return next((each for each in model.drafters if each.hub == BUNDLED), None)
