"""Medusa (arXiv 2401.10774).

Each head reads the target's last hidden state and predicts the token at its own distance.

Draft tokens are verified as usual. The paper's typical acceptance would change the target's output and is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import DraftCost, Drafter, DrafterSpec, read_network
from blockdraft.drafters.dflash.drafter import independent_draft_tokens
from blockdraft.drafters.medusa.network import HeadRunner, MedusaNetwork
from blockdraft.formats import find_layout
from blockdraft.machine import send
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, OBSERVE, mark


class MedusaDrafter(Drafter):
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
        self._target = target
        self._run: HeadRunner = target.runner(self.network, owned=owned)
        self._like = torch.empty(0, dtype=target.dtype, device=target.device)

    @property
    def compile_reason(self) -> str | None:
        """Reason why the heads are not compiled for a CPU, or None if they are."""
        return self._run.compile_reason

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * self._target.hidden_size * self._target.dtype.itemsize

    def weight_bytes(self) -> int:
        head = self._target.draft_head
        own = sum(weight.nbytes for weight in self.network.parameters()) + (head.nbytes if head else 0)
        return own + self._run.weight_bytes()

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        mark(OBSERVE)
        # Only the last token's hidden state is read, but any token may become the last one of a sequence with this
        # prefix.
        known, count = self._known(state), hidden_states.size(1)
        state.check_room(count)
        for row, length, nodes in zip(state.rows, state.lengths, hidden_states, strict=True):
            known[row + length : row + length + count] = nodes
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        assert min(state.lengths) > 0, "a draft needs the prompt's hidden states"
        newest = [row + length - 1 for row, length in zip(state.rows, state.lengths, strict=True)]
        hidden = self._known(state)[send(torch.tensor(newest), anchor.device)]
        return independent_draft_tokens(anchor, self._run(hidden, plan.block_size - 1), plan)

    def _known(self, state: KVCache) -> Tensor:
        """Return the target's hidden state at the token of each KV slot, `[slots, H]`."""
        return state.memory(1, 1, self._target.hidden_size, self._like)[0, 0]


def load(path: Path, target: Target) -> MedusaDrafter:
    return MedusaDrafter(read_network(path, target, MedusaNetwork), target, path, owned=True)


DRAFTER = DrafterSpec(
    load,
    architectures=("MedusaModel",),
    claims=lambda raw: find_layout("medusa").recognises(raw),  # published files name no architecture
    network=MedusaNetwork,
    layouts=("medusa",),
    drafter=MedusaDrafter,
    cost=DraftCost(layers=1, block_size=5),
)
