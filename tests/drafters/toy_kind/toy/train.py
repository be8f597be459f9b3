"""Training of the toy: unrolled over the K draft tokens, each given the token of the data before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blockdraft.settings import Layers, settings
from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences, hidden_states_before
from blockdraft_train.recipe import Recipe
from blockdraft_train.variant import Variant
from toy.network import ToyConfig, ToyNetwork  # type: ignore[import-not-found]


@settings
class ToyRecipe(Recipe):
    """Recipe of the toy.

    Attributes:
        target_layers: Target layers that the drafter reads.
    """

    target_layers: Layers = (0, 1)


class ToyVariant(Variant[ToyRecipe, ToyNetwork, ToyConfig]):
    recipe_class = ToyRecipe

    def config(self, target: Target) -> ToyConfig:
        sizes = target.hidden_size, target.vocab_size, target.num_layers
        return ToyConfig(*sizes, self.recipe.target_layers, self.recipe.block_size)

    def new_network(self, config: ToyConfig, vocabulary: Mapping[str, int] | None) -> ToyNetwork:
        return ToyNetwork(config)

    def hidden(self, network: ToyNetwork, target: Target, hidden_states_BSF: Tensor, rows: PackedSequences) -> Tensor:
        hidden = network.begin(hidden_states_before(hidden_states_BSF, rows))
        actual = []
        for embedded in target.embed(rows.tokens_BAL[:, :, :-1]).float().unbind(dim=2):
            hidden = network.step(hidden, embedded)
            actual.append(hidden)
        return torch.stack(actual, dim=2)


VARIANT = ToyVariant
