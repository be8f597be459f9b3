"""Of which part of the times noise is drawn in training: the one in which the loss varies least (arXiv 2503.09573)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.noise import Noise, noise_at, stratified
from blockdraft.diffusion.text import Tokens

ALL_TIMES = (0.001, 1.0)
WIDTHS, STEP = (0.5, 0.6, 0.7, 0.8, 0.9), 0.05
LEAST = 8  # blocks that an interval must hold, or its variance says little


def intervals() -> list[tuple[float, float]]:
    """Those that are compared: all times first, then windows of each width."""
    found = [ALL_TIMES]
    for width in WIDTHS:
        starts = (STEP * place for place in range(round((1 - width) / STEP) + 1))
        found += [(max(round(start, 2), ALL_TIMES[0]), round(start + width, 2)) for start in starts]
    return found


def steadiest(times: Tensor, losses: Tensor) -> tuple[float, float]:
    """The interval in which the losses of blocks vary least.

    The paper draws anew for each interval; times that are drawn of all and lie in an interval are as good, and one set
    of them serves all intervals.

    Args:
        times: `[K]`, drawn evenly from 0 to 1, one for each block.
        losses: `[K]`, of a block in the mean over its tokens, weighted as in the bound.
    """
    variances = dict[tuple[float, float], float]()
    for low, high in intervals():
        inside = losses[(times >= low) & (times <= high)].double()
        if len(inside) >= LEAST:
            variances[low, high] = torch.var(inside).item()
    return min(variances, key=variances.__getitem__, default=ALL_TIMES)


def steadiest_of(
    model: DiffusionModel,
    batches: Iterable[Tokens],
    schedule: str,
    generator: torch.Generator,
    compute: Callable[[DiffusionModel, Tensor, Noise], Tensor],
) -> tuple[float, float]:
    """`steadiest` of the blocks of some batches of rows.

    Args:
        batches: Of `[B, L]` tokens.
        schedule: A key of `SCHEDULES`.
        generator: Of the noise.
        compute: `losses`, or what comes to the same by other ways.
    """
    size, found_times, found_losses = model.config.block_size, [], []
    for ids, eligible in batches:
        times = stratified((len(ids), -(-ids.size(1) // size)), generator)
        noise = noise_at(times, eligible, size, schedule, generator)
        blocks = torch.arange(ids.size(1)) // size
        sums = torch.zeros(times.shape).index_add(1, blocks, compute(model, ids, noise).float().cpu())
        able = torch.zeros(times.shape).index_add(1, blocks, eligible.float())
        found_times.append(times[able > 0])
        found_losses.append((sums / able)[able > 0])
    return steadiest(torch.cat(found_times), torch.cat(found_losses))
