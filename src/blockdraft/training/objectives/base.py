"""What an objective sees and gives back.

Letters: C blocks of a chunk, K taught slots of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Decay constants for the block sizes of the DFlash paper; between and beyond them `default_gamma` goes by proportion.
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True)
class Slots:
    """The taught slots of a chunk of blocks. The k-th of them, k = 1 to K, predicts the k-th token behind the anchor.

    Attributes:
        hidden_CKH: The draft network's output.
        logits_CKV: The target's head on it, scaled and capped as the drafter's configuration says.
        tokens_CL: int64, L = K + 1: the anchor and the K tokens behind it, as they stand in the data.
        taught_CK: bool; slots that count. Others lie past the document's end or where the target did not write.
        teacher_CKV: The target's own logits for the same K tokens, given all tokens before them. None where neither the
            objective nor the variant asked for them.
    """

    hidden_CKH: Tensor
    logits_CKV: Tensor
    tokens_CL: Tensor
    taught_CK: Tensor
    teacher_CKV: Tensor | None = None

    @property
    def labels_CK(self) -> Tensor:
        return self.tokens_CL[:, 1:]

    @property
    def predecessors_CK(self) -> Tensor:
        """The token before each label; the anchor for the first."""
        return self.tokens_CL[:, :-1]


class Objective(Protocol):
    """A module of this package, which goes by its file name.

    Attributes:
        DECAYED: Whether slot k has the weight `exp(-(k - 1) / gamma)`; otherwise all slots weigh alike.
        NEEDS_TEACHER: Whether it reads `teacher_CKV`.
    """

    DECAYED: bool
    NEEDS_TEACHER: bool

    def losses(self, slots: Slots) -> Tensor:
        """The loss of each slot, `[C, K]` float32. What it says of slots that are not taught is not looked at."""


def default_gamma(block_size: int) -> float:
    return GAMMA.get(block_size, 7.0 * block_size / 16)


def slot_weights(taught: Tensor, gamma: float | None) -> Tensor:
    """Weight of each slot, `[..., K]` float32: 0 where it is not taught, else `exp(-(k - 1) / gamma)` (arXiv
    2602.06036, section 4) or, where gamma is None, 1.

    Weights depend on what is taught alone, never on what the network says, so that their sum over all ranks and
    accumulated batches is known before the first backward pass.
    """
    if gamma is None:
        return taught.float()
    return taught * torch.exp(-torch.arange(taught.size(-1), device=taught.device) / gamma)


def cross_entropy(slots: Slots) -> Tensor:
    """`-log q(label)` of each slot, `[C, K]` float32."""
    logits = slots.logits_CKV.float().flatten(0, 1)
    return F.cross_entropy(logits, slots.labels_CK.flatten(), reduction="none").view(slots.taught_CK.shape)


def log_p_and_q(slots: Slots) -> tuple[Tensor, Tensor]:
    """log p of the target and log q of the drafter, `[C, K, V]` float32 both."""
    assert slots.teacher_CKV is not None, "the objective needs the target's logits"
    return slots.teacher_CKV.float().log_softmax(dim=-1), slots.logits_CKV.float().log_softmax(dim=-1)


def acceptance(slots: Slots) -> Tensor:
    """Probability that a guess sampled from q is accepted, `sum_v min(p_v, q_v)`, `[C, K]` float32."""
    log_p, log_q = log_p_and_q(slots)
    return torch.minimum(log_p.exp(), log_q.exp()).sum(dim=-1)
