"""Training of P-EAGLE: EAGLE-3 that makes all guesses behind an anchor in one pass.

The entry of an anchor is one of the text's entries. The mask entries behind it see the text's entries up to the anchor,
and the masks of the same anchor up to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.drafters.dflash.train import new_matrices
from blockdraft.drafters.eagle3.train import LAST_LAYER, Eagle3Recipe, Eagle3Variant
from blockdraft.drafters.peagle.network import PEagleConfig, PEagleNetwork
from blockdraft.errors import Complaints
from blockdraft.nn.attention import attend
from blockdraft.nn.draft_config import need
from blockdraft.settings import Count, Natural, settings
from blockdraft.targets import Target, embedding_and_head
from blockdraft.training.batches import Rows
from blockdraft.training.mask_token import mask_token
from blockdraft.training.recipe import Recipe
from blockdraft.training.variant import Choice, load_init


@settings
class PEagleRecipe(Eagle3Recipe):
    """Recipe of P-EAGLE: that of EAGLE-3, with these fields new or different."""

    layers: Count = Field(4, description="Number of draft layers.")
    mask_token_id: Natural | None = Field(
        None,
        description="Token that stands for an unknown one; by default chosen as for DFlash.",
    )
    block_size: Annotated[int, Field(ge=2)] = Field(
        9,
        description="Tokens of a block, anchor included; there are block_size - 1 guesses.",
    )


class PEagleVariant(Eagle3Variant):
    recipe: PEagleRecipe
    recipe_class: ClassVar[type[Recipe]] = PEagleRecipe
    fit_gain = None

    def defaults(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, Choice]:
        found = super().defaults(target, data, complaints)
        with complaints.noting():
            found["mask_token_id"] = Choice(*mask_token(target, self.recipe.mask_token_id, data))
        return found

    def config(self, target: Target) -> PEagleConfig:
        need(not self.recipe.alone, "alone", self.recipe.alone, "0 for P-EAGLE, which makes all guesses at once")
        need(self.recipe.init != LAST_LAYER, "init", LAST_LAYER, "a folder for P-EAGLE")
        values = vars(self.new_config(target))
        mask = mask_token(target, self.recipe.mask_token_id).id
        return PEagleConfig(**values, mask_token_id=mask, num_hidden_layers=self.recipe.layers)

    def usual_target_layers(self, layers: int) -> tuple[int, ...]:
        # The speculators format cannot list the last layer's output.
        return super().usual_target_layers(layers if layers >= 7 else layers - 1)

    def new_network(self, config: PEagleConfig, vocabulary: Mapping[str, int] | None) -> PEagleNetwork:  # type: ignore[override]
        network = PEagleNetwork(config)
        new_matrices(network, "embed_tokens.weight".__eq__)
        if self.recipe.init is not None:
            load_init(network, config, self.recipe.init, vocabulary, ("block_size", "max_position_embeddings"))
        return network

    @torch.no_grad()
    def fit_head(self, network: PEagleNetwork, target: Target) -> None:  # type: ignore[override]
        super().fit_head(network, target)  # type: ignore[arg-type]
        if self.recipe.init is None:
            network.embed_tokens.weight.copy_(embedding_and_head(target)[0])

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        return super().is_matrix(name, parameter) and name != "embed_tokens.weight"

    def is_rounded(self, name: str) -> bool:
        return False  # torch runs it

    def hidden(  # type: ignore[override]
        self, network: PEagleNetwork, target: Target, hidden_states_BSF: Tensor, rows: Rows
    ) -> Tensor:
        (batch, size), blocks, masks = rows.tokens_BS.shape, rows.anchors_BA.size(1), self.taught_slots - 1
        device, anchors_BA = hidden_states_BSF.device, rows.anchors_BA.clamp(min=0)
        begins_BS = rows.positions_BS == 0
        before_BSH = F.pad(network.fuse(hidden_states_BSF)[:, :-1], (0, 0, 1, 0)).masked_fill(
            begins_BS.unsqueeze(-1), 0
        )
        embedded, hidden_state = network.masks(batch, blocks * masks)
        positions_BA = rows.positions_BS.gather(1, anchors_BA)
        later = torch.arange(1, masks + 1, device=device)
        positions = torch.cat([rows.positions_BS, (positions_BA.unsqueeze(2) + later).flatten(1)], dim=1)

        # For each entry, first those of the text, then masks: its index in the text, or that of its anchor; its block.
        places = torch.arange(size, device=device).expand(batch, -1)
        anchor = torch.cat([places, anchors_BA.repeat_interleave(masks, dim=1)], dim=1)
        counts = torch.tensor([size] + [masks] * blocks, device=device)
        block = torch.arange(-1, blocks, device=device).repeat_interleave(counts)
        document = rows.documents_BS.gather(1, anchor)
        of_text, order = block < 0, torch.arange(anchor.size(1), device=device)
        readable = F.pad(~begins_BS, (0, blocks * masks))  # the first token of a document has no feature before it
        text = of_text & (document[:, :, None] == document[:, None]) & (anchor[:, None] <= anchor[:, :, None])
        own = (block[:, None] == block) & ~of_text & (order <= order[:, None])
        visible = (text & readable[:, None]) | own | torch.eye(len(order), dtype=torch.bool, device=device)

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Under autocast, norms return float32.
            return attend(queries.to(values.dtype), keys.to(values.dtype), values, visible)

        embedded = torch.cat([network.embed_tokens(rows.tokens_BS), embedded], dim=1)
        hidden_state = torch.cat([before_BSH, hidden_state], dim=1)
        states = network(embedded, hidden_state, (positions - 1).clamp(min=0), attention)
        index = anchors_BA.unsqueeze(2).expand(-1, -1, states.size(2))
        first, others = states[:, :size].gather(1, index), states[:, size:].unflatten(1, (blocks, masks))
        return torch.cat([first.unsqueeze(2), others], dim=2)


VARIANT = PEagleVariant
