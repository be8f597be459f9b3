"""Draft networks as data: a description of what they compute, and the modules that hold their weights.

A runner of any backend runs every network whose description it knows: `nn/torch_runner.py` with torch's operations,
`kernels/cpu/compiled_runner.py` in C, `kernels/cuda/captured_runner.py` as CUDA graphs. Training runs the network
itself, with the same layers and another source of keys and values, so both pass in an `attend` function. Parameters
have the names of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from blockdraft.nn.layers import GatedMLP, RMSNorm, rotate
from blockdraft.nn.rotary import Rotary


@dataclass(frozen=True)
class DraftLayerKind:
    """Kind of one layer of a draft network.

    Attributes:
        name: Name of its module, a `DraftLayer`.
        causal: Whether a node attends to its ancestors and itself only; otherwise to its whole block.
        window: Sliding window in tokens; None is full attention.
        convolved: Whether convolutions of the module, `attention_conv` and `mlp_conv`, enclose attention and MLP.
    """

    name: str
    causal: bool = True
    window: int | None = None
    convolved: bool = False


@dataclass(frozen=True, kw_only=True)
class DraftDescription:
    """What a draft network computes, for the runners of all backends. Norms and heads are given by their module names.

    The layers read the entry of a token, which is

    - "token": its embedding. Keys and values of committed tokens are made of the target's hidden states, fused by `fc`.
      One pass drafts a block of tokens, all but the first of which are mask tokens.
    - "pair": its normed embedding beside the normed hidden state of the position before, which the first layer's
      attention reads. The hidden state is that of the target, fused by `fc`, or the output of the network for the
      entry before. A pass drafts the token after each node.
    - "joined pair": such a pair, which `fc` joins to the input of the layers. The hidden state is the target's last.

    A network without layers has `heads`, which read the target's last hidden state.

    Attributes:
        layers: Kinds of the layers, in order.
        entry: Kind of the entries.
        fusing_norms: Norms on the target's hidden states before `fc`: one for each target layer, or one for all.
        fused_norm: Norm behind the `fc` that fuses hidden states, or None.
        token_norm, hidden_state_norm: Norms of a pair.
        head: Output head of its own, or None for that of the host.
        tied_head: Whether the rows of an own head are those of the target's head.
        embedding_scale: Factor on the embeddings of entries that are tokens.
        normed_stream: Whether the layers add to the normed hidden state of a pair, instead of the hidden state.
        normed_feedback: Whether the next entry has the hidden state behind the last norm, instead of before it.
        heads: Number of heads, each a sequence of `head_blocks` residual blocks and, unless they share the host's head,
            an output projection.
        head_blocks: Residual blocks of each head.
        packed_decoder: Whether each layer is a `DecoderLayer` of the decoder that `config.decoder` describes. Weights
            of the layers and of `fc` are packed for the target's kernels.
        torch_only: What only the network's own torch modules compute, in words for messages; None is nothing.
    """

    layers: tuple[DraftLayerKind, ...] = ()
    entry: Literal["token", "pair", "joined pair"] = "token"
    fusing_norms: tuple[str, ...] = ()
    fused_norm: str | None = None
    token_norm: str = ""
    hidden_state_norm: str = ""
    head: str | None = None
    tied_head: bool = False
    embedding_scale: float = 1.0
    normed_stream: bool = False
    normed_feedback: bool = False
    heads: int = 0
    head_blocks: int = 0
    packed_decoder: bool = False
    torch_only: str | None = None

    @property
    def has_pairs(self) -> bool:
        """Whether the network drafts node by node, from entries that are pairs."""
        return self.entry != "token"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What a runner must know, in words for messages."""
        named = {
            "heads": self.heads,
            "packed layers of a decoder": self.packed_decoder,
            "pairs": self.has_pairs,
            "whole blocks": any(not kind.causal for kind in self.layers),
            "sliding windows": any(kind.window for kind in self.layers),
            "convolutions": any(kind.convolved for kind in self.layers),
            "several layers of pairs": self.has_pairs and len(self.layers) > 1,
            "contexts without a norm": self.layers and not self.has_pairs and self.fused_norm is None,
        }
        own = () if self.torch_only is None else (self.torch_only,)
        return (*own, *(name for name, has in named.items() if has))

    def why_not(self, known: frozenset[str]) -> str | None:
        """Return why a runner that knows these kinds does not run the network, or None if it does."""
        unknown = [kind for kind in self.kinds if kind not in known]
        return f"it does not know {unknown[0]}" if unknown else None


@dataclass(frozen=True, kw_only=True)
class DraftHost:
    """What a draft network borrows from its target.

    Attributes:
        dtype: Dtype of the target, in which the network computes.
        embed: The target's embedding, tokens `[...]` int64 to `[..., H]`.
        target_head: The target's output projection, hidden states `[..., H]` to logits `[..., V]`.
        own_head: Output projection to use in its place, or None.
        compile_reason: Reason why the network is not compiled, where it might have been; else None.
    """

    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]
    target_head: Callable[[Tensor], Tensor]
    own_head: Callable[[Tensor], Tensor] | None = None
    compile_reason: str | None = None

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Output projection that the network uses."""
        return self.own_head or self.target_head


class DraftNetwork(nn.Module):
    """Base of all draft networks.

    Attributes:
        config: Configuration with at least `hidden_size` and `target_layers`.
        description: What it computes.
        qat_bits: Bits to which the weights were quantized in training, as in `Trained`; None if they were not.
    """

    config: Any
    description: DraftDescription
    qat_bits: int | None = None

    @property
    def like(self) -> Tensor:
        """A weight with the device and dtype of the network."""
        return next(self.parameters())


def shapes_of(make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a new network, which gets no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


# (layer, queries [B, heads, N, D], keys and values of the same nodes [B, kv_heads, N, D]) -> [B, heads, N, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LayeredNetwork(DraftNetwork):
    """Base of draft networks with layers, whose pass follows from the description.

    Attributes:
        fc: Linear layer that fuses hidden states, or joins pairs.
        norm: Norm behind the layers.
        rotary: Rotary embedding of all layers.
    """

    fc: nn.Linear
    norm: RMSNorm
    rotary: Rotary

    def part(self, name: str) -> Any:
        """Return the module of this name."""
        return self.get_submodule(name)

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """Modules of the layers, in order."""
        return [self.part(kind.name) for kind in self.description.layers]

    @property
    def kept(self) -> Tensor:
        """Ids of the tokens that the network can predict, `[Vd]` int64."""
        return torch.arange(self.config.vocab_size, device=self.like.device)

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and size of the heads of a layer's keys, and of its values."""
        heads: tuple[int, int] = self.config.num_key_value_heads, self.config.head_dim
        return heads, heads

    def normed_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the `fc` that fuses hidden states `[..., m * H]` of the target layers."""
        norms = [self.part(name) for name in self.description.fusing_norms]
        if len(norms) < 2:
            return cast(Tensor, norms[0](hidden_states)) if norms else hidden_states
        parts = zip(norms, hidden_states.chunk(len(norms), dim=-1), strict=True)
        return torch.cat([norm(part) for norm, part in parts], dim=-1)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Fuse the hidden states of the target layers, `[..., m * H]`, to `[..., H]`."""
        normed = self.normed_hidden_states(hidden_states)
        if self.description.entry == "joined pair":
            return normed
        fused, norm = self.fc(normed), self.description.fused_norm
        return cast(Tensor, fused if norm is None else self.part(norm)(fused))

    def entries(self, embedded: Tensor, hidden_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input of the layers, and what the first layer's attention reads instead of it normed, if anything.

        Args:
            embedded: `[B, N, H]`, embeddings of the entries' tokens.
            hidden_state: `[B, N, H]`, hidden states of the positions before, for pairs.

        Returns:
            `[B, N, H]`, and `[B, N, 2 * H]` or None.
        """
        described = self.description
        if hidden_state is None:
            scale = described.embedding_scale
            return (embedded if scale == 1 else embedded * scale), None
        first, normed = self.part(described.token_norm)(embedded), self.part(described.hidden_state_norm)(hidden_state)
        pairs = torch.cat([first, normed.to(first.dtype)], dim=-1)
        if described.entry == "joined pair":
            return self.fc(pairs), None
        return (normed if described.normed_stream else hidden_state), pairs

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions `[B, N]`, each `[B, N, D]`."""
        return self.rotary(positions, dtype)

    def through_layers(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        pairs: Tensor | None = None,
        count: int | None = None,
    ) -> Tensor:
        """Run the first `count` layers, or all, on the results of `entries`, given the angles."""
        for index, layer in enumerate(self.draft_layers[:count]):
            x = layer(x, cos, sin, index, attend, None if index else pairs)
        return x

    def forward(
        self, embedded: Tensor, positions: Tensor, attend: Attend, hidden_state: Tensor | None = None
    ) -> Tensor:
        """Return outputs `[B, N, H]` for entries, before the last norm, for `logits` and `fed_on`.

        Args:
            embedded, hidden_state: As in `entries`.
            positions: `[B, N]`, positions of tokens; in pairs, those of the hidden states.
            attend: Attention of a layer's entries to the visible ones, themselves included.
        """
        x, pairs = self.entries(embedded, hidden_state)
        cos, sin = self.angles(positions, x.dtype if pairs is None else pairs.dtype)
        return self.through_layers(x, cos, sin, attend, pairs)

    def keys_values(
        self, embedded: Tensor, hidden_state: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of pairs for the last layer, `[B, heads, N, D]` each.

        Args:
            embedded, hidden_state, positions: As in `forward`.
            attend: Attention of the layers before the last; None if there are none.
        """
        (x, pairs), layers = self.entries(embedded, hidden_state), self.draft_layers
        cos, sin = self.angles(positions, x.dtype if pairs is None else pairs.dtype)
        if attend is not None and len(layers) > 1:
            x, pairs = self.through_layers(x, cos, sin, attend, pairs, len(layers) - 1), None
        last = layers[-1]
        return last.self_attn.keys_values(last.input_layernorm(x) if pairs is None else pairs, cos, sin)

    def fed_on(self, hidden: Tensor) -> Tensor:
        """Return the hidden states `[..., H]` of the next pairs, from outputs `[..., H]`."""
        return cast(Tensor, self.norm(hidden)) if self.description.normed_feedback else hidden

    def logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits `[..., Vd]` of the tokens that the network can predict, from outputs `[..., H]`.

        Args:
            target_head: The target's output projection, for networks without one of their own.
        """
        head = self.description.head
        return cast(Tensor, (target_head if head is None else self.part(head))(self.norm(hidden)))


class DraftAttention(nn.Module):
    """Attention of a draft layer.

    Args:
        config: Sizes of the layer, with the names of `DraftConfig`.
        inputs: Size of the input; None is the hidden size.
        qk_norm: Whether queries and keys are normed.
    """

    def __init__(self, config: Any, inputs: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        size, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        inputs = inputs or size
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=bias)
        self.q_norm: Any
        self.k_norm: Any
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity() for _ in "qk"
        )

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of inputs `[B, N, inputs]`, each `[B, kv_heads, N, D]`."""
        keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(keys), cos, sin).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        queries = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        out = attend(layer, queries.transpose(1, 2), *self.keys_values(x, cos, sin))
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return projected


class DraftLayer(nn.Module):
    """Layer of a draft network. `inputs` and `qk_norm` as in `DraftAttention`."""

    def __init__(self, config: Any, inputs: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, inputs, qk_norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, pairs: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output `[B, N, H]`. Attention reads `pairs`, `[B, N, inputs]`, instead of x normed."""
        x = x + self.self_attn(self.input_layernorm(x) if pairs is None else pairs, cos, sin, layer, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
