"""DSpark: DFlash with a Markov head and a confidence head.

The Markov head corrects each draft token given the one before. The confidence head predicts how far draft tokens are
accepted.

There is one draft pass, as in DFlash. The Markov head takes a small matrix product per draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blockdraft.decode.distributions import best_tokens, probabilities
from blockdraft.decode.drafting import log_probabilities
from blockdraft.decode.proposal import (
    Plan,
    Proposal,
    SampledPlan,
    SparseDistribution,
    TreePlan,
    chain,
    chain_q,
    sparsify,
)
from blockdraft.decode.sampling import draw
from blockdraft.decode.step_time import best_count
from blockdraft.decode.tree import lattice_tree
from blockdraft.drafters.base import DrafterSpec
from blockdraft.drafters.dflash.drafter import DFlashDrafter, load_dflash
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.drafter import lattice_log_probs
from blockdraft.drafters.dspark.network import DSparkNetwork
from blockdraft.nn.cache import KVCache

CANDIDATES = 16  # tokens per position that a tree chooses from
MIN = 1e-6  # minimum probability from the confidence head, and minimum distance from 1


class DSparkDrafter(DFlashDrafter):
    """Drafts with a DSpark network, which drafts a token at every position of a block, the anchor's included.

    A chain follows the best token after each draft token. A sampled chain samples from the whole corrected
    distribution, which is q. In a tree, the children of a node are scored given its token. The confidence head decides
    how many draft tokens pay or, if the checkpoint has none, the drafter's probabilities do.
    """

    network: DSparkNetwork
    network_class: type[DFlashNetwork] = DSparkNetwork
    first_draft_token = 0

    @property
    def chooses_length(self) -> bool:  # type: ignore[override]
        return self.network.confidence_head is not None

    def refined_pass(self, state: KVCache, anchor: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits of the D = block_size - 1 draft tokens.

        The anchor's position has the first.
        """
        masks = self._masks[:, 1 : plan.block_size - 1].expand(len(anchor), -1)
        return self.draft_pass(state, torch.cat([anchor[:, None], masks], dim=1), window=plan.draft_window)

    def _build_proposal(self, anchor: Tensor, hidden: Tensor, logits: Tensor, plan: Plan) -> Proposal:
        count, q, expected = logits.size(1), None, None
        if not isinstance(plan, SampledPlan) or plan.step_seconds is not None:
            draft_tokens, corrected, previous = self._walk(anchor, logits, lambda index, scores: best_tokens(scores))
        if isinstance(plan, TreePlan):
            ids_BDK, log_probs_BDKK = self._lattice(anchor, hidden, logits, corrected, plan)
            return lattice_tree(anchor, log_probs_BDKK, ids_BDK, plan.tree_budget, plan.step_seconds, plan.calibration)
        if plan.step_seconds is not None:
            # Of the most probable tokens, even for a sampled chain: its length must not depend on the sample.
            acceptance_probs = self._acceptance_probs(hidden, previous)
            if acceptance_probs is None:
                acceptance_probs = log_probabilities(corrected, plan.params).amax(dim=-1).exp()
            path_probs = acceptance_probs.cumprod(dim=-1).tolist()
            count = best_count(path_probs, plan.step_seconds, plan.calibration)
            expected = tuple(sum(probs[:count]) for probs in path_probs)
        if isinstance(plan, SampledPlan):
            draft_tokens, dists = self._draw(anchor, logits[:, : max(count, 1)], plan)
            q, expected = chain_q(dists, count, plan.params), None
        tokens = torch.cat([anchor[:, None], draft_tokens[:, :count]], dim=1)
        return Proposal(tokens, chain(tokens).parents, q, expected)

    def _walk(
        self, anchor: Tensor, logits_BDV: Tensor, pick: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose draft tokens from left to right.

        Args:
            pick: Function from the index of a draft token and its corrected logits `[B, V]` to the tokens `[B]`.

        Returns:
            Draft tokens `[B, D]` int64, corrected logits `[B, D, V]`, and `previous` of the tokens before, `[B, D, r]`.
        """
        token, draft_tokens, corrected, before = anchor, list[Tensor](), list[Tensor](), list[Tensor]()
        for index in range(logits_BDV.size(1)):
            before.append(self.network.previous(token))
            corrected.append(logits_BDV[:, index] + self.network.bias(before[-1]))
            token = pick(index, corrected[-1])
            draft_tokens.append(token)
        return torch.stack(draft_tokens, dim=1), torch.stack(corrected, dim=1), torch.stack(before, dim=1)

    def _draw(self, anchor: Tensor, logits_BDV: Tensor, plan: SampledPlan) -> tuple[Tensor, SparseDistribution]:
        """Sample draft tokens `[B, D]` with `plan.uniforms`. Return them and their distributions `[B, D, K]`."""
        dists: list[SparseDistribution] = []

        def pick(index: int, scores: Tensor) -> Tensor:
            dists.append(sparsify(probabilities(scores[:, None], plan.params)))  # [B, 1, K]
            sampled = draw(dists[-1].probs, plan.uniforms[:, index : index + 1])
            return dists[-1].ids[:, 0].gather(1, sampled.to(scores.device))[:, 0]

        draft_tokens, _, _ = self._walk(anchor, logits_BDV, pick)
        return draft_tokens, SparseDistribution(
            torch.cat([dist.ids for dist in dists], 1), torch.cat([dist.probs for dist in dists], 1)
        )

    def _lattice(
        self, anchor: Tensor, hidden: Tensor, logits_BDV: Tensor, corrected_BDV: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Return candidates `[B, D, K]` and their log probabilities `[B, D, K, K]` for `lattice_tree`.

        Candidates are the best tokens after the most probable chain. Other tokens keep their logits after that chain,
        whichever candidate comes before.
        """
        ids_BDK = corrected_BDV.topk(min(CANDIDATES, corrected_BDV.size(-1)), dim=-1).indices
        first = anchor[:, None, None].expand(-1, 1, ids_BDK.size(2))
        previous = self.network.previous(torch.cat([first, ids_BDK[:, :-1]], dim=1))
        scores_BDKK = logits_BDV.gather(2, ids_BDK).unsqueeze(2) + self.network.bias(previous, ids_BDK)
        log_probs_BDKK = lattice_log_probs(scores_BDKK, ids_BDK, corrected_BDV, plan)
        acceptance_probs_BDK = self._acceptance_probs(hidden.unsqueeze(2).expand(-1, -1, ids_BDK.size(2), -1), previous)
        return ids_BDK, log_probs_BDKK if acceptance_probs_BDK is None else calibrated(
            log_probs_BDKK, acceptance_probs_BDK
        )

    def _acceptance_probs(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Return the probability that a draft token is accepted if those before it are, `[B, D, ...]`.

        It is the confidence head's. Without such a head, return None.

        Args:
            hidden: `[B, D, ..., H]`.
            previous: `[B, D, ..., r]`, `previous` of the tokens before the draft tokens.
        """
        if self.network.confidence_head is None:
            return None
        logits = self.network.confidence_logits(hidden, previous)
        temperatures = self.network.config.confidence_temperatures
        if temperatures is not None:
            divisors = torch.tensor(temperatures[: logits.size(1)], device=logits.device)
            logits = logits / divisors.view(-1, *[1] * (logits.ndim - 2))
        return logits.sigmoid()


def calibrated(log_probs: Tensor, acceptance_probs: Tensor) -> Tensor:
    """Return log probabilities `[..., K]` in which the best token has the confidence head's probability.

    The other tokens keep their proportions. They lose if the best one gains, and by the same factor if it loses: a low
    confidence applies to the whole distribution.

    Args:
        log_probs: `[..., K]`.
        acceptance_probs: `[...]`, in [0, 1].
    """
    best, rank = log_probs.max(dim=-1, keepdim=True)
    share, acceptance_prob = best.exp(), acceptance_probs.unsqueeze(-1).clamp(MIN, 1 - MIN)
    factor = torch.minimum(acceptance_prob / share, (1 - acceptance_prob) / (1 - share).clamp_min(MIN)).clamp_max(1.0)
    return (log_probs + factor.log()).scatter(-1, rank, acceptance_prob.log())


DRAFTER = DrafterSpec(
    partial(load_dflash, kind=DSparkDrafter),
    architectures=("DSparkDraftModel", "Qwen3DSparkModel", "Lfm2DSparkDraftModel", "DSparkSpeculator"),
    network=DSparkNetwork,
    layouts=("zlab", "speculators"),
    drafter=DSparkDrafter,
)
