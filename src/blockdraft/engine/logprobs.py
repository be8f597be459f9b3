"""How likely tokens were, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.decode.distributions import PART
from blockdraft.engine.request import Request
from blockdraft.engine.row import Row
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


def answer_logprobs(
    request: Request, logits_BNV: Tensor, row: int, nodes: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Of the tokens after these nodes, if the request asks for them."""
    count = request.params.logprobs
    return () if count is None or not nodes else token_logprobs(logits_BNV[row, nodes], tokens, count)


def prompt_logprobs(row: Row, logits_NV: Tensor) -> Sequence[TokenLogprob | None]:
    """Of the tokens of a prompt that follow those just read, if the request asks for it."""
    request, first = row.request, row.read + 1
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    following = request.prompt[first : first + len(logits_NV)]
    known = token_logprobs(logits_NV[: len(following)], following, count)
    return [None, *known] if row.read == 0 else known
