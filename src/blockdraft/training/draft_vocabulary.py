"""Draft vocabularies: training of drafters that guess among part of the target's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.training.objectives import Objective, Slots


def frequent_tokens(data: TokenData, vocab_size: int, count: int) -> Tensor:
    """The most frequent supervised tokens, `[count]` int64, ascending. Between equally frequent ones, lower ids win."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for document in data:
        counts += torch.bincount(document.tokens[document.supervised], minlength=vocab_size)[:vocab_size]
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def draft_ids(kept: Tensor, vocab_size: int) -> Tensor:
    """Index of each token of the target in the draft vocabulary, `[V]`; -1 for a token that is not in it.

    Args:
        kept: `[Vd]` int64, the target's ids of the draft vocabulary.
    """
    return kept.new_full((vocab_size,), -1).scatter(0, kept, torch.arange(len(kept), device=kept.device))


def reduced_losses(
    losses: Callable[[Slots], Mapping[str, Tensor]],
    slots: Slots,
    kept: Tensor,
    vocab_size: int,
    objectives: Mapping[str, Objective],
) -> dict[str, Tensor]:
    """Losses over a draft vocabulary, 0 at slots whose token, or whose teacher's best token, is not in it.

    Args:
        losses: Losses of objectives.
        slots: Slots whose logits are over the draft vocabulary, and whose tokens and teacher are the target's.
        kept, vocab_size: As in `draft_ids`.
    """
    ids, teacher = draft_ids(kept, vocab_size), slots.teacher_CKV
    tokens = ids[slots.tokens_CL]
    known_CK = {False: tokens[:, 1:] >= 0}
    if teacher is not None:
        known_CK[True], teacher = ids[teacher.argmax(dim=-1)] >= 0, teacher[..., kept]
    taught = slots.taught_CK & known_CK[False]  # skips tokens that the drafter cannot guess, not those behind them
    reduced = replace(slots, tokens_CL=tokens.clamp(min=0), taught_CK=taught, teacher_CKV=teacher)
    found = losses(reduced)
    return {n: loss.masked_fill(~known_CK[objectives[n].needs_teacher], 0) for n, loss in found.items()}
