"""P-EAGLE: EAGLE-3 that makes all guesses in one pass, with masks for tokens and features that do not exist yet. So its
guesses do not depend on each other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import DrafterSpec, read_network
from blockdraft.drafters.dflash.drafter import independent_draft_tokens
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.peagle.network import PEagleNetwork, PEaglePass
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target


class PEagleDrafter(Eagle3Drafter):
    """Drafts with a P-EAGLE network. Its state is that of an EAGLE-3 drafter, with keys and values of all layers."""

    knows_lengths = False
    network: PEagleNetwork  # type: ignore[assignment]
    _run: PEaglePass  # type: ignore[assignment]

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        return independent_draft_tokens(anchor, self.draft_logits(state, anchor, plan), plan)

    def draft_logits(self, state: KVCache, anchor: Tensor, plan: Plan) -> Tensor:
        """Logits `[B, K, V]` of the K = block_size - 1 guesses; -inf for tokens that are never guessed."""
        return self._run.logits(state, anchor, plan.block_size - 1, plan.draft_window)


def load(path: Path, target: Target) -> PEagleDrafter:
    return PEagleDrafter(read_network(path, target, PEagleNetwork), target, path)  # type: ignore[arg-type]


DRAFTER = DrafterSpec(
    load,
    architectures=("PEagleSpeculator",),
    network=PEagleNetwork,
    layouts=("peagle_speculators",),
    drafter=PEagleDrafter,
)
