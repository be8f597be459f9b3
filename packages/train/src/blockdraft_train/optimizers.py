"""Optimizers of a run: AdamW, and Muon for the matrices inside the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from blockdraft.machine import multiplies_bfloat16
from blockdraft_train.recipe import Recipe
from blockdraft_train.variant import Variant

# Coefficients of the quintic Newton-Schulz iteration, from the reference implementation of Muon.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Move the singular values of each matrix `[n, rows, cols]` towards 1."""
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda or multiplies_bfloat16() else x
    for _ in range(steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    result: Tensor = x.mT if matrices.size(-2) > matrices.size(-1) else x
    return result.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Muon, Jordan et al., 2024).

    `torch.optim.Muon` iterates in bfloat16 on every device, and a CPU without bf16 instructions emulates that ten times
    slower than float32. This one iterates in float32 there, and treats all matrices of one shape in one batch.

    Args:
        params: Matrices. Sharded ones are gathered for the iteration.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for (rows, cols), params in by_shape.items():
                for param in params:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 1 - group["momentum"])
                    param.grad.lerp_(momentum, group["momentum"])  # Nesterov
                updates = orthogonalize(torch.stack([_whole(param.grad) for param in params]))
                scale = group["lr"] * max(1.0, rows / cols) ** 0.5
                for param, update in zip(params, updates, strict=True):
                    if isinstance(param, DTensor):
                        update = distribute_tensor(update, param.device_mesh, param.placements, src_data_rank=None)
                    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def make_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], variant: Variant[Any, Any, Any], recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for the variant's matrices and AdamW for the rest."""
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in parameters:
        muon = recipe.optimizer == "muon" and variant.is_matrix(name, parameter)
        (matrices if muon else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    if others:
        optimizers.append(torch.optim.AdamW(others, recipe.learning_rate, weight_decay=recipe.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Set every learning rate to this share of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
