"""Shapes of decoders, independent of the names in a family's configuration, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import ClassVar

# Tensors of the embeddings that each layer of Gemma 4 adds.
LAYER_INPUT_TABLE = "model.embed_tokens_per_layer.weight"
LAYER_INPUT_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_INPUT_NORM = "model.per_layer_projection_norm.weight"
GATES = ("router", "shared_gate", "delta_gates")  # projections that only weigh what others compute


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings.

    Attributes:
        inverse_frequencies: Radians per position, one for each pair of channels.
        scale: Factor on cosine and sine.
    """

    inverse_frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class LayerKind:
    """Differences between the layers of one decoder."""

    rope: Rope
    window: int | None = None  # sliding window in tokens; None is full attention
    routed: bool = False  # the decoder's `experts` are its MLP
    recurrent: bool = False  # the decoder's `recurrent_net` replaces attention; rope and window are unused
    convolved: bool = False  # a short convolution replaces attention; rope and window are unused
    has_mixer: bool = True  # else the layer is an MLP alone
    has_mlp: bool = True  # else it is attention, or what replaces it, alone
    # Values of one layer that differ from the decoder's.
    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    # In `mixed` decoders:
    keys_of: int | None = None  # the earlier layer whose keys and values this one uses; None is its own
    values_are_keys: bool = False  # values are the keys before their norm and rotation

    @property
    def attends(self) -> bool:
        return self.has_mixer and not (self.recurrent or self.convolved)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: MLPs of which a router chooses several for each token."""

    count: int
    chosen: int
    intermediate_size: int
    normed: bool  # shares of the chosen ones sum to one
    shared_size: int = 0  # inner size of a further expert, which all tokens use; 0 is none
    gates_shared: bool = True  # the shared expert has a gate
    # Shares are sigmoids of scores, and a bias of each expert counts in the choice; else they are softmaxes.
    sigmoid: bool = False
    scale: float = 1.0  # factor on the shares
    # Experts of a token come from so many of the groups of neighbours, those whose `group_best` best ones sum to most.
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    biased: bool = False  # router and experts have biases
    # The shared expert has no gate. Shared expert, router and experts have norms of their own, in `mixed` decoders.
    beside: bool = False
    fused: bool = False  # one matrix of each expert holds gate and up projection


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation `(up + 1) * gate * sigmoid(alpha * gate)` of gpt-oss.

    Gates above `limit` are clamped to it, and the absolute values of `up`, too.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class LatentAttention:
    """Attention to vectors that hold the keys and values of all heads of a token (MLA, arXiv 2405.04434).

    The vector of a token is normed, and followed by channels that are rotated: the key of a single key/value head. The
    vector alone is its value. A head's query is multiplied by what would project the vector to a key of its own, and
    its output by what would project it to a value.
    """

    rank: int  # size of the vectors
    rotated: int  # rotated channels of a query, which come last
    unrotated: int  # other channels of a query
    value_dim: int  # values of a head
    query_rank: int = 0  # size of the vector that queries are projected from, normed; 0 projects from the layer's input
    norm_eps: float = 1e-6  # of the norms of both vectors

    @property
    def query_dim(self) -> int:
        return self.unrotated + self.rotated

    @property
    def key_dim(self) -> int:
        return self.rank + self.rotated


@dataclass(frozen=True)
class RecurrentNet:
    """What replaces attention in recurrent layers.

    A layer has a short convolution along the sequence, and for each value head a state `[key_dim, value_dim]` that
    decays with each token, which adds the product of a key and a value to it. The state is read by a query.
    """

    key_heads: int
    value_heads: int  # a multiple of `key_heads`
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution reads, the token itself included

    @property
    def values(self) -> int:
        """Number of outputs of the states per token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values


@dataclass(frozen=True)
class DeltaNet(RecurrentNet):
    """Gated delta nets (arXiv 2412.06464), which correct what the state holds for the key of a token."""

    place = "linear_attn"  # in names of tensors
    tiled: bool = False  # value heads that share a key head are `key_heads` apart, instead of side by side
    joint_gates: bool = False  # one matrix holds both gates

    @property
    def inputs(self) -> dict[str, int]:
        """Number of outputs of the projections of a layer's input: channels of the convolution, gate of the output."""
        return {"in_proj_qkv": self.channels, "in_proj_z": self.values}

    @property
    def gates(self) -> dict[str, int]:
        """Number of outputs of the projections to shares of the corrections and decays of the states."""
        heads = self.value_heads
        return {"in_proj_ba": 2 * heads} if self.joint_gates else {"in_proj_b": heads, "in_proj_a": heads}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors."""
        heads = (self.value_heads,)
        shapes = {"conv1d.weight": (self.channels, 1, self.kernel), "A_log": heads, "dt_bias": heads}
        return {**shapes, "norm.weight": (self.value_dim,)}


@dataclass(frozen=True)
class Mamba2(RecurrentNet):
    """Mamba-2 (arXiv 2405.21060), whose groups of B and C are key heads, and whose step sizes are shares."""

    place = "mamba"
    tiled = False
    joint_gates = False
    gates: ClassVar[Mapping[str, int]] = {}  # step sizes are projected with the other inputs

    @property
    def inputs(self) -> dict[str, int]:
        """Number of outputs of the projection: gate of the output, values, keys and queries, step sizes."""
        return {"in_proj": self.values + self.channels + self.value_heads}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors."""
        heads, channels = (self.value_heads,), (self.channels,)
        shapes = {"conv1d.weight": (*channels, 1, self.kernel), "A_log": heads, "dt_bias": heads}
        return {**shapes, "norm.weight": (self.values,), "conv1d.bias": channels, "D": heads}


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]
    norm_eps: float
    activation: str  # a key of `nn.decoder_layer.ACTIVATIONS`
    query_scale: float  # factor on the scores of attention
    tied_head: bool  # whether the head is the embedding table
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    sinks: bool = False  # softmax of attention has a further score for each head, without a key and a value
    qk_norm: bool = False  # RMS norms of each head's query and key, before they are rotated
    joint_qk_norm: bool = False  # with `qk_norm`, one norm spans the queries of all heads, another one all keys
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    pre_norms: bool = True  # inputs of attention and MLP are normed
    post_norms: bool = False  # outputs of attention and MLP are normed
    embedding_scale: float = 1.0  # factor on the embeddings before the first layer
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP before they are added
    logit_scale: float = 1.0  # factor on the logits
    attention_softcap: float | None = None  # c in c * tanh(scores / c); None is no cap
    final_softcap: float | None = None  # the same for the logits
    experts: Experts | None = None  # MLP of `routed` layers
    clamped: ClampedSwiGLU | None = None  # replaces `activation`
    gated_mlp: bool = True  # else MLPs and experts have no gate projection
    latent: LatentAttention | None = None  # attention of all layers; `head_dim` is the size of its keys
    recurrent_net: DeltaNet | Mamba2 | None = None  # replaces attention in `recurrent` layers
    mixed: bool = False  # layers are those of `nn.mixed_layer`
    layer_input_size: int = 0  # size of each layer's own embedding of a token, in `mixed` decoders; 0 is none
    layer_input_vocab: int = 0  # tokens in the table of these embeddings
    conv_kernel: int = 0  # tokens that the short convolutions of `convolved` layers read, the token itself included
    gated: bool = False  # attention's output has an elementwise gate, which is projected together with the query
    fused_names: bool = False  # the checkpoint has one matrix for q, k and v, and one for gate and up
    renamed: tuple[tuple[str, str], ...] = ()  # parts of Llama's tensor names, and what the checkpoint has for them

    @property
    def decode_only(self) -> str | None:
        """Name of a part that can be decoded with but not quantized, or None."""
        return "layers of several shapes" if self.mixed else None

    @property
    def unusual(self) -> str | None:
        """Name of a part that CUDA graphs, JAX and writers of other formats do not know, or None."""
        parts = {
            "routed experts": self.experts,
            "short convolutions": self.conv_kernel,
            "layers of several shapes": self.mixed,
            "latent attention": self.latent,
            "recurrent layers": self.recurrent_net,
        }
        return next((name for name, part in parts.items() if part), None)

    @cached_property
    def gates(self) -> frozenset[str]:
        """Names of matrices that stay unquantized: routers, and gates of shared experts and delta nets.

        They are small and lose much.
        """
        layers = map(self.projections, range(len(self.layers)))
        parts = (name for layer in layers for gate in GATES for name, _ in layer.get(gate, ()))
        return frozenset(f"{name}.weight" for name in parts)

    def head_dim_of(self, layer: int) -> int:
        return self.layers[layer].head_dim or self.head_dim

    @property
    def head_divisor(self) -> int:
        """The greatest common divisor of the sizes of heads, those of recurrent layers included."""
        net, latent = self.recurrent_net, self.latent
        others: tuple[int, ...] = () if net is None else (net.key_dim, net.value_dim)
        if latent is not None:  # parts of products begin at multiples of these
            others = (latent.rank, latent.value_dim, self.latent_queries)
        return gcd(*map(self.head_dim_of, range(len(self.layers))), *others)

    @property
    def latent_queries(self) -> int:
        """Size of what a layer's input is projected to for queries, with latent attention."""
        assert self.latent is not None
        return self.latent.query_rank or self.num_heads * self.latent.query_dim

    @property
    def stored_per_head(self) -> int:
        """Number of vectors that are kept of a token for each key/value head: key and value, or both as one."""
        return 2 if self.latent is None else 1

    def kv_heads_of(self, layer: int) -> int:
        return self.layers[layer].num_kv_heads or self.num_kv_heads

    @cached_property
    def memories(self) -> dict[tuple[int, int], list[int]]:
        """Layers with keys and values of their own, by number of key/value heads and size of a head."""
        memories: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(self.layers):
            if kind.attends and kind.keys_of is None:
                memories.setdefault((self.kv_heads_of(number), self.head_dim_of(number)), []).append(number)
        return memories

    @cached_property
    def attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return sum(kind.attends for kind in self.layers)

    @cached_property
    def recurrent_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return sum(kind.recurrent for kind in self.layers)

    @cached_property
    def convolved_layers(self) -> int:
        """Number of layers with a short convolution."""
        return sum(kind.convolved for kind in self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of the different attention masks, in the order of `Decoder.forward`."""
        return tuple(dict.fromkeys(kind.window for kind in self.layers))

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        return tuple(dict.fromkeys(kind.rope for kind in self.layers))

    @property
    def rotated(self) -> int:
        """Number of channels of a head that are rotated, which come first."""
        return 2 * len(self.layers[0].rope.inverse_frequencies)

    def spelled(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that has this name in Llama's."""
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return name

    @property
    def last_norm(self) -> str:
        """Name of the norm before the head."""
        return self.spelled("model.norm.weight")

    def projections(self, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return the matrices that are fused into each projection of a layer.

        Each has a name without `.weight` or `.bias`, and a number of outputs.
        """
        prefix = f"model.layers.{layer}."
        kind, head_dim = self.layers[layer], self.head_dim_of(layer)
        keys = self.kv_heads_of(layer) * head_dim
        queries = self.num_heads * head_dim * (2 if self.gated else 1)
        place, output, inputs = "self_attn", "o_proj", {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if self.fused_names:
            inputs = {"qkv_proj": queries + 2 * keys}
        if kind.keys_of is not None:
            inputs = {"q_proj": queries}
        elif kind.values_are_keys:
            inputs = {"q_proj": queries, "k_proj": keys}
        latent = self.latent
        if latent is not None:
            inputs = {"q_a_proj" if latent.query_rank else "q_proj": self.latent_queries}
            inputs |= {"kv_a_proj_with_mqa": latent.key_dim}
        net = self.recurrent_net_of(layer)
        if net is not None:
            place, output, inputs = net.place, "out_proj", net.inputs
        if self.layers[layer].convolved:  # two gates, of the convolution's input and output, and its input
            place, output, inputs = "conv", "out_proj", {"in_proj": 3 * self.hidden_size}
        fused: dict[str, tuple[tuple[str, int], ...]] = {}
        if kind.has_mixer:
            fused["qkv"] = tuple((f"{prefix}{place}.{name}", outputs) for name, outputs in inputs.items())
            fused["output"] = ((f"{prefix}{place}.{output}", self.hidden_size),)
        if latent is not None:
            if latent.query_rank:
                fused["queries"] = ((f"{prefix}{place}.q_b_proj", self.num_heads * latent.query_dim),)
            fused["absorbed_keys"] = ((f"{prefix}{place}.k_b_proj", self.num_heads * latent.rank),)
            fused["values"] = ((f"{prefix}{place}.v_b_proj", self.num_heads * latent.value_dim),)
        if net is not None and net.gates:  # files hold them with more bits than the others
            gates = net.gates.items()
            fused["delta_gates"] = tuple((f"{prefix}{place}.{name}", outputs) for name, outputs in gates)
        if kind.has_mlp:
            fused |= self._mlp_projections(layer)
        if self.layer_input_size:
            fused["input_gate"] = ((f"{prefix}per_layer_input_gate", self.layer_input_size),)
            fused["input_projection"] = ((f"{prefix}per_layer_projection", self.hidden_size),)
        return {
            projection: tuple((self.spelled(name), outputs) for name, outputs in parts)
            for projection, parts in fused.items()
        }

    def _mlp_projections(self, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
        prefix, fused = f"model.layers.{layer}.", dict[str, tuple[tuple[str, int], ...]]()
        experts = self.experts_of(layer)
        beside = experts is not None and experts.beside
        if experts is not None:
            fused["router"] = ((f"{prefix}{'router.proj' if beside else 'mlp.gate'}", experts.count),)
        inner, place = self.inner_size(layer), prefix if beside else f"{prefix}mlp."
        mlps = [f"{place}experts.{i}" for i in range(experts.count)] if experts else [f"{prefix}mlp"]
        one_name = self.fused_names if experts is None else experts.fused
        names = ("gate_proj", "up_proj") if self.gated_mlp else ("up_proj",)
        parts = {"gate_up_proj": 2 * inner} if one_name else dict.fromkeys(names, inner)
        fused["gate_up"] = tuple((f"{mlp}.{name}", size) for mlp in mlps for name, size in parts.items())
        fused["down"] = tuple((f"{mlp}.down_proj", self.hidden_size) for mlp in mlps)
        if experts is not None and experts.shared_size:
            shared = f"{prefix}mlp" if beside else f"{prefix}mlp.shared_expert"
            fused["shared_gate_up"] = tuple((f"{shared}.{name}", experts.shared_size) for name in names)
            fused["shared_down"] = ((f"{shared}.down_proj", self.hidden_size),)
            if experts.gates_shared and not beside:
                fused["shared_gate"] = ((f"{shared}_gate", 1),)
        return fused

    def experts_of(self, layer: int) -> Experts | None:
        return self.experts if self.layers[layer].routed else None

    def recurrent_net_of(self, layer: int) -> DeltaNet | Mamba2 | None:
        return self.recurrent_net if self.layers[layer].recurrent else None

    def inner_size(self, layer: int) -> int:
        """Return the inner size of a layer's MLP, or of each of its experts."""
        experts = self.experts_of(layer)
        return self.dense_inner_size(layer) if experts is None else experts.intermediate_size

    def dense_inner_size(self, layer: int) -> int:
        """Return the inner size of a layer's MLP without routed experts."""
        return self.layers[layer].intermediate_size or self.intermediate_size

    def products(self) -> list[list[str]]:
        """Return the names of all matrices, grouped by product, in the order of their outputs."""
        tables = ["model.embed_tokens.weight"] if self.tied_head else ["model.embed_tokens.weight", "lm_head.weight"]
        fused = (parts for layer in range(len(self.layers)) for parts in self.projections(layer).values())
        if self.layer_input_size:
            tables += [LAYER_INPUT_TABLE, LAYER_INPUT_PROJECTION]
        return [*([table] for table in tables), *([f"{name}.weight" for name, _ in parts] for parts in fused)]

    def has_bias(self, layer: int, projection: str) -> bool:
        attends = self.layers[layer].attends
        known = {"qkv": self.qkv_bias and attends, "output": self.output_bias and attends}
        experts = self.experts_of(layer)
        return known.get(projection, self.mlp_bias if experts is None else experts.biased)

    def sinks_of(self, layer: int) -> str | None:
        """Return the name of a layer's attention sinks, or None if it has none."""
        return f"model.layers.{layer}.self_attn.sinks" if self.sinks and self.layers[layer].attends else None

    def norms(self, layer: int) -> dict[str, str]:
        """Return the names of a layer's norms by role.

        The roles are before attention and MLP, after them, and of queries and keys.
        """
        prefix = f"model.layers.{layer}."
        names = {}
        kind = self.layers[layer]
        if not (kind.has_mixer and kind.has_mlp):
            names = {"before_attention" if kind.has_mixer else "before_mlp": "input_layernorm"}
        elif self.pre_norms:
            before_mlp = "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"
            names = {"before_attention": "input_layernorm", "before_mlp": before_mlp}
        if self.post_norms:
            names |= {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
        if self.qk_norm and kind.attends:
            names |= {"query": "self_attn.q_norm"}
            names |= {"key": "self_attn.k_norm"} if kind.keys_of is None else {}
        if self.latent is not None:
            names |= {"query_vector": "self_attn.q_a_layernorm"} if self.latent.query_rank else {}
            names |= {"key_vector": "self_attn.kv_a_layernorm"}
        experts = self.experts_of(layer)
        if experts is not None and experts.beside:
            names |= {
                "before_experts": "pre_feedforward_layernorm_2",
                "after_shared": "post_feedforward_layernorm_1",
                "after_experts": "post_feedforward_layernorm_2",
            }
        if self.layer_input_size:
            names["after_input"] = "post_per_layer_input_norm"
        return {role: self.spelled(f"{prefix}{name}.weight") for role, name in names.items()}

    def other_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of a layer's tensors that are neither norms nor parts of projections.

        Those of a recurrent net come first, in the order of its `tensors`.
        """
        net, experts, prefix = self.recurrent_net_of(layer), self.experts_of(layer), f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {}
        if net is not None:
            shapes |= {f"{prefix}{net.place}.{name}": shape for name, shape in net.tensors.items()}
        if self.layers[layer].convolved:
            shapes[f"{prefix}conv.conv.weight"] = (self.hidden_size, 1, self.conv_kernel)
        if (sinks := self.sinks_of(layer)) is not None:
            shapes[sinks] = (self.num_heads,)
        if experts is not None and experts.sigmoid:
            shapes[self.spelled(f"{prefix}mlp.expert_bias")] = (experts.count,)
        if experts is not None and experts.beside:
            shapes[f"{prefix}router.scale"] = (self.hidden_size,)
            shapes[f"{prefix}router.per_expert_scale"] = (experts.count,)
        if self.mixed:
            shapes[f"{prefix}layer_scalar"] = (1,)
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all tensors of a checkpoint."""
        table = self.vocab_size, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        if not self.tied_head:
            shapes["lm_head.weight"] = table
        if self.layer_input_size:
            width = len(self.layers) * self.layer_input_size
            shapes[LAYER_INPUT_TABLE] = (self.layer_input_vocab, width)
            shapes[LAYER_INPUT_PROJECTION] = (width, self.hidden_size)
            shapes[LAYER_INPUT_NORM] = (self.layer_input_size,)
        for layer in range(len(self.layers)):
            net, head_dim = self.recurrent_net_of(layer), self.head_dim_of(layer)
            attended = self.num_heads * head_dim if net is None else net.values
            if self.layers[layer].convolved:
                attended = self.hidden_size
            latent = self.latent
            if latent is not None:
                attended = self.num_heads * latent.value_dim
            for projection, parts in self.projections(layer).items():
                inner = {"down": self.inner_size(layer), "shared_down": self.experts.shared_size if self.experts else 0}
                inner["input_projection"] = self.layer_input_size
                if latent is not None:  # those of one head
                    inner |= {"queries": latent.query_rank, "absorbed_keys": latent.unrotated, "values": latent.rank}
                inputs = {"output": attended, **inner}.get(projection, self.hidden_size)
                for name, outputs in parts:
                    shapes[f"{name}.weight"] = (outputs, inputs)
                    if self.has_bias(layer, projection):
                        shapes[f"{name}.bias"] = (outputs,)
            normed = {"query": head_dim, "key": head_dim}
            if self.joint_qk_norm:
                normed = {"query": self.num_heads * head_dim, "key": self.kv_heads_of(layer) * head_dim}
            if latent is not None:
                normed = {"query_vector": latent.query_rank, "key_vector": latent.rank}
            shapes |= {name: (normed.get(role, self.hidden_size),) for role, name in self.norms(layer).items()}
            shapes |= self.other_tensors(layer)
        shapes[self.last_norm] = (self.hidden_size,)
        return shapes
