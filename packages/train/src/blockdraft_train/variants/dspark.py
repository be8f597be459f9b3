"""Training of DSpark (arXiv 2607.05147): each position of a block learns the token after it, given the token there.

The loss is `0.1 CE + 0.9 L1 + 1.0 BCE(confidence, 1 - L1 / 2)`, with the weight `exp(-(k - 1) / 4)` at slot k (paper,
section 3; `deepspec/modeling/dspark/loss.py`). L1 is twice the total variation, so half of it is the probability of a
rejection. The confidence head learns the acceptance of the corrected distribution.

Training may start from a DFlash v1 drafter. Position j of such a drafter predicts the token at its own position, so its
draft tokens are one position late until training has moved them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dspark.network import DSparkNetwork
from blockdraft.settings import Amount, Count, settings
from blockdraft.targets import Target
from blockdraft_train.objectives import Slots, acceptance_rate
from blockdraft_train.recipe import Recipe
from blockdraft_train.variants.dflash import DFlashFamily, DFlashRecipe


@settings
class DSparkRecipe(DFlashRecipe):
    """Recipe of DSpark, with the defaults of the paper: that of DFlash, with these fields new or different."""

    block_size: Annotated[int, Field(ge=2)] = Field(
        7, description="Positions of a block, each of which proposes a draft token."
    )
    objective: Mapping[str, Amount] = field(default_factory=lambda: {"decay": 0.1, "total_variation": 1.8})
    gamma: Amount | None = 4.0
    markov_rank: Count = Field(256, description="Rank of the bias by the token before.")
    confidence: Amount = Field(
        1.0,
        description="Weight of the confidence head's loss; 0 makes a drafter without that head.",
    )


class DSparkVariant(DFlashFamily[DSparkRecipe, DSparkNetwork]):
    recipe_class: ClassVar[type[Recipe]] = DSparkRecipe
    network_class: type[DFlashNetwork] = DSparkNetwork
    first_slot = 0
    own_modules = ("markov_head", "confidence_head")
    needs_teacher = True

    def own_config(self, target: Target) -> Mapping[str, Any]:
        return {"markov_rank": self.recipe.markov_rank, "enable_confidence_head": self.recipe.confidence > 0}

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        # The confidence head has one output. The factors of the bias stay with Muon: at AdamW's rate they lag behind.
        return super().is_matrix(name, parameter) and "confidence_head" not in name

    def factors(self) -> Mapping[str, float]:
        own = {"confidence": self.recipe.confidence} if self.recipe.confidence > 0 else {}
        return {**super().factors(), **own}

    def losses(self, network: DSparkNetwork, slots: Slots) -> dict[str, Tensor]:
        previous = network.previous(slots.predecessors_CK)
        corrected = replace(slots, logits_CKV=slots.logits_CKV + network.bias(previous))
        losses = super().losses(network, corrected)
        if self.recipe.confidence > 0:
            accepted = acceptance_rate(corrected).detach().clamp(0, 1)
            logits = network.confidence_logits(slots.hidden_CKH, previous)
            losses["confidence"] = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        return losses

    def draft_tokens(self, network: DSparkNetwork, slots: Slots) -> Tensor:
        return (slots.logits_CKV + network.bias(network.previous(slots.predecessors_CK))).argmax(dim=-1)


VARIANT = DSparkVariant
