"""DFlash v1 (arXiv 2602.06036): each position 1, 2, ... of a block of masks learns the token at its own position.

Variants that extend it state their network, their own recipe fields and their own losses:

    class MyVariant(DFlashFamily[MyRecipe, MyNetwork]):
        recipe_class = MyRecipe
        network_class = MyNetwork  # its `config_class` is what `config` makes
        own_modules = ("candidate_selector", "conv")

        def own_config(self, target): return {"selector_rank": self.recipe.selector_rank}

`first_slot` decides the labels. With `first_slot = 1` (DFlash), slot 0, the anchor's own, is not taught, and K =
block_size - 1. With `first_slot = 0` (DSpark, "shifted labels"), slot 0 is taught as well, and K = block_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.errors import UsageError, counted
from blockdraft.formats import read_drafter
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, need
from blockdraft.nn.draft_network import DraftLayer
from blockdraft.settings import Count, Layers, Natural, settings
from blockdraft.targets import Target, embedding_and_head
from blockdraft_train.batches import PackedSequences
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.target_layers import chosen_target_layers
from blockdraft_train.dflash_pass import draft_pass
from blockdraft_train.draft_vocabulary import draft_ids, frequent_tokens, reduced_losses
from blockdraft_train.mask_token import mask_token
from blockdraft_train.objectives import Slots
from blockdraft_train.recipe import Recipe
from blockdraft_train.variant import DerivedValue, Variant

DEFAULT_LAYERS = 5
LARGE_SPREAD = 2.0  # standard deviation of the logits of random hidden states of size 1; the usual heads have about 1
INIT_STD = 0.02  # standard deviation of new matrices, except `fc`, which preserves the size of its input


@settings
class DFlashRecipe(Recipe):
    """Recipe of DFlash, with the layers of arXiv 2602.06036."""

    layers: Count | None = Field(
        None,
        description="Number of draft layers; by default 5, or that of the drafter in `init`.",
    )
    target_layers: Count | Layers | None = Field(
        None,
        description="Target layers that the drafter reads: their number, spread over the target (`5`), or a list of "
        "0-based layers (`1,9,17`; a single one is `9,`). By default 5, or fewer if the target has fewer "
        "layers, or those of `init`.",
    )
    causal: bool = Field(
        False,
        description="Whether a position of a block sees only positions up to its own; otherwise it sees the whole "
        "block.",
    )
    window: Natural = Field(0, description="Sliding window of every draft layer in tokens; 0 is full attention.")
    intermediate_size: Count | None = Field(
        None,
        description="Inner size of the draft layers' MLP; by default the target's, or three times its hidden size.",
    )
    heads: Count | None = Field(None, description="Query heads of the draft layers; by default the target's.")
    kv_heads: Count | None = Field(None, description="Key/value heads of the draft layers; by default the target's.")
    head_dim: Count | None = Field(None, description="Size of a head; by default the target's.")
    draft_vocab: Count | None = Field(
        None,
        description="Number of tokens that the drafter can propose, the most frequent supervised ones of the data. "
        "Such a drafter, of the kind dflash only, is written in the speculators format. By default all "
        "tokens of the target.",
    )
    mask_token_id: Natural | None = Field(
        None,
        description="Token that stands for an unknown one. By default the first of these that exists: the mask token "
        "of `init`, the tokenizer's mask token, an id of the embedding without a token, a reserved "
        "token, a token that the data lack.",
    )
    init: str | None = Field(
        None,
        description="Drafter with as many layers or fewer, whose weights training starts from, as `--drafter` names "
        "it: a folder, a GGUF file, a hub name, or bundled; None "
        "starts from random weights.",
    )
    checkpoint_activations: bool = Field(
        False,
        description="Recompute the draft layers' activations in the backward pass, to save memory.",
    )
    attention: Literal["auto", "flex", "dense"] = Field(
        "auto",
        description='"flex" (FlexAttention), "dense" (a boolean mask), or "auto" (flex on a GPU, else dense).',
    )


R = TypeVar("R", bound=DFlashRecipe)
N = TypeVar("N", bound=DFlashNetwork)


def layer_shape(recipe: Any, target: Target) -> dict[str, Any]:
    """Return the fields of a configuration that describe the layers, from the recipe or else from the target.

    Raises:
        ValueError: Neither has a size.
    """
    shape = {"intermediate_size": 3 * target.hidden_size, **target.shape}
    flags = {"intermediate_size": "intermediate_size", "num_attention_heads": "heads"}
    flags |= {"num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
    sizes: dict[str, Any] = {name: getattr(recipe, flag) or shape.get(name) for name, flag in flags.items()}
    missing = [f"--{flags[name].replace('_', '-')}" for name, value in sizes.items() if value is None]
    if missing:
        raise UsageError(f"The sizes of the target's layers are unknown; set the drafter's by {', '.join(missing)}.")
    shared: dict[str, Any] = {n: shape[n] for n in ("rope_theta", "rope_scaling", "rms_norm_eps") if n in shape}
    return {**sizes, "rope_theta": 10_000.0, **shared}


def new_matrices(network: nn.Module, kept: Callable[[str], bool] = lambda name: False) -> None:
    """Initialize a network's matrices randomly, except parameters whose names are `kept`."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2 and not kept(name):
            nn.init.normal_(parameter, std=parameter.size(1) ** -0.5 if name == "fc.weight" else INIT_STD)


@torch.no_grad()
def calm(norm: Tensor, target: Target) -> None:
    """Scale down the norm before the target's head if that head would make a new network overconfident.

    A head with large weights gives confident predictions for any hidden states, which are wrong for a new network. Its
    loss would be many times that of a uniform prediction, and the norm is slow to unlearn this."""
    random = torch.randn(16, target.hidden_size, generator=torch.Generator().manual_seed(0))
    spread = float(target.head(random.to(target.device, target.dtype)).float().std())
    if spread > LARGE_SPREAD:
        norm.div_(spread)


class DFlashFamily(Variant[R, N, DraftConfig]):
    """Base of all variants of the DFlash family.

    Attributes:
        network_class: Class of the network.
        first_slot: First position of a block that learns, 1 or 0.
        own_modules: Substrings of the names of parameters that DFlash v1 lacks. The network initializes them itself,
            and a checkpoint for a warm start may lack them.
    """

    recipe_class: ClassVar[type[Recipe]] = DFlashRecipe
    free_fields: ClassVar[frozenset[str]] = frozenset({"attention", "checkpoint_activations"})
    network_class: type[DFlashNetwork] = DFlashNetwork
    first_slot: int = 1
    own_modules: tuple[str, ...] = ()

    def __init__(self, recipe: R) -> None:
        super().__init__(recipe)
        self.kept: Tensor | None = None
        self._head: Tensor | None = None  # the target's, of the draft vocabulary, [Vd, H]
        if recipe.draft_vocab is not None:
            self.counted = (*self.counted, "covered")

    @classmethod
    def layout(cls, recipe: R, target: Target) -> str | None:
        return None if recipe.draft_vocab is None else "speculators"

    def defaults(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, DerivedValue]:
        recipe, choices = self.recipe, dict[str, DerivedValue]()
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer is not None else None
        init, of_init = None, "that of the drafter to begin with"
        if recipe.draft_vocab is not None:
            most = target.vocab_size if self.reducible else 0
            limit = f"at most the target's {most}" if most else "left out: only dflash has a draft vocabulary"
            with complaints.noting():
                need(recipe.draft_vocab <= most, "draft_vocab", recipe.draft_vocab, limit)
        if recipe.init is not None:
            with complaints.noting():
                init = self._init(vocabulary, target.num_layers)[0]
        if recipe.layers is None:
            choices["layers"] = DerivedValue(init.num_hidden_layers, of_init) if init else DerivedValue(DEFAULT_LAYERS)
        if init is not None and recipe.target_layers is None:
            choices["target_layers"] = DerivedValue(init.target_layers, of_init)
        else:
            with complaints.noting():
                target_layers = chosen_target_layers(recipe.target_layers, target.num_layers)
                need(
                    max(target_layers) < target.num_layers,
                    "target_layers",
                    target_layers,
                    f"layers of the target, 0 to {target.num_layers - 1}",
                )
                few = recipe.target_layers is None and len(target_layers) < 5
                choices["target_layers"] = DerivedValue(
                    target_layers, f"the target has {counted(target.num_layers, 'layer')}" if few else None
                )
        if init is not None and recipe.mask_token_id is None:
            choices["mask_token_id"] = DerivedValue(init.mask_token_id, of_init)
        else:
            with complaints.noting():
                mask = mask_token(target, recipe.mask_token_id, data)
                choices["mask_token_id"] = DerivedValue(*mask)
        return choices

    def config(self, target: Target) -> DraftConfig:
        settled = self.defaults(target, None, complaints := Complaints())
        complaints.check()
        recipe = replace(self.recipe, **{name: choice.value for name, choice in settled.items()})
        assert recipe.layers is not None and recipe.mask_token_id is not None
        made = self.network_class.config_class(
            **layer_shape(recipe, target),
            **self.own_config(target),
            hidden_size=target.hidden_size,
            num_hidden_layers=recipe.layers,
            vocab_size=target.vocab_size,
            block_size=recipe.block_size,
            mask_token_id=recipe.mask_token_id,
            target_layers=chosen_target_layers(recipe.target_layers, target.num_layers),
            num_target_layers=target.num_layers,
            layers=(LayerAttention(recipe.causal, recipe.window or None),) * recipe.layers,
            max_position_embeddings=target.max_context,
        )
        return made

    def own_config(self, target: Target) -> Mapping[str, Any]:
        """Return the fields of the configuration that DFlash v1 lacks."""
        return {}

    def new_network(self, config: DraftConfig, vocabulary: Mapping[str, int] | None) -> N:
        network = self.network_class(config)
        new_matrices(network, self._own)
        if self.recipe.init is not None:
            self.warm_start(network, *self._init(vocabulary, config.num_target_layers))
        return cast(N, network)

    def _init(
        self, vocabulary: Mapping[str, int] | None, num_target_layers: int
    ) -> tuple[DraftConfig, Mapping[str, Tensor]]:
        """Return configuration and tensors of the `init`. Raise a ValueError if that is of another kind."""
        assert self.recipe.init is not None
        if not is_gguf(self.recipe.init):
            return read_checkpoint(Path(self.recipe.init), vocabulary)
        drafter = read_drafter(self.recipe.init, vocabulary, num_target_layers)
        kind = type(drafter.config).__name__
        need(isinstance(drafter.config, DraftConfig), f"the drafter of {self.recipe.init}", kind, "one like DFlash")
        return drafter.config, drafter.tensors

    def fit_data(self, network: N, data: TokenData) -> None:
        if self.recipe.draft_vocab is not None:
            kept = frequent_tokens(data, network.config.vocab_size, self.recipe.draft_vocab)
            self.kept = kept.to(network.fc.weight.device)

    @torch.no_grad()
    def fit_head(self, network: N, target: Target) -> None:
        if self.kept is not None:
            self._head = embedding_and_head(target)[1][self.kept].contiguous()
        if self.recipe.init is None:
            calm(network.norm.weight, target)

    def warm_start(self, network: DFlashNetwork, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
        """Load a checkpoint of this kind, or of DFlash v1 into the parameters that DFlash v1 has.

        The block size may differ, and the checkpoint may have fewer layers. Further layers start as the identity.

        Raises:
            ValueError: Anything else differs.
        """
        path, depth = self.recipe.init, config.num_hidden_layers
        for field in fields(config):
            ours, theirs = getattr(network.config, field.name, None), getattr(config, field.name)
            same = math.isclose(ours, theirs) if isinstance(ours, float) and theirs is not None else ours == theirs
            if field.name in ("num_hidden_layers", "layers"):
                same = depth <= network.config.num_hidden_layers and network.config.layers[:depth] == config.layers
            need(
                same or field.name in ("block_size", "max_position_embeddings", *self.free_fields),
                f"{field.name} of {path}",
                theirs,
                f"that of the recipe and target, {ours}; change the recipe, or start without init",
            )
        missing, unknown = network.load_state_dict(tensors, strict=False)
        new = tuple(f"layers.{index}." for index in range(depth, network.config.num_hidden_layers))
        foreign = [*unknown, *(name for name in missing if not self._own(name) and not name.startswith(new))]
        need(not foreign, f"the tensors of {path}", foreign[:5], "those of this drafter; start without init")
        for layer in cast("list[DraftLayer]", list(network.layers)[depth:]):
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def prepare(self, network: N) -> None:
        if self.recipe.checkpoint_activations:
            for layer in network.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def is_quantized(self, name: str) -> bool:
        return name == "fc" or name.startswith("layers.")

    def _own(self, name: str) -> bool:
        return any(part in name for part in self.own_modules)

    @property
    def taught_slots(self) -> int:
        return self.recipe.block_size - self.first_slot

    def hidden(self, network: N, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences) -> Tensor:
        hidden_BANH = self.pass_over_blocks(network, target, hidden_states_BSF, sequences)(0.0)
        return hidden_BANH[:, :, self.first_slot :]

    def pass_over_blocks(
        self, network: N, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences
    ) -> Callable[[Tensor | float], Tensor]:
        """Return a reusable function that runs the layers over all blocks, each an anchor and masks.

        Its argument, `[B, A, N - 1, H]` or a number, is added to the masks' embeddings. It returns `[B, A, N, H]`.
        """
        flex = self.recipe.attention == "flex" or (self.recipe.attention == "auto" and target.device.type == "cuda")
        mask = torch.tensor(network.config.mask_token_id, device=target.device)
        anchors_BA1H = target.embed(sequences.tokens_BAL[:, :, :1]).float()
        masks_BAKH = target.embed(mask).float().expand(*sequences.anchors_BA.shape, network.config.block_size - 1, -1)
        run = draft_pass(
            network, hidden_states_BSF, sequences.documents_BS, sequences.positions_BS, sequences.anchors_BA, flex
        )
        return lambda added: run(torch.cat([anchors_BA1H, masks_BAKH + added], dim=2))

    def logits(self, network: N, target: Target, hidden_CKH: Tensor) -> Tensor:
        if self._head is None:
            return network.adjust_logits(super().logits(network, target, hidden_CKH))
        return network.adjust_logits(F.linear(hidden_CKH.to(self._head.dtype), self._head))

    def losses(self, network: N, slots: Slots) -> dict[str, Tensor]:
        if self.kept is None:
            return super().losses(network, slots)
        plain = partial(super().losses, network)
        return reduced_losses(plain, slots, self.kept, network.config.vocab_size)

    def teacher_logits(self, target: Target, states: Tensor) -> Tensor:
        return super().teacher_logits(target, states) if self._head is None else F.linear(states, self._head)

    def draft_tokens(self, network: N, slots: Slots) -> Tensor:
        tokens = super().draft_tokens(network, slots)
        return tokens if self.kept is None else self.kept[tokens]

    def counts(self, network: N, slots: Slots) -> Mapping[str, Tensor]:
        if self.kept is None:
            return super().counts(network, slots)
        return {"covered": draft_ids(self.kept, network.config.vocab_size)[slots.labels_CK] >= 0}


class DFlashVariant(DFlashFamily[DFlashRecipe, DFlashNetwork]):
    """DFlash v1, without additions."""

    fit_gain = 1.0
    reducible = True


VARIANT = DFlashVariant
