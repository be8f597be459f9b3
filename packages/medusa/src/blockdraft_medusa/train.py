"""Training of Medusa's heads (arXiv 2401.10774).

Head k, counted from 1, learns the token at anchor + k from the target's last hidden state at the token before the
anchor. This is Medusa-1. Medusa-2 also trains the target, whose output would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from blockdraft.settings import Amount, Count, Share, settings
from blockdraft.targets import Target, embedding_and_head
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork
from blockdraft_train.batches import PackedSequences, hidden_states_before
from blockdraft_train.recipe import Recipe
from blockdraft_train.variant import Variant, load_init


@settings
class MedusaRecipe(Recipe):
    """Recipe of Medusa's heads. Learning rate, warm-up, epochs and number of heads are those of the authors' runs."""

    block_size: Annotated[int, Field(ge=2)] = Field(
        4,
        description="Tokens of a block, anchor included; there are block_size - 1 heads.",
    )
    gamma: Amount | None = Field(
        4.5,
        description="Decay constant of the heads' weights in the loss; 4.5 is a factor of 0.8 from each head to the "
        "next.",
    )
    epochs: Count = 2
    learning_rate: Amount = 1e-3
    warmup: Share = 0.1
    layers: Count = Field(1, description="Residual blocks of each head.")
    share_head: bool = Field(
        False,
        description="Whether all heads end in the target's output projection. Otherwise each has one of its own, "
        "which starts as a copy and is most of the drafter's size.",
    )
    init: str | None = Field(
        None,
        description="Folder of Medusa's heads whose weights training starts from; by default new heads.",
    )


class MedusaVariant(Variant[MedusaRecipe, MedusaNetwork, MedusaConfig]):
    recipe_class: ClassVar[type[Recipe]] = MedusaRecipe

    def config(self, target: Target) -> MedusaConfig:
        return MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            num_heads=self.taught_slots,
            num_layers=self.recipe.layers,
            shared_head=self.recipe.share_head,
        )

    def new_network(self, config: MedusaConfig, vocabulary: Mapping[str, int] | None) -> MedusaNetwork:
        network = MedusaNetwork(config)
        if self.recipe.init is not None:
            load_init(network, config, self.recipe.init, vocabulary)
        return network

    def fit_head(self, network: MedusaNetwork, target: Target) -> None:
        if self.recipe.share_head or self.recipe.init is not None:
            return
        with torch.no_grad():
            head = embedding_and_head(target)[1]
            for projection in network.projections():
                projection.weight.copy_(head)

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        # Muon is not meant for output projections.
        return super().is_matrix(name, parameter) and name.endswith("linear.weight")

    def hidden(
        self, network: MedusaNetwork, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences
    ) -> Tensor:
        states: Tensor = network(hidden_states_before(hidden_states_BSF, sequences))
        return states

    def logits(self, network: MedusaNetwork, target: Target, hidden_CKH: Tensor) -> Tensor:
        return network.logits(hidden_CKH, lambda states: target.head(states.to(target.dtype)))


VARIANT = MedusaVariant
