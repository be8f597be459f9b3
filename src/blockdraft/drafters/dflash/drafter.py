"""DFlash v1 (arXiv 2602.06036): drafts a block of tokens in one bidirectional pass over the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.drafting import independent_draft_tokens
from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import (
    NOISE_SCHEDULE,
    NOISE_SCHEDULES,
    DraftCost,
    DrafterSpec,
    RunnerDrafter,
    filled_network,
    read_fitting,
)
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.draft_runner import DraftRunner
from blockdraft.nn.layers import ReducedHead
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, HEAD, OBSERVE, mark


class DFlashDrafter(RunnerDrafter):
    """Drafts with a DFlash network. The embedding is the target's, and so is the head without a `reduced_head`.

    Subclasses set `network_class` and `first_draft_token` (the first position of a block that drafts a token: 0, the
    anchor's, or 1), and override `_build_proposal`, which turns a draft pass into a proposal.

    Args:
        network: Draft network, which is moved to the target's device and dtype.
        target: Target that the network was trained for.
        path: Folder or file that the network was read from.
        reduced_head: Own output projection, for a drafter with a draft vocabulary.
        owned: As in `Target.runner`; only for a network that was read from `path`.

    Attributes:
        noise_schedule: Share of the positions that are fixed after each of several passes, "cosine" or "linear".
    """

    chooses_tree_size = True
    chooses_length = False
    network: DFlashNetwork
    network_class: type[DFlashNetwork] = DFlashNetwork
    first_draft_token = 1
    noise_schedule = NOISE_SCHEDULE

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        path: Path | None = None,
        reduced_head: ReducedHead | None = None,
        owned: bool = False,
    ) -> None:
        self.config: DraftConfig = network.config
        self.network = network.eval()
        self.path = path
        self.target_layers = self.config.target_layers
        self.block_size = self.config.block_size + 1 - self.first_draft_token
        self.reduced_head = reduced_head and reduced_head.to(target.device, target.dtype)
        self.has_target_head = reduced_head is None
        self.target = target
        self.runner: DraftRunner = target.runner(self.network, self.reduced_head, owned)
        self.network.to(target.device, target.dtype)
        adjustments = self.config.output_multiplier, self.config.final_logit_softcapping
        self._adjusts_logits = adjustments != (1, None)
        self._masks = torch.full((1, self.block_size), self.config.mask_token_id, device=target.device)

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
        return self._build_proposal(anchor, *self.refined_pass(state, anchor, plan), plan)

    def _build_proposal(self, anchor: Tensor, hidden: Tensor, logits: Tensor, plan: Plan) -> Proposal:
        """Return the proposal for hidden states `[B, D, H]` and logits `[B, D, V]` of the D positions after anchors."""
        return independent_draft_tokens(anchor, logits, plan)

    def refined_pass(self, state: KVCache, anchor: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return hidden states `[B, D, H]` and logits `[B, D, V]` of the draft tokens after the last pass.

        There are D = block_size - 1 draft tokens. With one pass, as in DFlash, all come from the same pass. With more,
        each pass fixes its most confident positions, which the next pass reads; they have one possible token.
        """
        block_size, window = plan.block_size, plan.draft_window
        tokens = torch.cat([anchor[:, None], self._masks[:, 1:block_size].expand(len(anchor), -1)], dim=1)
        passes = plan.draft_passes or 1
        if passes == 1:
            return self.draft_pass(state, tokens, 1, window)
        fixed = torch.zeros_like(tokens, dtype=torch.bool)
        fixed[:, 0] = True
        share = NOISE_SCHEDULES[self.noise_schedule]
        for step in range(1, passes):
            logits = self.draft_logits(state, tokens, window)
            wanted = max(1, round(share(step / passes) * (block_size - 1)))
            newly = wanted - (int(fixed[0].sum()) - 1)
            confidence, draft_tokens = logits.float().softmax(dim=-1).max(dim=-1)
            best = confidence.masked_fill(fixed, -1.0).topk(max(newly, 0), dim=-1).indices
            tokens = tokens.scatter(1, best, draft_tokens.gather(1, best))
            fixed = fixed.scatter(1, best, True)
        hidden, logits = self.draft_pass(state, tokens, 1, window)
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(2, tokens[:, 1:, None], False)
        return hidden, logits.masked_fill(fixed[:, 1:, None] & others, -torch.inf)

    def draft_logits(self, state: KVCache, tokens: Tensor, window: int | None = None) -> Tensor:
        return self.draft_pass(state, tokens, window=window)[1]

    def draft_pass(
        self, state: KVCache, tokens: Tensor, first: int = 0, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits, `[B, N - first, ...]`, of a block from its position `first` on.

        Unknown positions hold the mask token. The output of a DFlash drafter at position 0 has no meaning.
        """
        hidden, logits = self.runner.draft_tokens(state, tokens, first, window)
        if self._adjusts_logits:
            logits = self.network.adjust_logits(logits)
        mark(HEAD)
        return hidden, logits


def load_dflash(path: Path, target: Target, kind: type[DFlashDrafter] = DFlashDrafter) -> DFlashDrafter:
    """Load the drafter in a folder of any layout or in a GGUF file."""
    checkpoint = read_fitting(path, target)
    borrowed, head = checkpoint.borrowed, None
    if borrowed is not None and borrowed.kept is not None and borrowed.head is not None:
        head = ReducedHead(borrowed.head, borrowed.kept, target.vocab_size)
    network = filled_network(checkpoint, kind.network_class)
    del checkpoint, borrowed  # the network owns the tensors now
    return kind(network, target, path, head, owned=True)


DRAFTER = DrafterSpec(
    load_dflash,
    architectures=("DFlashDraftModel", "DFlashSpeculator"),
    network=DFlashNetwork,
    layouts=("zlab", "speculators"),
    drafter=DFlashDrafter,
    cost=DraftCost(block_size=16),
)
