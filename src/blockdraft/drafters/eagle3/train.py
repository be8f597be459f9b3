"""Training of EAGLE-3 (arXiv 2503.01840), unrolled as it drafts ("training-time test").

The k-th guess behind an anchor is made from the network's own states at the k - 1 entries before it; these entries hold
the tokens of the data. Each of them sees the entries of the text up to the anchor, made from the target's features, and
the unrolled entries of its own chain.

The loss is `forward_kl`, where p is the target's distribution among the tokens that the drafter can guess. It counts
only where the target's most probable token is one of these. Step k has the weight 0.8^(k - 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.data.taps import chosen_taps
from blockdraft.drafters.dflash.train import calm, layer_shape, new_matrices
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, DRAFT_VOCAB, Eagle3Config, Eagle3Network, default_taps
from blockdraft.errors import Complaints
from blockdraft.formats import Checkpoint, check_fits, read_drafter
from blockdraft.nn.draft_config import need
from blockdraft.settings import Amount, Count, Layers, settings
from blockdraft.targets import Target, embedding_and_head
from blockdraft.training.batches import Rows
from blockdraft.training.draft_vocabulary import draft_ids, frequent_tokens, reduced_losses
from blockdraft.training.objectives import Slots
from blockdraft.training.recipe import Recipe
from blockdraft.training.unrolled import unrolled
from blockdraft.training.variant import Choice, Variant

STEP_WEIGHT = 0.8  # weight of a step over that of the step before


@settings
class Eagle3Recipe(Recipe):
    """Recipe of EAGLE-3. Steps, their weights and the size of the draft vocabulary are those of SafeAILab's training
    code, learning rate and clipping those of SpecForge.

    Attributes:
        block_size: Tokens of a chain, anchor included; training is unrolled for block_size - 1 steps.
        taps: Target layers that the drafter reads: their number, spread over the target (`3`), or a list of 0-based
            layers. None is the inputs of the layers 2, T // 2 and T - 3 of a target with T layers, or the taps of
            `init`.
        draft_vocab: Number of tokens that the drafter can guess, the most frequent supervised ones of the data. None is
            32000, or the whole vocabulary if smaller, or that of `init`.
        intermediate_size: Inner size of the layer's MLP; None is the target's, or three times its hidden size.
        heads: Query heads of the layer; None is the target's.
        kv_heads: Key/value heads of the layer; None is the target's.
        head_dim: Size of a head; None is the target's.
        init: Folder of an EAGLE-3 drafter of any layout, whose weights training starts from. None starts from random
            weights and the target's head.
    """

    block_size: Annotated[int, Field(ge=2)] = BLOCK_SIZE
    objective: Mapping[str, Amount] = field(default_factory=lambda: {"forward_kl": 1.0})
    gamma: Amount | None = round(-1 / math.log(STEP_WEIGHT), 4)
    learning_rate: Amount = 1e-4
    clip: Amount = 0.5
    taps: Count | Layers | None = None
    draft_vocab: Count | None = None
    intermediate_size: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    init: str | None = None


# Recipe fields that decide the network's shape, by the configuration's names for them.
SHAPE = {"taps": "taps", "draft_vocab_size": "draft_vocab", "intermediate_size": "intermediate_size"}
SHAPE |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}


class Eagle3Variant(Variant[Eagle3Recipe, Eagle3Network, Eagle3Config]):
    recipe_class: ClassVar[type[Recipe]] = Eagle3Recipe
    counted = ("covered",)  # slots whose token the drafter can guess

    def defaults(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, Choice]:
        with complaints.noting():
            config = self.config(target)
            return {name: Choice(getattr(config, field)) for field, name in SHAPE.items()}
        return {}

    def config(self, target: Target) -> Eagle3Config:
        return self.new_config(target) if self.recipe.init is None else self._config_of_init(target)

    def new_config(self, target: Target) -> Eagle3Config:
        recipe, layers = self.recipe, target.num_layers
        taps = self.usual_taps(layers) if recipe.taps is None else chosen_taps(recipe.taps, layers)
        return Eagle3Config(
            **layer_shape(recipe, target),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=recipe.draft_vocab or min(DRAFT_VOCAB, target.vocab_size),
            taps=taps,
            num_target_layers=layers,
            block_size=recipe.block_size,
            max_position_embeddings=target.max_context,
        )

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        """Default taps for a target with this number of layers."""
        return default_taps(layers) if layers >= 7 else chosen_taps(min(3, layers), layers)

    def _config_of_init(self, target: Target) -> Eagle3Config:
        config: Eagle3Config = self._init(target.num_layers).config
        check_fits(config, hidden_size=target.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size)
        for field_name, name in SHAPE.items():
            ours, theirs = getattr(self.recipe, name), getattr(config, field_name)
            same = ours is None or ours == theirs
            need(same, f"{name} of {self.recipe.init}", theirs, f"that of the recipe, {ours}; leave that out")
        return replace(config, block_size=self.recipe.block_size)

    def _init(self, num_target_layers: int) -> Checkpoint:
        assert self.recipe.init is not None
        found = read_drafter(self.recipe.init, None, num_target_layers)
        kind = type(found.config).__name__
        need(type(found.config) is Eagle3Config, f"the drafter of {self.recipe.init}", kind, "an EAGLE-3 drafter")
        return found

    def new_network(self, config: Eagle3Config, vocabulary: Mapping[str, int] | None) -> Eagle3Network:
        network = Eagle3Network(config)
        if self.recipe.init is not None:
            network.load_state_dict(self._init(config.num_target_layers).tensors)
            return network
        new_matrices(network)
        return network

    def fit_data(self, network: Eagle3Network, data: TokenData) -> None:
        if self.recipe.init is None:
            tokens = frequent_tokens(data, network.config.vocab_size, network.config.draft_vocab_size)
            network.keep(tokens.to(network.d2t.device))

    @torch.no_grad()
    def fit_head(self, network: Eagle3Network, target: Target) -> None:
        if self.recipe.init is None:
            network.lm_head.weight.copy_(embedding_and_head(target)[1][network.kept])
            calm(network.norm.weight, target)

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        return super().is_matrix(name, parameter) and name != "lm_head.weight"

    def hidden(self, network: Eagle3Network, target: Target, features_BSF: Tensor, rows: Rows) -> Tensor:
        return unrolled(network, target, features_BSF, rows)

    def logits(self, network: Eagle3Network, target: Target, hidden_CKH: Tensor) -> Tensor:
        return network.logits(hidden_CKH, target.head)  # over the draft vocabulary

    def losses(self, network: Eagle3Network, slots: Slots) -> dict[str, Tensor]:
        plain = partial(super().losses, network)
        return reduced_losses(plain, slots, network.kept, network.config.vocab_size, self.objectives)

    def guesses(self, network: Eagle3Network, slots: Slots) -> Tensor:
        return network.kept[slots.logits_CKV.argmax(dim=-1)]

    def counts(self, network: Eagle3Network, slots: Slots) -> Mapping[str, Tensor]:
        return {"covered": draft_ids(network.kept, network.config.vocab_size)[slots.labels_CK] >= 0}


VARIANT = Eagle3Variant
