"""Medusa (arXiv 2401.10774).

Each head reads the target's last hidden state and predicts the token at its own distance.

Draft tokens are verified as usual. The paper's typical acceptance would change the target's output and is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.drafting import independent_draft_tokens
from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import DraftCost, DrafterSpec, RunnerDrafter, read_network
from blockdraft.formats import find_layout
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_runner import DraftRunner
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, OBSERVE, mark
from blockdraft_medusa.network import MedusaNetwork


class MedusaDrafter(RunnerDrafter):
    """Drafts with Medusa's heads.

    A chain holds each head's best token. A tree holds the most probable paths, whose probability is the product of the
    heads' probabilities.

    Args:
        network: Network, which is moved to the target's device and dtype.
        target: Target that the network was trained for.
        path: Folder that the network was read from.
        owned: As in `Target.runner`.
    """

    chooses_tree_size = True
    chooses_length = False

    def __init__(self, network: MedusaNetwork, target: Target, path: Path | None = None, owned: bool = False) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.path = path
        self.target_layers = network.config.target_layers
        self.block_size = network.config.num_heads + 1
        self.has_target_head = network.config.shared_head
        self.target = target
        self.runner: DraftRunner = target.runner(self.network, owned=owned)

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        mark(OBSERVE)
        self.runner.observe(state, tokens, hidden_states)
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        assert min(state.lengths) > 0, "a draft needs the prompt's hidden states"
        _, logits = self.runner.draft_tokens(state, anchor[:, None].expand(-1, plan.block_size), 1)
        return independent_draft_tokens(anchor, logits, plan)


def load_medusa(path: Path, target: Target) -> MedusaDrafter:
    return MedusaDrafter(read_network(path, target, MedusaNetwork), target, path, owned=True)


DRAFTER = DrafterSpec(
    load_medusa,
    architectures=("MedusaModel",),
    claims=lambda raw: find_layout("medusa").recognises(raw),  # published files name no architecture
    network=MedusaNetwork,
    layouts=("medusa",),
    drafter=MedusaDrafter,
    cost=DraftCost(layers=1, block_size=5),
)
