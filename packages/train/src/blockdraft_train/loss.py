"""Forward pass of a training step: from a batch to the sums that make up the loss. Logits are computed in chunks.

Letters: as in `batches.py` and `objectives.py`; T terms of the loss, M counts of the variant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences
from blockdraft_train.objectives import Slots, slot_weights
from blockdraft_train.variant import Variant


class Sums(NamedTuple):
    """Sums over the taught slots of some sequences.

    Attributes:
        terms_T: Weighted loss of each term, with gradient.
        right_K, taught_K: Number of slots that were predicted right, given all tokens before them, and of all slots.
        counts_M: Number of slots for each name that the variant counts.
        accepted: Tokens that decoding would commit at these anchors: leading right draft tokens and the bonus.
        blocks: Number of anchors with a taught slot.
    """

    terms_T: Tensor
    right_K: Tensor
    taught_K: Tensor
    counts_M: Tensor
    accepted: Tensor
    blocks: Tensor


class DraftLoss(nn.Module):
    """Draft network and its loss in one module, so that wrappers for many devices see a single forward.

    Embedding and head belong to the target. They are not part of this module and are not trained.
    """

    def __init__(self, network: nn.Module, variant: Variant[Any, Any, Any], target: Target) -> None:
        super().__init__()
        self.network = network
        self._variant, self._target = variant, target
        variant.prepare(network)
        self._run = torch.compile(self._sums, dynamic=False) if variant.recipe.compile else self._sums

    def forward(self, hidden_states_BSF: Tensor, teacher_BSH: Tensor | None, *sequences: Tensor) -> Sums:
        """Compute the sums of some sequences.

        Args:
            hidden_states_BSF: Outputs of the target at the drafter's target layers.
            teacher_BSH: Input of the target's head; None if nothing learns from it.
            sequences: Fields of `PackedSequences` as separate tensors, which wrappers for many devices can pass on.
        """
        sums: Sums = self._run(hidden_states_BSF, teacher_BSH, PackedSequences(*sequences))
        return sums

    def _sums(self, hidden_states_BSF: Tensor, teacher_BSH: Tensor | None, batch: PackedSequences) -> Sums:
        if not torch.is_autocast_enabled(hidden_states_BSF.device.type):
            hidden_states_BSF = hidden_states_BSF.float()
        hidden = self._variant.hidden(self.network, self._target, hidden_states_BSF, batch).flatten(0, 1)
        tokens, taught = batch.tokens_BAL.flatten(0, 1), batch.taught_BAK.flatten(0, 1)
        # The target's logits for the k-th token come from the token before it.
        count, slots = batch.taught_BAK.shape[1:]
        places = (batch.anchors_BA.unsqueeze(-1) + torch.arange(slots, device=taught.device)).flatten(0, 1)
        batch_index = torch.arange(len(batch.anchors_BA), device=taught.device).repeat_interleave(count)
        places = places.clamp(0, batch.documents_BS.size(1) - 1)
        size, sums, right, counts = self._variant.recipe.chunk, [], [], []
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            inputs = (hidden[part], tokens[part], taught[part], teacher_BSH, batch_index[part], places[part])
            whole = len(hidden) <= size  # recomputing a single chunk would save no memory
            result = self._chunk(*inputs) if whole else checkpoint(self._chunk, *inputs, use_reentrant=False)
            sums.append(result[0])
            right.append(result[1])
            counts.append(result[2])
        right_CK = torch.cat(right)
        accepted = right_CK.long().cumprod(dim=-1).sum(dim=-1) + 1
        blocks = taught[:, 0]
        return Sums(
            torch.stack(sums).sum(dim=0),
            right_CK.sum(dim=0),
            taught.sum(dim=0),
            torch.stack(counts).sum(dim=0),
            (accepted * blocks).sum(),
            blocks.sum(),
        )

    def _chunk(
        self,
        hidden_CKH: Tensor,
        tokens_CL: Tensor,
        taught_CK: Tensor,
        teacher_BSH: Tensor | None,
        batch_index_C: Tensor,
        places_CK: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss of each term, the mask of right slots, and the variant's counts, over a chunk."""
        variant, target = self._variant, self._target
        logits = variant.logits(self.network, target, hidden_CKH)
        teacher = None
        if teacher_BSH is not None:
            with torch.no_grad():
                teacher = variant.teacher_logits(target, teacher_BSH[batch_index_C.unsqueeze(-1), places_CK])
        slots = Slots(hidden_CKH, logits, tokens_CL, taught_CK, teacher)
        losses = variant.losses(self.network, slots)
        sums = [
            (losses[name].masked_fill(~taught_CK, 0) * term_weights(variant, name, taught_CK)).sum()
            for name in variant.factors()
        ]
        with torch.no_grad():
            right = (variant.draft_tokens(self.network, slots) == slots.labels_CK) & taught_CK
            masks = variant.counts(self.network, slots)
            counts = [(masks[name] & taught_CK).sum() for name in variant.counted]
        return torch.stack(sums), right, torch.stack(counts) if counts else right.new_zeros(0, dtype=torch.int64)


def term_weights(variant: Variant[Any, Any, Any], term: str, taught: Tensor) -> Tensor:
    """Return the weights of the slots in a term of the loss, with the shape of `taught`."""
    return slot_weights(taught, variant.gamma if variant.decayed(term) else None)
