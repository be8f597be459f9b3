"""DFlash2: DFlash with a selector, which chooses each draft token among candidates, given the one before.

All candidates of a position are scored after each candidate of the position before at once, so following a path takes
no further pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from blockdraft.decode.distributions import best_tokens, probabilities
from blockdraft.decode.drafting import log_probabilities
from blockdraft.decode.proposal import Plan, Proposal, SampledPlan, SparseDistribution, TreePlan, chain, chain_q
from blockdraft.decode.sampling import draw
from blockdraft.decode.step_time import best_count
from blockdraft.decode.tree import lattice_tree
from blockdraft.drafters.base import DrafterSpec
from blockdraft.drafters.dflash.drafter import DFlashDrafter, load_dflash
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Network


class DFlash2Drafter(DFlashDrafter):
    """Drafts with a DFlash2 network.

    A chain follows the best candidate after each draft token. A sampled chain samples among the candidates, and q is
    that distribution. In a tree, the children of a node are scored given its token. The probability of a draft token,
    which decides how many pay, is over the whole vocabulary: other tokens than candidates keep their logits.
    """

    network: DFlash2Network
    network_class: type[DFlashNetwork] = DFlash2Network

    def _build_proposal(self, anchor: Tensor, hidden: Tensor, logits: Tensor, plan: Plan) -> Proposal:
        ids_BDK, scores_BDKK = self.network.lattice(hidden, logits, anchor)
        if isinstance(plan, TreePlan):
            log_probs_BDKK = lattice_log_probs(scores_BDKK, ids_BDK, logits, plan)
            return lattice_tree(anchor, log_probs_BDKK, ids_BDK, plan.tree_budget, plan.step_seconds, plan.calibration)
        ranks_BD, count, q, expected = walk(best_tokens(scores_BDKK)), ids_BDK.size(1), None, None
        if plan.step_seconds is not None:
            log_probs_BDK = _after(lattice_log_probs(scores_BDKK, ids_BDK, logits, plan), ranks_BD)
            path_BD = log_probs_BDK.gather(2, ranks_BD.unsqueeze(2)).squeeze(2)
            path_probs = path_BD.cumsum(dim=-1).exp().tolist()
            count = best_count(path_probs, plan.step_seconds, plan.calibration)
            expected = tuple(sum(probs[:count]) for probs in path_probs)
        if isinstance(plan, SampledPlan):  # the length must not depend on what is sampled
            ranks_BD, dists = _draw(ids_BDK, scores_BDKK, plan)
            q, expected = chain_q(dists, count, plan.params), None
        draft_tokens = ids_BDK.gather(2, ranks_BD.unsqueeze(2)).squeeze(2)
        tokens = torch.cat([anchor[:, None], draft_tokens[:, :count]], dim=1)
        return Proposal(tokens, chain(tokens).parents, q, expected)


def walk(next_BDK: Tensor) -> Tensor:
    """Follow the path through a table of steps.

    Args:
        next_BDK: `[b, d, p]` is the candidate at position d that follows candidate p of the position before; at
            position 0, which follows the anchor, it is the same for every p.

    Returns:
        Candidate at each position, `[B, D]` int64.
    """
    reach = 1
    while reach < next_BDK.size(1):
        # An entry is the result of `reach` steps. Composed with the entry that it starts from, it has twice as many.
        further = next_BDK[:, reach:].gather(2, next_BDK[:, :-reach])
        next_BDK = torch.cat([next_BDK[:, :reach], further], dim=1)
        reach *= 2
    return next_BDK[:, :, 0]


def _draw(ids_BDK: Tensor, scores_BDKK: Tensor, plan: SampledPlan) -> tuple[Tensor, SparseDistribution]:
    """Candidates sampled with `plan.uniforms`, `[B, D]`, and the distributions `[B, D, K]` that they were sampled from.

    The sequence's sampling parameters turn scores into a distribution. With one random number, each position samples a
    candidate after every candidate of the position before, and the walk follows these.
    """
    count = ids_BDK.size(2)
    probs = probabilities(scores_BDKK.flatten(1, 2), plan.params)
    next_BDK = draw(probs, plan.uniforms.repeat_interleave(count, dim=1)).to(ids_BDK.device).unflatten(1, (-1, count))
    ranks_BD = walk(next_BDK)
    return ranks_BD, SparseDistribution(ids_BDK, _after(probs.view_as(scores_BDKK), ranks_BD))


def _after(values_BDKK: Tensor, ranks_BD: Tensor) -> Tensor:
    """Return the values `[B, D, K]` of the candidates at each position, given the path `ranks_BD` before it."""
    before = torch.cat([torch.zeros_like(ranks_BD[:, :1]), ranks_BD[:, :-1]], dim=1)
    return values_BDKK.gather(2, before[:, :, None, None].expand(-1, -1, 1, values_BDKK.size(3))).squeeze(2)


def lattice_log_probs(scores_BDKK: Tensor, ids_BDK: Tensor, logits_BDV: Tensor, plan: Plan) -> Tensor:
    """Return log probabilities of candidates at each sequence's temperature, `[B, D, K, K]`.

    They are normalized over the whole vocabulary.
    """
    others_BDV = logits_BDV.float().scatter(2, ids_BDK, -torch.inf)
    temperature_B11 = torch.tensor([params.temperature or 1.0 for params in plan.params], device=others_BDV.device)[
        :, None, None
    ]
    # The other tokens count as one token with their joint probability.
    most_BD1 = others_BDV.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    rest_BD1 = most_BD1 + temperature_B11 * ((others_BDV - most_BD1) / temperature_B11).logsumexp(dim=-1, keepdim=True)
    rest_BDK1 = rest_BD1.unsqueeze(2).expand(-1, -1, ids_BDK.size(2), 1)
    return log_probabilities(torch.cat([scores_BDKK, rest_BDK1], dim=-1), plan.params)[..., :-1]


DRAFTER = DrafterSpec(
    partial(load_dflash, kind=DFlash2Drafter),
    architectures=("DFlash2DraftModel",),
    network=DFlash2Network,
    layouts=("zlab",),
    drafter=DFlash2Drafter,
)
