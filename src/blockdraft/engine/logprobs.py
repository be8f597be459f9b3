"""How likely tokens were, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.sampling import PART
from blockdraft.types import TokenLogprob


def token_logprobs(logits_MV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-softmax of each token under its logits, with the `count` likeliest tokens, of equals the lower ids first."""
    found = []
    step, count = max(1, PART // logits_MV.size(-1)), min(count, logits_MV.size(-1))
    for first in range(0, len(tokens), step):
        own = tokens[first : first + step]
        log_probs = logits_MV[first : first + step].float().log_softmax(dim=-1)
        ids = torch.tensor(own, device=log_probs.device)
        chosen = log_probs.gather(1, ids[:, None])[:, 0].tolist()
        top = log_probs.topk(count, dim=-1)
        for token, value, each in zip(
            own, chosen, zip(top.indices.tolist(), top.values.tolist(), strict=True), strict=True
        ):
            best = sorted(zip(*each, strict=True), key=lambda entry: (-entry[1], entry[0]))
            found.append(TokenLogprob(token, value, tuple(best)))
    return found
