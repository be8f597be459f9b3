"""A layer of Gemma 4: sizes of heads differ, layers share keys and values, and each adds an embedding of its own."""

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
    input_gate: PackedLinear
    input_projection: PackedLinear

    def __init__(self, config: DecoderConfig, number: int, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__(config, number, read, fused)
        for role, name in (("query", "query_norm"), ("key", "key_norm"), ("after_input", "after_input")):
            if role in self.given:
                setattr(self, name, Norm(config, [self.given[role]]))
        self.scalar = self.others[f"model.layers.{number}.layer_scalar"]

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
