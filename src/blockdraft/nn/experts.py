"""MLPs of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.nn.decoder_config import Experts
from blockdraft.nn.exact import EXACT_NODES


def experts_say(
    x_RH: Tensor,
    experts: Experts,
    router: Callable[[Tensor], Tensor],
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """What the chosen experts say to each row, by their shares, `[R, H]`.

    Args:
        router: Rows to their scores of the experts, `[R, E]`.
        gate_up: Gate and up of all experts, one behind the other, `[E * 2 * inner, H]`.
        down: `[E * H, inner]`.
    """
    chances_RE = router(x_RH).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = chances_RE.topk(experts.chosen, dim=-1)
    if experts.normed:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares_RE = torch.zeros_like(chances_RE).scatter_(1, chosen, shares).to(x_RH.dtype)
    gates, downs = gate_up.view(experts.count, -1, x_RH.size(-1)), down.view(experts.count, x_RH.size(-1), -1)
    out = torch.zeros_like(x_RH)
    for expert in chosen.unique().tolist():
        share = shares_RE[:, expert, None]
        # A few rows cost no more than one, since weights are what takes time. With all of them products have one shape,
        # whichever are chosen, which `exact` asks for.
        rows = slice(None) if len(x_RH) <= EXACT_NODES else share[:, 0].nonzero()[:, 0]
        gate, up = F.linear(x_RH[rows], gates[expert]).chunk(2, dim=-1)
        said = F.linear(activation(gate) * up, downs[expert]) * share[rows]
        out[rows] += said.masked_fill(share[rows] == 0, 0.0)  # what is not chosen may be infinite
    return out
