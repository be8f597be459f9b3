"""DSpark: DFlash whose guesses are corrected by the guess before, and which knows how far to trust them.

The walk from the anchor to the last guess costs a small product a guess; the draft pass is one, as for DFlash.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution, chain, chain_q, sparsify
from blockdraft.decode.sampling import best_tokens, draw
from blockdraft.decode.tree import best_count, lattice_tree
from blockdraft.drafters.base import NOISE_SCHEDULE, Entry
from blockdraft.drafters.dflash.drafter import DFlashDrafter, log_probabilities
from blockdraft.drafters.dflash.drafter import load as load_dflash
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.drafter import lattice_log_probs
from blockdraft.drafters.dspark.network import DSparkNetwork
from blockdraft.errors import UsageError
from blockdraft.nn.cache import KVCache
from blockdraft.nn.layers import ReducedHead
from blockdraft.targets import Target

CANDIDATES = 16  # tokens of each slot that a tree chooses from
LEAST = 1e-6  # chance that is left to what the confidence head thinks impossible


class DSparkDrafter(DFlashDrafter):
    """Drafts with a DSpark network, whose B slots guess B tokens: a path has up to B + 1, the anchor included.

    A chain follows the best token after each guess; a sampled one draws from the whole corrected distribution, and that
    is q. A tree has each node's children scored given its own token. How many guesses pay is decided by the confidence
    head, or, where the checkpoint has none, by the drafter's probabilities.
    """

    network: DSparkNetwork
    network_class: type[DFlashNetwork] = DSparkNetwork

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        diffusion_steps: int | None = None,
        noise_schedule: str = NOISE_SCHEDULE,
        path: Path | None = None,
        reduced_head: ReducedHead | None = None,
        owned: bool = False,
    ) -> None:
        super().__init__(network, target, diffusion_steps, noise_schedule, path, reduced_head, owned)
        self.block_size = self.config.block_size + 1
        self.knows_lengths = self.network.confidence_head is not None

    def check_steps(self, diffusion_steps: int, noise_schedule: str) -> None:
        if diffusion_steps != 1:
            raise UsageError(f"diffusion_steps is {diffusion_steps}; a DSpark drafter has one draft pass, so give 1.")
        super().check_steps(diffusion_steps, noise_schedule)

    def _refined_pass(self, state: KVCache, anchor: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of the D = block_size - 1 guesses; the anchor's slot makes the first."""
        masks = self._masks[:, 1 : plan.block_size - 1].expand(len(anchor), -1)
        return self._draft_pass(state, torch.cat([anchor[:, None], masks], dim=1), window=plan.draft_window)

    def _guess(self, anchor: Tensor, hidden: Tensor, logits: Tensor, plan: Plan) -> Proposal:
        sampled = plan.draws is not None and any(params.temperature > 0 for params in plan.params)
        count, q, expected = logits.size(1), None, None
        if not sampled or plan.cycle_seconds is not None:
            guesses, corrected, previous = self._walk(anchor, logits, lambda slot, scores: best_tokens(scores))
        if plan.tree_budget > 0 and not sampled:
            ids_BDK, log_probs_BDKK = self._lattice(anchor, hidden, logits, corrected, plan)
            return lattice_tree(anchor, log_probs_BDKK, ids_BDK, plan.tree_budget, plan.cycle_seconds, plan.trust)
        if plan.cycle_seconds is not None:
            # Of chosen guesses, even where others are sampled: the length must not depend on what was sampled.
            chances = self._chances(hidden, previous)
            if chances is None:
                chances = log_probabilities(corrected, plan.params).amax(dim=-1).exp()
            path_probs = chances.cumprod(dim=-1).tolist()
            count = best_count(path_probs, plan.cycle_seconds, plan.trust)
            expected = tuple(sum(probs[:count]) for probs in path_probs)
        if sampled:
            guesses, dists = self._draw(anchor, logits[:, : max(count, 1)], plan)
            q, expected = chain_q(dists, count, plan.params), None
        tokens = torch.cat([anchor[:, None], guesses[:, :count]], dim=1)
        return Proposal(tokens, chain(tokens).parents, q, expected)

    def _walk(
        self, anchor: Tensor, logits_BDV: Tensor, pick: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Guess from left to right.

        Args:
            pick: Makes guesses `[B]` of a slot's number and its corrected logits `[B, V]`.

        Returns:
            Guesses `[B, D]`, corrected logits `[B, D, V]`, and what precedes each slot, `[B, D, r]`.
        """
        token, guesses, corrected, before = anchor, list[Tensor](), list[Tensor](), list[Tensor]()
        for slot in range(logits_BDV.size(1)):
            before.append(self.network.previous(token))
            corrected.append(logits_BDV[:, slot] + self.network.bias(before[-1]))
            token = pick(slot, corrected[-1])
            guesses.append(token)
        return torch.stack(guesses, dim=1), torch.stack(corrected, dim=1), torch.stack(before, dim=1)

    def _draw(self, anchor: Tensor, logits_BDV: Tensor, plan: Plan) -> tuple[Tensor, SparseDistribution]:
        """Guesses `[B, D]` sampled with `plan.draws`, and the distributions `[B, D, K]` that they were sampled from."""
        dists: list[SparseDistribution] = []

        def pick(slot: int, scores: Tensor) -> Tensor:
            assert plan.draws is not None
            dists.append(sparsify(probabilities(scores[:, None], plan.params)))  # [B, 1, K]
            sampled = draw(dists[-1].probs, plan.draws[:, slot : slot + 1])
            return dists[-1].ids[:, 0].gather(1, sampled.to(scores.device))[:, 0]

        guesses, _, _ = self._walk(anchor, logits_BDV, pick)
        return guesses, SparseDistribution(
            torch.cat([dist.ids for dist in dists], 1), torch.cat([dist.probs for dist in dists], 1)
        )

    def _lattice(
        self, anchor: Tensor, hidden: Tensor, logits_BDV: Tensor, corrected_BDV: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Candidates `[B, D, K]` of each slot, and their log probabilities `[B, D, K, K]` as `lattice_tree` wants them.

        The candidates are the best on the way of the chosen guesses. Tokens that are no candidates count as they do
        there, whichever candidate comes before.
        """
        ids_BDK = corrected_BDV.topk(min(CANDIDATES, corrected_BDV.size(-1)), dim=-1).indices
        first = anchor[:, None, None].expand(-1, 1, ids_BDK.size(2))
        previous = self.network.previous(torch.cat([first, ids_BDK[:, :-1]], dim=1))
        scores_BDKK = logits_BDV.gather(2, ids_BDK).unsqueeze(2) + self.network.bias(previous, ids_BDK)
        log_probs_BDKK = lattice_log_probs(scores_BDKK, ids_BDK, corrected_BDV, plan)
        chances_BDK = self._chances(hidden.unsqueeze(2).expand(-1, -1, ids_BDK.size(2), -1), previous)
        return ids_BDK, log_probs_BDKK if chances_BDK is None else calibrated(log_probs_BDKK, chances_BDK)

    def _chances(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """What the confidence head says of each slot, `[B, D, ...]`: the chance that its guess is accepted if those
        before it are. None where there is no such head.

        Args:
            hidden: `[B, D, ..., H]`.
            previous: `[B, D, ..., r]`, of the guesses before the slots.
        """
        if self.network.confidence_head is None:
            return None
        logits = self.network.confidence_logits(hidden, previous)
        temperatures = self.network.config.confidence_temperatures
        if temperatures is not None:
            divisors = torch.tensor(temperatures[: logits.size(1)], device=logits.device)
            logits = logits / divisors.view(-1, *[1] * (logits.ndim - 2))
        return logits.sigmoid()


def calibrated(log_probs: Tensor, chances: Tensor) -> Tensor:
    """Distributions whose best token has the chance that the confidence head gives it; the others keep their
    proportions.

    The others never gain: what a sure head takes from the best one goes to no one, for then the whole distribution is
    in doubt.

    Args:
        log_probs: `[..., K]`.
        chances: `[...]`, in [0, 1].
    """
    best, rank = log_probs.max(dim=-1, keepdim=True)
    share, chance = best.exp(), chances.unsqueeze(-1).clamp(LEAST, 1 - LEAST)
    factor = torch.minimum(chance / share, (1 - chance) / (1 - share).clamp_min(LEAST)).clamp_max(1.0)
    return (log_probs + factor.log()).scatter(-1, rank, chance.log())


def load(path: Path, target: Target) -> DFlashDrafter:
    return load_dflash(path, target, DSparkDrafter)


DRAFTER = Entry(
    load,
    architectures=("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator"),
    network=DSparkNetwork,
    layouts=("zlab", "speculators"),
    drafter=DSparkDrafter,
)
