"""Logits to probabilities: temperature, top-k, top-p, min-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.sampling.drawing import best_tokens
from blockdraft.types import SamplingParams

# Best tokens that top-k and top-p look at first, and how many times as many next: to sort a whole vocabulary is slow.
HEAD, MORE = 128, 8


def probabilities(logits_BNV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Distributions under each row's temperature, top-k, top-p and min-p, in the order of transformers.

    Args:
        logits_BNV: Logits `[B, N, V]`, any float dtype.
        params: One entry a row. Bias and penalties, which depend on the tokens before a node, are left to `Laws`.

    Returns:
        `[B, N, V]` float32, each row summing to 1; one-hot where the temperature is 0. Of equal logits the lowest
        token id wins, and top-k and top-p keep the lower ids.
    """
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
    if len(groups) == 1:
        return _probabilities(logits_BNV, *next(iter(groups)))
    probs_BNV = torch.empty_like(logits_BNV, dtype=torch.float32)
    for settings, rows in groups.items():
        probs_BNV[rows] = _probabilities(logits_BNV[rows], *settings)
    return probs_BNV


def _probabilities(logits_BNV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    if temperature == 0:
        best_BN1 = best_tokens(logits_BNV).unsqueeze(-1)
        return torch.zeros_like(logits_BNV, dtype=torch.float32).scatter_(-1, best_BN1, 1.0)
    logits_BNV = logits_BNV.float()
    # The maximum goes first, so that no temperature, however low, overflows.
    scores_BNV = (logits_BNV - logits_BNV.amax(dim=-1, keepdim=True)) / temperature
    if top_k >= logits_BNV.size(-1):
        top_k = 0  # to sort the whole vocabulary would be slow
    if top_k == 0 and top_p == 1:
        probs_BNV = scores_BNV.softmax(dim=-1)
    else:
        head = max(HEAD, top_k + 1)
        probs_BNV = _best_probabilities(scores_BNV.flatten(0, 1), top_k, top_p, head).view_as(scores_BNV)
    if min_p > 0:
        probs_BNV = probs_BNV.masked_fill(probs_BNV < min_p * probs_BNV.amax(dim=-1, keepdim=True), 0.0)
        probs_BNV /= probs_BNV.sum(dim=-1, keepdim=True)
    return probs_BNV


def _best_probabilities(scores_MV: Tensor, top_k: int, top_p: float, head: int) -> Tensor:
    """Softmax `[M, V]` cut to top-k and top-p, which are looked for among the `head` best tokens if they suffice."""
    vocabulary = scores_MV.size(-1)
    scores, ids = scores_MV.topk(min(head, vocabulary), dim=-1)
    # topk leaves open which of equals comes first; here it is the lower id.
    ids, by_id = ids.sort(dim=-1)
    scores, order = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    whole = scores[:, :top_k] if top_k else scores_MV
    probs = (scores - whole.logsumexp(dim=-1, keepdim=True)).exp()
    if top_k:
        probs[:, top_k:] = 0.0
    if top_p < 1:
        # A token stays if the tokens before it do not reach top_p yet; the first one always stays.
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    laws_MV = torch.zeros_like(scores_MV).scatter_(-1, ids, probs / probs.sum(dim=-1, keepdim=True))
    if scores.size(-1) < vocabulary:
        # What was not looked at scores no more than the last of the head. If that one and its equals are cut, so is
        # the rest; where they are not, the row needs the whole vocabulary.
        cut_short = ((scores == scores[:, -1:]) & (probs > 0)).any(dim=-1)
        if cut_short.any():
            laws_MV[cut_short] = _best_probabilities(scores_MV[cut_short], top_k, top_p, MORE * head)
    return laws_MV
