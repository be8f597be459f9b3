"""Maps of draft vocabularies in files.

`t2d` marks the tokens among the target's, and token i of the draft vocabulary is the target's token i + `d2t[i]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.nn.draft_config import need

MAPS = ("t2d", "d2t")


def kept_tokens(t2d: Tensor | None, d2t: Tensor | None) -> Tensor | None:
    """Return the draft vocabulary as ids of the target, or None if both maps are missing.

    Its order is that of the rows of the drafter's head, which some programs sort by frequency.

    Raises:
        UsageError: One map is missing, or they contradict each other.
    """
    if t2d is None or d2t is None:
        need(t2d is None and d2t is None, "one of t2d and d2t", None, "there where the other is")
        return None
    ids = draft_tokens(d2t, len(t2d))
    marked = t2d.nonzero().flatten()
    need(torch.equal(ids.sort().values, marked), "d2t", d2t[:5].tolist(), "offsets to the tokens that t2d marks")
    return ids


def draft_tokens(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return the draft vocabulary of `d2t`, in any order. Raise a UsageError if ids are repeated or out of range."""
    need(d2t.ndim == 1 and len(d2t) > 0, "the shape of d2t", tuple(d2t.shape), "of one dimension, and not empty")
    need(torch.equal(d2t, d2t.long().to(d2t.dtype)), "d2t", d2t[:5].tolist(), "whole numbers")
    ids = d2t.long() + torch.arange(len(d2t))
    outside = ids[(ids < 0) | (ids >= vocab_size)].tolist()
    need(not outside, "d2t", d2t[:5].tolist(), f"offsets to tokens below {vocab_size}; it leads to {outside[:1]}")
    values, counts = ids.unique(return_counts=True)
    twice = values[counts > 1].tolist()
    need(not twice, "d2t", d2t[:5].tolist(), f"offsets to different tokens; it leads to {twice[:1]} more than once")
    return ids


def in_order(kept: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return a draft vocabulary in ascending order, and the rows of its head in the same order."""
    order = kept.argsort()
    return kept[order], head[order]


def vocabulary_maps(kept: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `t2d` and `d2t` for these tokens. Raise a UsageError if some are repeated."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    maps = {"t2d": t2d, "d2t": kept - torch.arange(len(kept))}
    kept_tokens(**maps)
    return maps
