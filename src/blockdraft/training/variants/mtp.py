"""A multi-token prediction head, for a target that has none or whose head knows other texts.

The head is run as in decoding: from the target's state before the anchor, then from its own last output, each time
with the token of the data there (arXiv 2509.18362 trains one layer for several steps so). It attends to the pairs of
its document before the anchor and to the block's own earlier steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.attention import attend
from blockdraft.nn.mtp import MTPConfig, MTPNetwork
from blockdraft.settings import Amount, settings
from blockdraft.targets import Target
from blockdraft.training.batches import Rows, features_before
from blockdraft.training.recipe import Recipe
from blockdraft.training.variants.base import Variant, begin_with
from blockdraft.training.variants.dflash import fit_norm, new_matrices


@settings
class MTPRecipe(Recipe):
    """The layer has the target's shape.

    Attributes:
        block_size: Tokens of a block, anchor included: one more than there are steps.
        gamma: Decay constant of the steps' weights; 2 is a factor of 0.6 from each step to the next (arXiv 2509.18362).
        normed_feedback: Whether a step goes on from the last one's output after the final norm, or before it.
        init: Folder of an MTP head whose weights training begins with, of any number of steps; None begins at random.
    """

    block_size: Annotated[int, Field(ge=2)] = 4
    gamma: Amount | None = 2.0
    normed_feedback: bool = True
    init: str | None = None


class MTPVariant(Variant[MTPRecipe, MTPNetwork, MTPConfig]):
    recipe_class: ClassVar[type[Recipe]] = MTPRecipe

    def config(self, target: Target) -> MTPConfig:
        shape = {"intermediate_size": 3 * target.hidden_size, "rope_theta": 10_000.0, **target.shape}
        lacking = [name for name in ("num_attention_heads", "num_key_value_heads", "head_dim") if name not in shape]
        if lacking:
            raise UsageError(f"The target does not say its {' and '.join(lacking)}, which its MTP head would share.")
        return MTPConfig(
            **shape,
            hidden_size=target.hidden_size,
            max_position_embeddings=target.max_context,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            draft_steps=self.taught_slots,
            normed_feedback=self.recipe.normed_feedback,
        )

    def new_network(self, config: MTPConfig, vocabulary: Mapping[str, int] | None) -> MTPNetwork:
        network = MTPNetwork(config)
        new_matrices(network)
        if self.recipe.init is not None:
            begin_with(network, config, self.recipe.init, vocabulary, ("draft_steps", "max_position_embeddings"))
        return network

    def fit_head(self, network: MTPNetwork, target: Target) -> None:
        if self.recipe.init is None:
            fit_norm(network.norm, target)

    def hidden(self, network: MTPNetwork, target: Target, features_BSF: Tensor, rows: Rows) -> Tensor:
        (_, length), count, device = rows.tokens_BS.shape, rows.anchors_BA.size(1), features_BSF.device
        before_BSF = features_BSF.roll(1, dims=1)  # what comes before the first token of a document is not seen
        known = network.context(target.embed(rows.tokens_BS).float(), before_BSF, rows.positions_BS)
        anchors = rows.anchors_BA.clamp(min=0)
        documents, places = rows.documents_BS, torch.arange(length, device=device)
        same_BAS = documents.gather(1, anchors)[:, :, None] == documents[:, None, :]
        context_BAS = same_BAS & (rows.positions_BS > 0)[:, None, :] & (places < anchors[:, :, None])
        own_BAA = torch.eye(count, dtype=torch.bool, device=device).expand(len(anchors), -1, -1)
        seen = [context_BAS]
        keys, values = ([one] for one in known)

        def attention(layer: int, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
            keys.append(new_keys)
            values.append(new_values)
            seen.append(own_BAA)
            value = torch.cat(values, dim=2)
            # Under autocast norms leave queries and keys in float32.
            key = torch.cat(keys, dim=2).to(value.dtype)
            return attend(queries.to(value.dtype), key, value, torch.cat(seen, dim=2))

        hidden, found = features_before(features_BSF, rows), list[Tensor]()
        first_BA = rows.positions_BS.gather(1, anchors)
        for step in range(self.taught_slots):
            embedded = target.embed(rows.tokens_BAL[:, :, step]).float()
            state, hidden = network(embedded, hidden, first_BA + step, attention)
            found.append(state)
        return torch.stack(found, dim=2)


VARIANT = MTPVariant
