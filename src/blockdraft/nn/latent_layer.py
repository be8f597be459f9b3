"""A layer with latent attention (MLA), which attends to one vector per token for all heads, as the cache holds it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.nn.attention import ExactAttention, attend_grouped
from blockdraft.nn.cache import write_nodes
from blockdraft.nn.decoder_config import DecoderConfig, LatentAttention
from blockdraft.nn.decoder_layer import DecoderLayer, Norm, Read, ReadFused
from blockdraft.nn.mixed_layer import rotated
from blockdraft.nn.packed import PackedLinear


class LatentLayer(DecoderLayer):
    """A layer of a decoder with `latent` attention."""

    queries: PackedLinear
    absorbed_keys: PackedLinear
    values: PackedLinear

    def __init__(self, config: DecoderConfig, number: int, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__(config, number, read, fused)
        assert config.latent is not None
        self.latent: LatentAttention = config.latent
        own = replace(config, norm_eps=self.latent.norm_eps)
        self.key_norm = Norm(own, [self.given["key_vector"]])
        if self.latent.query_rank:
            self.query_norm = Norm(own, [self.given["query_vector"]])

    def attention(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        mask: Tensor | ExactAttention | None,
        store: Tensor,
    ) -> Tensor:
        scale = self.config.query_scale
        queries, new, _ = self.heads(x, cos, sin, len(store))
        if isinstance(mask, ExactAttention):
            mask.write(store[0], new)
            attended = mask.attend(queries, store[0], store[0], scale)
        else:
            write_nodes(store, new, slots)
            attended = attend_grouped(queries, store, store, mask, scale)
        return self.attended(attended.view_as(queries), None)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, None]:
        """Return queries `[B, N, heads, D]` and keys `[B, N, 1, D]`, which begin with the values."""
        latent, heads = self.latent, self.config.num_heads
        own, key = self.qkv(x).split([self.config.latent_queries, latent.key_dim], dim=-1)
        if latent.query_rank:
            own = self.queries(self.query_norm(own))
        own = own.unflatten(-1, (heads, -1))
        absorbed = self._by_head("absorbed_keys", own[..., : latent.unrotated]).view(batch, -1, heads, latent.rank)
        turned = rotated(own[..., latent.unrotated :].view(batch, -1, heads, latent.rotated), cos, sin)
        vectors = self.key_norm(key[..., : latent.rank]).view(batch, -1, 1, latent.rank)
        turned_key = rotated(key[..., latent.rank :].view(batch, -1, 1, latent.rotated), cos, sin)
        return torch.cat([absorbed, turned], dim=-1), torch.cat([vectors, turned_key], dim=-1), None

    def attended(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """Return the output `[B * N, H]` for attended keys `[B, N, heads, D]`."""
        out: Tensor = self.output(self._by_head("values", heads.flatten(0, 1)[..., : self.latent.rank]).flatten(1))
        return out

    def _by_head(self, projection: str, x: Tensor) -> Tensor:
        """Multiply inputs `[R, heads, in]` of each head with its part of a projection, to `[R, heads, out]`."""
        layer, heads = getattr(self, projection), x.size(1)
        if layer.kernels is None and layer.bits is None:
            return torch.einsum("rhi,hoi->rho", x, layer.weight.view(heads, -1, x.size(2)))
        return torch.stack([self._part(projection, head, heads)(x[:, head]) for head in range(heads)], dim=1)
