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

    Raises:
        UsageError: One map is missing, or they contradict each other.
    """
    if t2d is None or d2t is None:
        need(t2d is None and d2t is None, "one of t2d and d2t", None, "there where the other is")
        return None
    need(d2t.ndim == 1, "the shape of d2t", tuple(d2t.shape), "of one dimension")
    ids = d2t.long() + torch.arange(len(d2t))
    marked = t2d.nonzero().flatten()
    need(torch.equal(ids, marked), "d2t", d2t[:5].tolist(), "offsets to the tokens that t2d marks, in ascending order")
    return ids


def vocabulary_maps(kept: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `t2d` and `d2t` for these tokens. Raise a UsageError if they are not in ascending order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    maps = {"t2d": t2d, "d2t": kept - torch.arange(len(kept))}
    kept_tokens(**maps)
    return maps
