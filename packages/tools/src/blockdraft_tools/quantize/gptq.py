"""GPTQ (arXiv 2210.17323).

It quantizes the columns of a weight one after the other, those with the largest inputs first, and adjusts the remaining
columns to compensate each error, as far as inputs are correlated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import QuantizedWeight, check_group
from blockdraft.nn.quantize_weight import best_grid

DAMPING = 0.01  # share of the mean square of all inputs that is added to each, so that every input counts
BLOCK = 128  # columns whose errors are passed on at once


def quantize_weight_gptq(
    weight: Tensor, moments: Tensor, bits: int, group: int, zero_points: bool = False
) -> QuantizedWeight:
    """Quantize a weight `[out, in]` so that its products with typical inputs change little (GPTQ).

    Args:
        moments: `[in, in]`, the sum of `x x^T` over the inputs x.
        bits, zero_points: As in `best_grid`.
        group: Inputs that share a scale.

    Raises:
        UsageError: The group does not divide the inputs, or a number is NaN or infinite, of the moments too.
    """
    check_group(weight.size(1), group)
    count = weight.size(1)
    moments = moments.float().clone()
    if not bool(moments.isfinite().all()):
        raise UsageError(
            "The model computes NaN or infinity for the text, so it cannot be calibrated. Repair its checkpoint, or "
            "leave calibrate out."
        )
    squares = moments.diagonal()
    squares += DAMPING * squares.mean() + torch.finfo(torch.float32).tiny
    grid = best_grid(weight.float().unflatten(1, (-1, group)), bits, squares.view(-1, group), zero_points)
    order = squares.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    # Row i of `spread` is how later columns compensate an error in column i.
    spread = torch.linalg.cholesky(inverse, upper=True)
    remaining, codes = weight.float()[:, order], torch.empty_like(weight, dtype=torch.float32)
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        errors = torch.zeros(len(weight), end - begin)
        for i in range(begin, end):
            own = grid.column(int(order[i]) // group)
            numbers = remaining[:, i, None, None]
            chosen = own.codes(numbers)
            codes[:, order[i]] = chosen[:, 0, 0]
            error = (remaining[:, i] - own.values(chosen)[:, 0, 0]) / spread[i, i]
            remaining[:, i:end] -= torch.outer(error, spread[i, i:end])
            errors[:, i - begin] = error
        remaining[:, end:] -= errors @ spread[begin:end, end:]
    return grid.weight(codes)
