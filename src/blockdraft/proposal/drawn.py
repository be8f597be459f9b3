"""The laws q of guesses that are drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blockdraft.proposal.proposal import SparseLaw
from blockdraft.types import SamplingParams

LAW_SIZE = 64  # most probable tokens among which a guess is drawn


def cut_laws(probs: Tensor) -> SparseLaw:
    """Laws `[..., V]` cut to their `LAW_SIZE` most probable tokens, `[..., K]`."""
    top = probs.topk(min(LAW_SIZE, probs.size(-1)), dim=-1)
    return SparseLaw(top.indices, top.values / top.values.sum(dim=-1, keepdim=True))


def chain_laws(laws_BDK: SparseLaw, count: int, params: Sequence[SamplingParams]) -> tuple[SparseLaw | None, ...]:
    """q of chains of `count` guesses that were drawn from one law a depth.

    Args:
        laws_BDK: `[B, D, K]`, D at least `count`.
        params: Of each row; one at temperature 0 draws nothing and has no laws.
    """
    # Node j's law draws node j + 1. The last node draws none, so any law will do.
    nodes = [min(node, laws_BDK.ids.size(1) - 1) for node in range(1 + count)]
    return tuple(
        SparseLaw(laws_BDK.ids[row, nodes], laws_BDK.probs[row, nodes]) if p.temperature > 0 else None
        for row, p in enumerate(params)
    )
