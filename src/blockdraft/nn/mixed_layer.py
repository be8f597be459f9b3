"""A layer of Gemma 4: sizes of heads differ, layers share keys and values, and each may add an embedding of its own.

In mixtures of experts, the experts of a layer stand beside its MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.nn.attention import ExactAttention, attend_grouped
from blockdraft.nn.cache import write_nodes
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Norm, Read, ReadFused
from blockdraft.nn.packed import PackedLinear


class MixedLayer(DecoderLayer):
    """A layer of a `mixed` decoder."""

    query_norm: Norm
    key_norm: Norm
    after_input: Norm
    before_router: Norm
    before_experts: Norm
    after_shared: Norm
    after_experts: Norm
    input_gate: PackedLinear
    input_projection: PackedLinear

    def __init__(self, config: DecoderConfig, number: int, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__(config, number, read, fused)
        names = {"query": "query_norm", "key": "key_norm"}
        for role, weight in self.given.items():
            if role not in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
                setattr(self, names.get(role, role), Norm(config, [weight]))
        prefix = f"model.layers.{number}."
        self.scalar = self.others[f"{prefix}layer_scalar"]
        if self.experts is not None:
            factors = self.others[f"{prefix}router.scale"]
            self.before_router = Norm(config, [factors * config.hidden_size**-0.5])
            self.expert_scale = self.others[f"{prefix}router.per_expert_scale"]

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.experts is None:
            return super().feed_forward(x)
        own = self.shared_down(self.inner(self.shared_gate_up(self.before_mlp(x))))
        routed = self.routed_mlp(self.before_experts(x), self.router(self.before_router(x)), self.experts)
        added: Tensor = self.after_shared(own) + self.after_experts(routed)
        return added

    def finish(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """Add the layer's own embeddings of the tokens, `[R, size]`, to its output `[R, H]`, and scale it."""
        if inputs is not None:
            added = self.input_projection(self.activation(self.input_gate(x)) * inputs)
            x = x + self.after_input(added)
        return x * self.scalar

    def attention(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        mask: Tensor | ExactAttention | None,
        store: Tensor,
    ) -> Tensor:
        config, kind = self.config, self.config.layers[self.number]
        heads, kv_heads = config.num_heads, config.kv_heads_of(self.number)
        qkv = self.qkv(x).view(len(store), -1, self.qkv.out_features // cos.size(-1), cos.size(-1))
        queries = rotated(self.query_norm(qkv[:, :, :heads]), cos, sin)
        if kind.keys_of is None:
            keys, values = qkv[:, :, heads : heads + kv_heads], qkv[:, :, -kv_heads:]  # the same if values are keys
            values = (values * self.key_norm.scale(values)).to(x.dtype)
            new = torch.cat([rotated(self.key_norm(keys), cos, sin), values], dim=2)
            if isinstance(mask, ExactAttention):
                mask.write(store[0], new)
            else:
                write_nodes(store, new, slots)
        keys, values = store.chunk(2, dim=1)
        if isinstance(mask, ExactAttention):
            attended = mask.attend(queries, keys[0], values[0], config.query_scale, config.attention_softcap)
        else:
            attended = attend_grouped(queries, keys, values, mask, config.query_scale, config.attention_softcap)
        out: Tensor = self.output(attended.reshape(x.size(0), -1))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[B, N, heads, D]` by cosines and signed sines `[B, N, 1, D]`."""
    return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin
