"""Training of an MTP head, for a target that has none or one that was trained on other texts.

The head is one layer of the target's shape, unrolled over several steps as in drafting (arXiv 2509.18362).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.settings import Amount, Count, settings
from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences
from blockdraft_train.recipe import Recipe
from blockdraft_train.unrolled import unrolled
from blockdraft_train.variant import Variant, load_init
from blockdraft_train.variants.dflash import calm, layer_shape, new_matrices


@settings
class MTPRecipe(Recipe):
    """Recipe of an MTP head. The number of steps and their weights are those of arXiv 2509.18362."""

    block_size: Annotated[int, Field(ge=2)] = Field(
        4,
        description="Tokens of a block, anchor included; training is unrolled for block_size - 1 steps.",
    )
    gamma: Amount | None = Field(
        2.0,
        description="Decay constant of the steps' weights in the loss; 2 is a factor of 0.6 from each step to the "
        "next.",
    )
    normed_feedback: bool = Field(
        True,
        description="Whether a step reads the output of the step before after its final norm; otherwise before it.",
    )
    intermediate_size: Count | None = Field(
        None,
        description="Inner size of the layer's MLP; by default the target's, or three times its hidden size.",
    )
    heads: Count | None = Field(None, description="Query heads of the layer; by default the target's.")
    kv_heads: Count | None = Field(None, description="Key/value heads of the layer; by default the target's.")
    head_dim: Count | None = Field(None, description="Size of a head; by default the target's.")
    init: str | None = Field(
        None,
        description="Folder of an MTP head, of any block size, whose weights training starts from; by default "
        "random weights.",
    )


class MTPVariant(Variant[MTPRecipe, MTPNetwork, MTPConfig]):
    recipe_class: ClassVar[type[Recipe]] = MTPRecipe

    def config(self, target: Target) -> MTPConfig:
        return MTPConfig(
            **layer_shape(self.recipe, target),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            block_size=self.recipe.block_size,
            max_position_embeddings=target.max_context,
            normed_feedback=self.recipe.normed_feedback,
        )

    def new_network(self, config: MTPConfig, vocabulary: Mapping[str, int] | None) -> MTPNetwork:
        network = MTPNetwork(config)
        new_matrices(network)
        if self.recipe.init is not None:
            load_init(network, config, self.recipe.init, vocabulary, ("block_size", "max_position_embeddings"))
        return network

    def fit_head(self, network: MTPNetwork, target: Target) -> None:
        if self.recipe.init is None:
            calm(network.norm.weight, target)

    def is_quantized(self, name: str) -> bool:
        return True

    def hidden(
        self, network: MTPNetwork, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences
    ) -> Tensor:
        return unrolled(network, target, hidden_states_BSF, sequences)

    def logits(self, network: MTPNetwork, target: Target, hidden_CKH: Tensor) -> Tensor:
        return network.logits(hidden_CKH, lambda states: target.head(states.to(target.dtype)))


VARIANT = MTPVariant
