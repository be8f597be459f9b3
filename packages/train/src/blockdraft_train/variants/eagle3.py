"""Training of EAGLE-3 (arXiv 2503.01840), unrolled as it drafts ("training-time test").

The k-th step after an anchor reads the network's own hidden states at the k - 1 entries before it; these entries hold
the tokens of the data. Each of them attends to the entries of the sequence up to the anchor, made from the target's
hidden states, and to the unrolled entries of its own chain.

The loss is `forward_kl`, where p is the target's distribution over the draft vocabulary. It counts only where the
data's token is in that vocabulary. Step k has the weight 0.8^(k - 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from blockdraft.drafters.eagle3.network import (
    BLOCK_SIZE,
    DRAFT_VOCAB,
    Eagle3Config,
    Eagle3Network,
    default_target_layers,
)
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, check_fits, read_drafter
from blockdraft.nn.draft_config import need
from blockdraft.nn.layers import RMSNorm
from blockdraft.settings import Amount, Count, Layers, Share, settings
from blockdraft.targets import Target, embedding_and_head
from blockdraft_train.batches import PackedSequences
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.target_layers import chosen_target_layers, target_hidden_states
from blockdraft_train.draft_vocabulary import draft_ids, frequent_tokens, reduced_losses
from blockdraft_train.objectives import Slots
from blockdraft_train.recipe import Recipe
from blockdraft_train.unrolled import unrolled
from blockdraft_train.variant import DerivedValue, Variant
from blockdraft_train.variants.dflash import calm, layer_shape, new_matrices

STEP_WEIGHT = 0.8  # weight of a step relative to the step before
LAST_LAYER = "last_layer"  # value of `init`
MLP = ("gate", "up", "down")
SCALE_TOKENS = 64  # by which the scale of a target layer's hidden states is known


@settings
class Eagle3Recipe(Recipe):
    """Recipe of EAGLE-3.

    Steps, their weights and the size of the draft vocabulary are those of SafeAILab's training code, learning rate and
    clipping those of SpecForge.
    """

    beginnings: ClassVar[tuple[str, ...]] = (LAST_LAYER,)
    block_size: Annotated[int, Field(ge=2)] = Field(
        BLOCK_SIZE,
        description="Tokens of a chain, anchor included; training is unrolled for block_size - 1 steps.",
    )
    objective: Mapping[str, Amount] = field(default_factory=lambda: {"forward_kl": 1.0})
    gamma: Amount | None = round(-1 / math.log(STEP_WEIGHT), 4)
    learning_rate: Amount = 1e-4
    clip: Amount = 0.5
    alone: Share = Field(
        0.0,
        description="Share of the steps, at the start, that teach the first draft token alone, after as many more "
        "anchors.",
    )
    target_layers: Count | Layers | None = Field(
        None,
        description="Target layers that the drafter reads: their number, spread over the target (`3`), or a list of "
        "0-based layers. By default the inputs of the layers 2, T // 2 and T - 3 of a target with T "
        'layers, or, for the `init` "last_layer", the layers (T + 2) // 4, 3 * T // 5 and T - 2, or the '
        "target layers of the `init`.",
    )
    draft_vocab: Count | None = Field(
        None,
        description="Number of tokens that the drafter can propose, the most frequent supervised ones of the data. "
        "None is 32000, or the whole vocabulary if smaller, or that of `init`.",
    )
    intermediate_size: Count | None = Field(
        None,
        description="Inner size of the layer's MLP; by default the target's, or three times its hidden size. A smaller "
        'one begins, with the `init` "last_layer", with the neurons of the largest weights. One that is larger than '
        "that of an `init` gets further neurons of the target's last layer, whose outputs begin at 0.",
    )
    heads: Count | None = Field(None, description="Query heads of the layer; by default the target's.")
    kv_heads: Count | None = Field(None, description="Key/value heads of the layer; by default the target's.")
    head_dim: Count | None = Field(None, description="Size of a head; by default the target's.")
    norm_output: bool | None = Field(
        None,
        description="Whether each step reads the hidden state behind the last norm, instead of a stream that grows "
        "from step to step. By default it does not, or as the `init` does; one that does not can learn to.",
    )
    fc_norm: bool | None = Field(
        None,
        description="Whether each target layer has a norm of its own before they are fused. By default it has none, or "
        "as in the `init`.",
    )
    head: Literal["free", "frozen"] = Field(
        "free",
        description='Output head: "free" learns, from the target\'s rows on; "frozen" keeps them as they are, so that '
        "a compiled drafter can also draft the tokens of a sequence that are outside of its draft vocabulary.",
    )
    init: str | None = Field(
        None,
        description="Folder or GGUF file of an EAGLE-3 drafter of any layout, whose weights training starts from; "
        'or "last_layer", which starts from the target\'s last layer, norm and head. By default training starts from '
        "random weights and the target's head.",
    )


# Recipe fields that decide the network's shape, by the configuration's names for them.
SHAPE = {"target_layers": "target_layers", "draft_vocab_size": "draft_vocab", "intermediate_size": "intermediate_size"}
SHAPE |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
SHAPE |= {name: name for name in ("norm_output", "fc_norm")}


class Eagle3Variant(Variant[Eagle3Recipe, Eagle3Network, Eagle3Config]):
    recipe_class: ClassVar[type[Recipe]] = Eagle3Recipe
    counted = ("covered",)  # positions whose token is in the draft vocabulary
    fit_gain: ClassVar[float | None] = 1.25  # tau of 1.5 for SmolLM2 where DFlash had 1.21, after little training
    reducible = fit_reduced = True
    _head: Tensor | None = None  # the target's, of the draft vocabulary, [Vd, H]
    _width: int | None = None  # intermediate size of the drafter of `init`

    @classmethod
    def fit_fields(cls, layers: int, hidden_size: int, narrow: bool = False) -> dict[str, Any]:
        start = {"init": LAST_LAYER, "target_layers": target_layers_with_the_last(layers), "alone": 0.6}
        start |= {"intermediate_size": max(2 * hidden_size // 3 // 128, 1) * 128} if narrow else {}
        return {"layers": None, "objective": {"forward_kl": 1.0}, "block_size": 6, **start}

    @classmethod
    def layout(cls, recipe: Eagle3Recipe, target: Target) -> str | None:
        with suppress(UsageError):  # `defaults` reports it
            # The usual layout cannot describe norms on queries and keys, which the last layers of some targets have.
            return "eagle3_speculators" if cls(recipe).config(target).qk_norm else None
        return None

    def defaults(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, DerivedValue]:
        with complaints.noting():
            config = self.config(target)
            return {name: DerivedValue(getattr(config, field)) for field, name in SHAPE.items()}
        return {}

    def config(self, target: Target) -> Eagle3Config:
        return self.new_config(target) if self.recipe.init in (None, LAST_LAYER) else self._config_of_init(target)

    def new_config(self, target: Target) -> Eagle3Config:
        recipe, layers, own = self.recipe, target.num_layers, dict[str, Any]()
        target_layers = (
            self.usual_target_layers(layers)
            if recipe.target_layers is None
            else chosen_target_layers(recipe.target_layers, layers)
        )
        if recipe.init == LAST_LAYER:
            own = last_layer_fields(target, recipe, target_layers)
        return Eagle3Config(
            **own,
            **layer_shape(recipe, target),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=recipe.draft_vocab or min(DRAFT_VOCAB, target.vocab_size),
            target_layers=target_layers,
            num_target_layers=layers,
            block_size=recipe.block_size,
            max_position_embeddings=target.max_context,
            norm_output=bool(recipe.norm_output),
            fc_norm=bool(recipe.fc_norm),
            tied_head=recipe.head == "frozen",
        )

    def usual_target_layers(self, layers: int) -> tuple[int, ...]:
        """Return the default target layers for a target with this number of layers."""
        if self.recipe.init == LAST_LAYER:
            return target_layers_with_the_last(layers)
        return default_target_layers(layers) if layers >= 7 else chosen_target_layers(min(3, layers), layers)

    def _config_of_init(self, target: Target) -> Eagle3Config:
        config: Eagle3Config = self._init(target.num_layers).config
        check_fits(config, hidden_size=target.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size)
        width = self.recipe.intermediate_size or config.intermediate_size
        if width > config.intermediate_size:
            most = last_layer(target)["mlp.gate_proj.weight"].size(0)
            need(
                width <= most, "intermediate_size", width, f"at most the target's, {most}, to widen {self.recipe.init}"
            )
            config = replace(config, intermediate_size=width)
        if self.recipe.norm_output:  # needs no weights of its own
            config = replace(config, norm_output=True)
        for field_name, name in SHAPE.items():
            ours, theirs = getattr(self.recipe, name), getattr(config, field_name)
            same = ours is None or ours == theirs
            need(same, f"{name} of {self.recipe.init}", theirs, f"that of the recipe, {ours}; leave that out")
        frozen = self.recipe.head == "frozen"
        need(config.tied_head or not frozen, "head", "frozen", f"free, since that of {self.recipe.init} has learned")
        return replace(config, block_size=self.recipe.block_size, tied_head=frozen)

    def _init(self, num_target_layers: int) -> Checkpoint:
        assert self.recipe.init is not None
        drafter = read_drafter(self.recipe.init, None, num_target_layers)
        kind = type(drafter.config).__name__
        need(type(drafter.config) is Eagle3Config, f"the drafter of {self.recipe.init}", kind, "an EAGLE-3 drafter")
        return drafter

    def new_network(self, config: Eagle3Config, vocabulary: Mapping[str, int] | None) -> Eagle3Network:
        network = Eagle3Network(config)
        if self.recipe.init in (None, LAST_LAYER):
            new_matrices(network)
            return network
        tensors = dict(self._init(config.num_target_layers).tensors)
        self._width = tensors["midlayer.mlp.gate_proj.weight"].size(0)
        added = config.intermediate_size - self._width
        for name, padding in zip(MLP, ((0, 0, 0, added), (0, 0, 0, added), (0, added)), strict=True):
            weight = f"midlayer.mlp.{name}_proj.weight"
            tensors[weight] = F.pad(tensors[weight], padding)
        network.load_state_dict(tensors)
        return network

    def fit_data(self, network: Eagle3Network, data: TokenData) -> None:
        if self.recipe.init in (None, LAST_LAYER):
            tokens = frequent_tokens(data, network.config.vocab_size, network.config.draft_vocab_size)
            network.keep(tokens.to(network.d2t.device))

    @torch.no_grad()
    def fit_head(self, network: Eagle3Network, target: Target) -> None:
        self._head = embedding_and_head(target)[1][network.kept].contiguous()
        if self.recipe.init in (None, LAST_LAYER):
            network.lm_head.weight.copy_(self._head)
        if self.recipe.init is None:
            calm(network.norm.weight, target)
        if self.recipe.init == LAST_LAYER:
            take_last_layer(network, target)
        if self._width is not None:
            widen(network, target, self._width)
        if self.recipe.head == "frozen":
            network.lm_head.weight.requires_grad_(False)

    @property
    def alone(self) -> float:
        return self.recipe.alone

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        return super().is_matrix(name, parameter) and name != "lm_head.weight"

    def is_quantized(self, name: str) -> bool:
        return True

    def hidden(
        self, network: Eagle3Network, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences
    ) -> Tensor:
        return unrolled(network, target, hidden_states_BSF, sequences)

    def logits(self, network: Eagle3Network, target: Target, hidden_CKH: Tensor) -> Tensor:
        return network.logits(hidden_CKH, target.head)  # over the draft vocabulary

    def losses(self, network: Eagle3Network, slots: Slots) -> dict[str, Tensor]:
        plain = partial(super().losses, network)
        return reduced_losses(plain, slots, network.kept, network.config.vocab_size)

    def teacher_logits(self, target: Target, states: Tensor) -> Tensor:
        assert self._head is not None
        return F.linear(states.to(self._head.dtype), self._head)

    def draft_tokens(self, network: Eagle3Network, slots: Slots) -> Tensor:
        return network.kept[slots.logits_CKV.argmax(dim=-1)]

    def counts(self, network: Eagle3Network, slots: Slots) -> Mapping[str, Tensor]:
        return {"covered": draft_ids(network.kept, network.config.vocab_size)[slots.labels_CK] >= 0}


def target_layers_with_the_last(layers: int) -> tuple[int, ...]:
    """Return default target layers that end with the input of the target's last layer."""
    last = max(layers - 2, 0)
    return tuple(sorted({min((layers + 2) // 4, last), min(3 * layers // 5, last), last}))


def last_layer(target: Target) -> dict[str, Tensor]:
    """Return the weights of the target's last layer, by their names inside it."""
    beginning = f".layers.{target.num_layers - 1}."
    return {name.partition(beginning)[2]: weight for name, weight in target.weights_in(beginning).items()}


def last_layer_fields(target: Target, recipe: Eagle3Recipe, target_layers: tuple[int, ...]) -> dict[str, bool]:
    """Return the fields of a drafter whose layer can take the weights of the target's last one.

    Raises:
        UsageError: The drafter's layer computes something else, or does not read what this layer reads.
    """
    norms, before = ("input_layernorm", "post_attention_layernorm"), target.num_layers - 2
    usual = {f"{name}.weight" for name in norms}
    usual |= {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {f"mlp.{name}_proj.weight" for name in MLP}
    head_norms = {f"self_attn.{name}_norm.weight" for name in "qk"}
    biases = {f"self_attn.{name}_proj.bias" for name in "qkv"}
    names = set(last_layer(target))
    own = {"qk_norm": head_norms <= names}
    need(
        names - head_norms - biases == usual, "the target's last layer", sorted(names), "of the kind of Llama's layers"
    )
    need(target.architecture.get("hidden_act", "silu") == "silu", "hidden_act of the target", "another", "silu")
    need(
        target_layers[-1] == before,
        "the last target layer",
        target_layers[-1],
        f"{before}, the last layer's input, for --init {LAST_LAYER}",
    )
    for theirs_name, name in SHAPE.items():
        ours, theirs = getattr(recipe, name), target.shape.get(theirs_name)
        fits = theirs is None or ours in (None, theirs) or (name == "intermediate_size" and ours < theirs)
        need(fits, name, ours, f"the target's, {theirs}, with --init {LAST_LAYER}")
    return own


@torch.no_grad()
def take_last_layer(network: Eagle3Network, target: Target) -> None:
    """Initialize the network to compute the target's last layer, norm and head on the last target layer's hidden state.

    `fc` passes this hidden state alone, and attention ignores the embedding. Biases of Qwen2 are left out, since
    llama.cpp reads no drafters with biases, and the last layer hardly needs them. So the network starts by predicting
    the same token as the target, with hidden states that the head understands, and learns to read the token.
    """
    layer, size = network.midlayer, network.config.hidden_size
    weights = {name: weight for name, weight in last_layer(target).items() if not name.endswith(".bias")}
    neurons = strongest_neurons(weights, network.config.intermediate_size)
    for name in ("gate", "up"):
        weights[f"mlp.{name}_proj.weight"] = weights[f"mlp.{name}_proj.weight"][neurons]
    weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"][:, neurons]
    for name, weight in weights.items():
        if name == "input_layernorm.weight":
            layer.hidden_norm.weight.copy_(weight)
        elif name.removeprefix("self_attn.") in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            both = layer.get_parameter(name)  # columns of the embedding, then of the hidden state
            both[:, :size] = 0
            both[:, size:] = weight
        else:
            layer.get_parameter(name).copy_(weight)
    network.norm.weight.copy_(target.weights_in("model.norm.weight")["model.norm.weight"])
    network.fc.weight.zero_()
    network.fc.weight[:, -size:] = torch.eye(size)
    if network.config.fc_norm:
        norms = cast("list[RMSNorm]", list(network.fc_norm))
        for norm, scale in zip(norms, layer_scales(network, target), strict=True):
            norm.weight.fill_(scale)


@torch.no_grad()
def widen(network: Eagle3Network, target: Target, width: int) -> None:
    """Give the MLP's neurons from `width` on the inputs of the target's last layer, the strongest that are left.

    Their outputs are 0, so the network computes the same as before. A drafter that began as the last layer has the
    `width` strongest neurons already.
    """
    size = network.config.intermediate_size
    if width < size:
        weights, mlp = last_layer(target), network.midlayer.mlp
        new = strongest_neurons(weights, size)
        new = new[~torch.isin(new, strongest_neurons(weights, width))]
        for name in ("gate_proj", "up_proj"):
            mlp.get_submodule(name).get_parameter("weight")[width:] = weights[f"mlp.{name}.weight"][new]


def layer_scales(network: Eagle3Network, target: Target) -> list[float]:
    """Return the usual root mean square of each target layer's hidden states, which a norm before `fc` then keeps.

    It is the median over some tokens of the draft vocabulary, since those of a first token are far larger.
    """
    layers, tokens = network.config.target_layers, network.kept[:SCALE_TOKENS].cpu()
    [hidden_states] = target_hidden_states(target, layers, [tokens])
    squares = hidden_states.float().unflatten(1, (len(layers), -1)).square()
    scales: list[float] = squares.mean(dim=2).sqrt().median(dim=0).values.tolist()
    return scales


def strongest_neurons(layer: Mapping[str, Tensor], count: int) -> Tensor:
    """Return the neurons of a layer's MLP with the largest products of the norms of their weights, ascending."""
    norms = [layer[f"mlp.{name}_proj.weight"].float().norm(dim=dim) for name, dim in zip(MLP, (1, 1, 0), strict=True)]
    return torch.stack(norms).prod(dim=0).topk(count).indices.sort().values


VARIANT = Eagle3Variant
