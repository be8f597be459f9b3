"""What the sums of a step say: how much each term of the loss weighs, the loss, and the figures that are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from blockdraft.errors import NumbersError
from blockdraft.training.batches import Batch
from blockdraft.training.loss import Sums, term_weights
from blockdraft.training.variant import Variant


def weights_of(variant: Variant[Any, Any, Any], batches: Iterable[Batch]) -> list[float]:
    """The sum of the weights of each term's slots, where `batches` are those of all processes."""
    taught = [batch.tensors.taught_BAK for batch in batches]
    return [
        max(sum(float(term_weights(variant, name, one).sum()) for one in taught), 1e-9) for name in variant.factors()
    ]


def loss_of(variant: Variant[Any, Any, Any], terms_T: Tensor, weights: Sequence[float]) -> Tensor:
    """The loss, a scalar, of the sums of all terms."""
    factors = variant.factors().values()
    return torch.stack([f * term / w for f, term, w in zip(factors, terms_T, weights, strict=True)]).sum()


def figures_of(
    variant: Variant[Any, Any, Any], found: Sequence[Sums], weights: Sequence[float], accelerator: Accelerator
) -> dict[str, Any]:
    """What the sums of all processes say; `found` are those of this one."""
    parts = [torch.cat([one.double().flatten() for one in sums]) for sums in found]
    summed = cast(Tensor, accelerator.reduce(torch.stack(parts).sum(dim=0), "sum")).cpu()
    slots, names, counted = variant.taught_slots, list(variant.factors()), variant.counted
    sizes = [len(names), slots, slots, len(counted), 1, 1]
    terms, right, taught, counts, accepted, blocks = summed.split(sizes)
    figures: dict[str, Any] = {"loss": float(loss_of(variant, terms, weights))}
    if len(names) > 1:
        figures |= {f"loss_{name}": float(t) / w for name, t, w in zip(names, terms, weights, strict=True)}
    figures["accuracy"] = [round(float(r / t), 4) if t else None for r, t in zip(right, taught, strict=True)]
    if taught.any():
        figures |= {name: float(count / taught.sum()) for name, count in zip(counted, counts, strict=True)}
    figures["accepted_length"] = float(accepted / blocks) if blocks else None
    return figures


def not_finite(said: Iterable[Tensor], done: int, loss: float, norm: float) -> NumbersError:
    """Why loss or gradient norm of a step are not finite.

    Args:
        said: What the target computed at this step.
        done: Steps before it.
    """
    kept = " The newest checkpoint stays as it is." if done else ""
    if all(bool(one.isfinite().all()) for one in said):
        return NumbersError(
            f"Loss {loss} and gradient norm {norm} at step {done + 1} are not both finite; lower the learning rate, or "
            f"use dtype float32.{kept}"
        )
    return NumbersError(
        f"The target computed numbers that are not finite at step {done + 1}, so nothing can be learned from it; load "
        f"it with --target-dtype float32, or, if it is already, copy its weights again.{kept}"
    )
