"""A layer of the decoder, its norms and its mixture of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.attention import EXACT_NODES, ExactAttention, attend_grouped
from blockdraft.nn.cache import write_nodes
from blockdraft.nn.decoder_config import ClampedSwiGLU, DecoderConfig, Experts, Mamba2
from blockdraft.nn.packed import DeviceWeight, PackedLinear, PackedWeight
from blockdraft.nn.quantization import QuantizedWeight, concatenate_weights
from blockdraft.nn.recurrent_mixer import DeltaRecurrence, GatedDeltaNet, Mamba2Mixer
from blockdraft.nn.short_convolution import ConvolutionMemory, ShortConvolution

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def clamped_swiglu(gate: Tensor, up: Tensor, limits: ClampedSwiGLU) -> Tensor:
    gate, up = gate.clamp(max=limits.limit), up.clamp(-limits.limit, limits.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * limits.alpha))


# Reads a checkpoint's tensor by its name, on the device and in the dtype of the network, or quantized.
Read: TypeAlias = Callable[[str], Tensor | QuantizedWeight]
# Reads the weights of one product by their names, concatenated along the output dimension.
ReadFused: TypeAlias = Callable[[Sequence[str]], Tensor | QuantizedWeight | DeviceWeight | PackedWeight]
# Memory of a layer: keys and values, its recurrence, the inputs of its short convolution, or None for an MLP alone.
Memory: TypeAlias = Tensor | DeltaRecurrence | ConvolutionMemory | None
# Calls a layer with the arguments of `DecoderLayer.forward`.
RunLayer: TypeAlias = Callable[..., Tensor]
MIN_SHARES = 1e-6  # added to sums of sigmoid shares to avoid division by zero


class Norm(nn.Module):
    """RMS norm over the last dimension (arXiv 1910.07467), for one tensor or several kinds of heads at once.

    Args:
        config: Configuration with epsilon, and whether one is added to the weights.
        given: Weights of the checkpoint, `[size]` each.
        heads: Number of heads of each weight; empty for one weight without a dimension of heads.
    """

    def __init__(self, config: DecoderConfig, given: Sequence[Tensor], heads: Sequence[int] = ()) -> None:
        super().__init__()
        self.given = given
        weights = [weight.float() + 1 if config.norm_plus_one else weight for weight in given]
        if heads:
            weights = [weight.expand(count, -1) for weight, count in zip(weights, heads, strict=True)]
        self.weight: Tensor
        self.register_buffer("weight", torch.cat(weights))
        self.eps: Tensor
        self.register_buffer("eps", torch.tensor(config.norm_eps, device=self.weight.device))

    def scale(self, x: Tensor) -> Tensor:
        """Return the factor `[..., 1]` float32 that norms x `[..., size]`, in half of the operations of `F.rms_norm`.

        On a CPU, an operation costs more than its arithmetic.
        """
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(self.eps, size, size, value=1 / x.size(-1)).rsqrt_()

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale(x)).mul_(self.weight).to(x.dtype)


def plain(weight: Tensor | QuantizedWeight) -> Tensor:
    assert isinstance(weight, Tensor), "only matrices are quantized"
    return weight


def joined(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """Concatenate weights along the output dimension. Either all are quantized, or none."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    assert not quantized or len(quantized) == len(weights), (
        "weights of one product are all quantized or all unquantized"
    )
    if len(weights) == 1:
        return weights[0]
    return concatenate_weights(quantized) if quantized else torch.cat([plain(weight) for weight in weights])


def joining(read: Read) -> ReadFused:
    return lambda names: joined([read(name) for name in names])


class DecoderLayer(nn.Module):
    """A layer of `Decoder`.

    Attributes:
        given: Weights of the norms in the checkpoint, by role.
        others: Tensors of `DecoderConfig.other_tensors`, by name.
    """

    qkv: PackedLinear
    output: PackedLinear
    delta_gates: PackedLinear
    router: PackedLinear
    gate_up: PackedLinear  # of all experts, one behind the other
    down: PackedLinear
    shared_gate_up: PackedLinear
    shared_down: PackedLinear
    shared_gate: PackedLinear
    before_attention: Norm | nn.Identity
    after_attention: Norm
    before_mlp: Norm | nn.Identity
    after_mlp: Norm
    qk_norm: Norm
    query_norm: Norm
    key_norm: Norm

    def __init__(self, config: DecoderConfig, number: int, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__()
        self.config = config
        self.number = number
        own = config.layers[number]
        self.rope, self.mask = config.ropes.index(own.rope), config.windows.index(own.window)
        self.activation = ACTIVATIONS[config.activation]
        self.experts = config.experts_of(number)
        self._parts: dict[tuple[str, int], PackedLinear] = {}  # of experts or heads, once they are packed
        fused = fused or joining(read)
        for projection, parts in config.projections(number).items():
            bias = None
            if config.has_bias(number, projection):
                bias = torch.cat([plain(read(f"{name}.bias")) for name, _ in parts])
            setattr(self, projection, PackedLinear(fused([f"{name}.weight" for name, _ in parts]), bias))
        self.given = given = {role: plain(read(name)) for role, name in config.norms(number).items()}
        for role in ("before_attention", "before_mlp", "after_attention", "after_mlp"):
            setattr(self, role, Norm(config, [given[role]]) if role in given else nn.Identity())
        if "query" in given and config.joint_qk_norm:
            self.query_norm, self.key_norm = (Norm(config, [given[role]]) for role in ("query", "key"))
        elif "query" in given and not config.mixed:
            heads = (config.num_heads, config.num_kv_heads)
            self.qk_norm = Norm(config, [given["query"], given["key"]], heads)
        self.others = others = {name: plain(read(name)) for name in config.other_tensors(number)}
        sinks = config.sinks_of(number)
        self.sinks = None if sinks is None else others[sinks]
        self.recurrent_mixer: GatedDeltaNet | Mamba2Mixer | None = None
        net = config.recurrent_net_of(number)
        if net is not None:
            tensors = dict(zip(net.tensors, others.values(), strict=False))
            eps = config.norm_eps
            self.recurrent_mixer = (
                Mamba2Mixer(net, tensors, eps) if isinstance(net, Mamba2) else GatedDeltaNet(net, tensors, eps)
            )
        self.has_mixer, self.has_mlp, self.has_gates = own.has_mixer, own.has_mlp, net is not None and bool(net.gates)
        place = f"model.layers.{number}."
        self.convolution = ShortConvolution(others[f"{place}conv.conv.weight"]) if own.convolved else None
        has_bias = self.experts is not None and self.experts.sigmoid
        self.expert_scale: Tensor | None = None
        self.expert_bias = others[config.spelled(f"{place}mlp.expert_bias")] if has_bias else None

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | ExactAttention | None,
        memory: Memory,
    ) -> Tensor:
        """Return the output `[B * N, H]` for the input x `[B * N, H]`.

        Args:
            angles: Cosines and signed sines of the layer's positions, as of `rope_angles`.
            slots, mask, memory: As in `Decoder.forward`.
        """
        scale = self.config.residual_scale
        if self.has_mixer:
            mixed = self.mix(self.before_attention(x), angles, slots, mask, memory)
            x = torch.add(x, self.after_attention(mixed), alpha=scale)
        if self.has_mlp:
            x = torch.add(x, self.after_mlp(self.feed_forward(x)), alpha=scale)
        return x

    def mix(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | ExactAttention | None,
        memory: Memory,
    ) -> Tensor:
        """Return the output of attention, or of what replaces it, for a normed input. Arguments as of `forward`."""
        if isinstance(memory, Tensor):
            return self.attention(x, *angles, slots, mask, memory)
        mixer = self.convolution if isinstance(memory, ConvolutionMemory) else self.recurrent_mixer
        assert mixer is not None
        projected = self.qkv(x)
        if self.has_gates:
            projected = torch.cat([projected, self.delta_gates(x)], dim=-1)
        out: Tensor = self.output(mixer(projected, memory))
        return out

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the MLP or the experts add to the stream x `[R, H]`, before the norm after them."""
        x = self.before_mlp(x)
        if self.experts is not None:
            return self.routed_mlp(x, self.router(x), self.experts)
        out: Tensor = self.down(self.inner(self.gate_up(x)))
        return out

    def inner(self, gate_up: Tensor) -> Tensor:
        """Return the inner values `[..., I]` of an MLP for the output of its first projections.

        Args:
            gate_up: `[..., 2 * I]`, or `[..., I]` without gates.
        """
        if not self.config.gated_mlp:
            return self.activation(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        limits = self.config.clamped
        return self.activation(gate) * up if limits is None else clamped_swiglu(gate, up, limits)

    def attention(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        mask: Tensor | ExactAttention | None,
        store: Tensor,
    ) -> Tensor:
        config = self.config
        queries, new, gate = self.heads(x, cos, sin, len(store))
        keys, values = store.chunk(2, dim=1)
        if isinstance(mask, ExactAttention):
            mask.write(store[0], new)
            attended = mask.attend(
                queries, keys[0], values[0], config.query_scale, config.attention_softcap, self.sinks
            )
        else:
            write_nodes(store, new, slots)
            attended = attend_grouped(
                queries, keys, values, mask, config.query_scale, config.attention_softcap, sinks=self.sinks
            )
        return self.attended(attended, gate)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries `[B, N, heads, D]`, keys and then values `[B, N, 2 * kv_heads, D]`, and the output's gate."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        projected, gate = self.qkv(x), None
        if config.gated:  # each head has its query, then its gate
            parts, others = projected.split([2 * heads * config.head_dim, 2 * kv_heads * config.head_dim], dim=-1)
            own, gate = parts.unflatten(-1, (heads, 2, -1)).unbind(-2)
            projected = torch.cat([own.flatten(1), others], dim=-1)
        qkv = projected.view(batch, -1, heads + 2 * kv_heads, config.head_dim)
        # Queries and keys are normed and rotated together, in place.
        qk = qkv.narrow(2, 0, heads + kv_heads)
        if config.joint_qk_norm:
            for norm, own in zip((self.query_norm, self.key_norm), qk.split([heads, kv_heads], dim=2), strict=True):
                own.copy_(norm(own.flatten(2)).view_as(own))
        elif config.qk_norm:
            qk.mul_(self.qk_norm.scale(qk) * self.qk_norm.weight)
        turned = qk.narrow(-1, 0, cos.size(-1))
        swapped = turned.roll(cos.size(-1) // 2, dims=-1)
        turned.mul_(cos).addcmul_(swapped, sin)
        return qkv.narrow(2, 0, heads), qkv.narrow(2, heads, 2 * kv_heads), gate

    def attended(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """Return the output `[B * N, H]` for attended values `[B, N, heads, D]`."""
        flat = heads.reshape(heads.size(0) * heads.size(1), -1)
        out: Tensor = self.output(flat if gate is None else flat * gate.sigmoid().flatten(1))
        return out

    def routed_mlp(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        """Return the weighted outputs `[R, H]` of the experts that the router's scores `[R, experts]` choose."""
        scores = scores.float()
        if self.expert_bias is None:
            probs = choice = scores.softmax(dim=-1)
        else:
            probs = scores.sigmoid()
            choice = probs + self.expert_bias
        chosen = in_best_groups(choice, experts).topk(experts.chosen, dim=-1).indices
        shares = probs.gather(1, chosen)
        if experts.normed:
            least = MIN_SHARES if experts.sigmoid else 0.0
            shares = shares / (shares.sum(dim=-1, keepdim=True) + least)
        if self.expert_scale is not None:
            shares = shares * self.expert_scale[chosen]
        shares = torch.zeros_like(scores).scatter_(1, chosen, shares * experts.scale).to(x.dtype)
        out = torch.zeros_like(x)
        # Reading the weights takes most of the time, so a few nodes cost no more than one. With all nodes, products of
        # torch have one shape whichever nodes chose the expert, as exact forward passes need.
        takes_all = len(x) <= EXACT_NODES and self.gate_up.kernels is None
        nodes_of = defaultdict[int, list[int]](list)
        for node, experts_of_node in enumerate(chosen.tolist()):
            for expert in experts_of_node:
                nodes_of[expert].append(node)
        for expert, own in sorted(nodes_of.items()):
            whole = takes_all or len(own) == len(x)
            nodes = slice(None) if whole else torch.tensor(own, device=x.device)
            share = shares[nodes, expert, None]
            inner = self.inner(self.expert_part("gate_up", expert)(x[nodes]))
            mlp = self.expert_part("down", expert)(inner) * share
            out[nodes] += mlp.masked_fill(share == 0, 0.0) if takes_all else mlp  # of other nodes it may be infinite
        if experts.shared_size and not experts.beside:
            shared = self.shared_down(self.inner(self.shared_gate_up(x)))
            out += shared * self.shared_gate(x).sigmoid() if experts.gates_shared else shared
        return out

    def expert_part(self, projection: str, expert: int) -> PackedLinear:
        """Return the part of `gate_up` or `down` that belongs to an expert."""
        assert self.experts is not None
        return self._part(projection, expert, self.experts.count)

    def _part(self, projection: str, index: int, count: int) -> PackedLinear:
        """Return one of `count` equal parts of a projection's outputs, which belongs to one expert or head."""
        part = self._parts.get((projection, index))
        if part is None:
            layer: PackedLinear = getattr(self, projection)
            size = layer.out_features // count
            part = layer.part(index * size, (index + 1) * size)
            if layer.kernels is not None:
                self._parts[projection, index] = part
        return part


def in_best_groups(choice: Tensor, experts: Experts) -> Tensor:
    """Return the numbers by which experts are chosen, `[R, experts]`, with -inf outside of a row's best groups."""
    if experts.groups == 1:
        return choice
    groups = choice.unflatten(-1, (experts.groups, -1))
    sums = groups.topk(experts.group_best, dim=-1).values.sum(dim=-1)
    best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, sums.topk(experts.chosen_groups, dim=-1).indices, True)
    inside: Tensor = groups.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(1)
    return inside
