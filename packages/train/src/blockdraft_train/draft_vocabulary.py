"""Draft vocabularies: training of drafters that propose only a part of the target's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft_train.data.documents import TokenData
from blockdraft_train.objectives import Slots


def frequent_tokens(data: TokenData, vocab_size: int, count: int) -> Tensor:
    """Return the most frequent supervised tokens, `[count]` int64, ascending. Lower ids win a tie."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for document in data:
        counts += torch.bincount(document.tokens[document.supervised], minlength=vocab_size)[:vocab_size]
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def draft_ids(kept: Tensor, vocab_size: int) -> Tensor:
    """Return the index of each target token in the draft vocabulary, `[V]`, or -1 for a token outside it.

    Args:
        kept: `[Vd]` int64, the target's ids of the draft vocabulary.
    """
    return kept.new_full((vocab_size,), -1).scatter(0, kept, torch.arange(len(kept), device=kept.device))


def reduced_losses(
    losses: Callable[[Slots], Mapping[str, Tensor]], slots: Slots, kept: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """Compute losses over a draft vocabulary. A loss is 0 at slots whose token is outside of it.

    Args:
        losses: Losses of objectives.
        slots: Slots whose logits and teacher are over the draft vocabulary, and whose tokens are the target's.
        kept, vocab_size: As in `draft_ids`.
    """
    tokens = draft_ids(kept, vocab_size)[slots.tokens_CL]
    known = tokens[:, 1:] >= 0
    taught = slots.taught_CK & known  # skips tokens that the drafter cannot propose, not those after them
    reduced = losses(replace(slots, tokens_CL=tokens.clamp(min=0), taught_CK=taught))
    return {name: loss.masked_fill(~known, 0) for name, loss in reduced.items()}
