"""Optimisers and their learning rates over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from blockdraft.training.muon import Muon
from blockdraft.training.recipe import Recipe
from blockdraft.training.variant import Variant

WSD_FALL = 0.2  # share of the steps in which the rates of "wsd" fall


def make_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], variant: Variant[Any, Any, Any], recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the variant's matrices and AdamW for the rest."""
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in parameters:
        muon = recipe.optimizer == "muon" and variant.is_matrix(name, parameter)
        (matrices if muon else others).append(parameter)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    if others:
        found.append(torch.optim.AdamW(others, recipe.learning_rate, weight_decay=recipe.weight_decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def rate(step: int, steps: int, recipe: Recipe) -> float:
    """The share of the peak rates at step 0, 1, ..., `steps` - 1: up in a line, then down as the schedule says."""
    rising = recipe.warmup * steps
    if step + 1 < rising:
        return (step + 1) / rising
    begin = max(rising, (1 - WSD_FALL) * steps) if recipe.schedule == "wsd" else rising
    way = min(max(step - begin, 0.0) / max(steps - begin, 1.0), 1.0)
    left = 1 - way if recipe.schedule == "linear" else (1 + math.cos(math.pi * way)) / 2
    return recipe.final + (1 - recipe.final) * left


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
