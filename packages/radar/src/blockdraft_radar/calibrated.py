"""Step times that `blockdraft calibrate` measured on this machine, used instead of the roofline model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from blockdraft.decode.step_time import Costs
from blockdraft.engine.adaptive.costs import Pair, of_target
from blockdraft.errors import UsageError
from blockdraft.models import Model, PublishedDrafter, bundled_drafter, known, model_of, pulled
from blockdraft.models.catalogue import BUNDLED
from blockdraft_radar.shape import Shape

KINDS = {"bfloat16": "bf16", "float32": "fp32"}  # torch's names of weight types, and radar's


def calibrated(shape: Shape, weights: str) -> tuple[Costs, PublishedDrafter | None] | None:
    """Return the newest costs of a model with a kind of weights and the current number of threads, or None.

    Returns:
        Costs, and their drafter. If the drafter has no published tau, the costs have plain steps only.
    """
    model = _model(shape)
    path: str | Path | None = shape.path
    if path is None and model is not None and model.file is not None and weights == model.file.weights:
        path, weights = pulled(model), "file"
    if path is None:
        return None
    for pair, costs in of_target(path):
        if KINDS.get(pair.weights, pair.weights) == weights and pair.threads == torch.get_num_threads():
            drafter = _published_drafter(pair, model)
            return (costs if drafter else replace(costs, chain=tuple(() for _ in costs.batch_sizes))), drafter
    return None


def _model(shape: Shape) -> Model | None:
    try:
        return known(shape.name)
    except UsageError:
        return model_of(shape.path)


def _published_drafter(pair: Pair, model: Model | None) -> PublishedDrafter | None:
    bundled = None if model is None else bundled_drafter(model)
    if model is None or bundled is None or pair.drafter is None or Path(pair.drafter) != bundled.resolve():
        return None
    return next((drafter for drafter in model.drafters if drafter.hub == BUNDLED), None)
