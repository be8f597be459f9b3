"""Proposals of drafters of the DFlash family after random contexts."""

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal
from blockdraft.drafters.dflash.drafter import DFlashDrafter

ANCHOR = 7


def propose(drafter: DFlashDrafter, plan: Plan, same: bool = False) -> tuple[Proposal, Tensor, Tensor]:
    """Return a proposal, and hidden states `[B, D, H]` and logits `[B, D, V]` of its draft pass.

    The contexts have different lengths, or are the same one if `same`.
    """
    batch = len(plan.params)
    hidden_states = torch.randn(1 if same else batch, 9, 64, generator=torch.Generator().manual_seed(5))
    state = drafter.new_state(batch, 40)
    lengths = [9 if same else 9 - index % 3 for index in range(batch)]
    drafter.observe(state, torch.zeros(batch, 9, dtype=torch.long), hidden_states.expand(batch, -1, -1), lengths)
    first, anchor = drafter.first_draft_token, torch.full((batch,), ANCHOR)
    block = torch.full((batch, plan.block_size - 1 + first), drafter.config.mask_token_id)
    block[:, :1] = ANCHOR
    with torch.no_grad():
        hidden, logits = drafter.draft_pass(state, block)
    proposal = drafter.propose(state, anchor, plan)
    assert proposal.tokens[:, 0].tolist() == [ANCHOR] * batch
    return proposal, hidden[:, first:], logits[:, first:]
