"""Training of DFlash2: the losses of DFlash v1, which also train the convolutions, and a loss of the selector.

The selector learns with the token of the data before each slot, not with the draft token there. A label that is not
among the candidates replaces the least likely one, as in SpecForge and speculators. So the selector learns from every
taught slot from the first step on, when few labels are candidates. Draft tokens and metrics are without that help, as
in decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Network
from blockdraft.settings import Count, settings
from blockdraft.targets import Target
from blockdraft_train.objectives import Slots
from blockdraft_train.recipe import Recipe
from blockdraft_train.variants.dflash import DFlashFamily, DFlashRecipe

# Sizes of z-lab's drafters. Fewer channels share a correction if the hidden size is no multiple of CONV_GROUP.
CONV_TAPS, CONV_GROUP, CANDIDATES = 2, 16, 16


@settings
class DFlash2Recipe(DFlashRecipe):
    """Recipe of DFlash2: that of DFlash and this field."""

    selector_rank: Count = Field(256, description="Width of the selector's codebooks.")


class DFlash2Variant(DFlashFamily[DFlash2Recipe, DFlash2Network]):
    recipe_class: ClassVar[type[Recipe]] = DFlash2Recipe
    network_class: type[DFlashNetwork] = DFlash2Network
    own_modules = ("attention_conv", "mlp_conv", "candidate_selector")
    counted = ("candidate_recall", "base_accuracy", "selector_accuracy")
    fit_gain = 1.26

    @classmethod
    def fit_fields(cls, layers: int, hidden_size: int, narrow: bool = False) -> dict[str, Any]:
        return {"selector_rank": min(256, max(16, hidden_size // 16))}

    def own_config(self, target: Target) -> Mapping[str, Any]:
        return {
            "conv_kernel_size": CONV_TAPS,
            "conv_group_size": math.gcd(CONV_GROUP, target.hidden_size),
            "selector_rank": self.recipe.selector_rank,
            "selector_top_k": CANDIDATES,
        }

    def is_quantized(self, name: str) -> bool:
        return super().is_quantized(name) and not name.endswith("kernel_projection")

    def factors(self) -> Mapping[str, float]:
        return {**super().factors(), "selector": 1.0}

    def losses(self, network: DFlash2Network, slots: Slots) -> dict[str, Tensor]:
        return {**super().losses(network, slots), "selector": selector_losses(network, slots)}

    def draft_tokens(self, network: DFlash2Network, slots: Slots) -> Tensor:
        ids_CKN, unary_CKN = network.candidates(slots.logits_CKV)
        best_CK1 = _scores(network, slots, ids_CKN, unary_CKN).argmax(dim=-1, keepdim=True)
        return ids_CKN.gather(-1, best_CK1).squeeze(-1)

    def counts(self, network: DFlash2Network, slots: Slots) -> dict[str, Tensor]:
        """Return which labels are candidates, have the best logit, and are chosen by the selector, `[C, K]` bool."""
        labels_CK = slots.labels_CK
        return {
            "candidate_recall": (network.candidates(slots.logits_CKV)[0] == labels_CK.unsqueeze(-1)).any(dim=-1),
            "base_accuracy": slots.logits_CKV.argmax(dim=-1) == labels_CK,
            "selector_accuracy": self.draft_tokens(network, slots) == labels_CK,
        }


def selector_losses(network: DFlash2Network, slots: Slots) -> Tensor:
    """Return the cross-entropy `[C, K]` float32 of each label among the N candidates of its slot.

    Candidates are scored by the token of the data before them.
    """
    labels_CK1 = slots.labels_CK.unsqueeze(-1)
    ids_CKN = slots.logits_CKV.topk(network.config.selector_top_k, dim=-1).indices
    is_label_CKN = ids_CKN == labels_CK1
    place_CK1 = torch.where(is_label_CKN.any(dim=-1), is_label_CKN.int().argmax(dim=-1), ids_CKN.size(-1) - 1)
    ids_CKN = ids_CKN.scatter(-1, place_CK1.unsqueeze(-1), labels_CK1)
    scores_CKN = _scores(network, slots, ids_CKN, slots.logits_CKV.gather(-1, ids_CKN))
    losses: Tensor = F.cross_entropy(scores_CKN.flatten(0, 1), place_CK1.flatten(), reduction="none")
    return losses.view_as(slots.labels_CK)


def _scores(network: DFlash2Network, slots: Slots, ids_CKN: Tensor, unary_CKN: Tensor) -> Tensor:
    """Return scores `[C, K, N]` float32 of candidates, given the token of the data before them."""
    before_CK1 = slots.predecessors_CK.unsqueeze(-1)
    pairs_CKN: Tensor = network.candidate_selector(slots.hidden_CKH, before_CK1, ids_CKN).squeeze(-2)
    return unary_CKN.float() + pairs_CKN.float()


VARIANT = DFlash2Variant
