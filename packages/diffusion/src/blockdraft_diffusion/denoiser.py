"""Networks of block-diffusion language models: their base class, and a network made of a causal language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.attention import Visible, attend
from blockdraft.nn.decoder import rope_angles, rope_frequencies
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import ACTIVATIONS
from blockdraft.nn.layers import RMSNorm


class KeysValues(Protocol):
    """Store for the keys and values of a pass, such as a `KVCache`."""

    def write(self, layer: int, keys: Tensor, values: Tensor, /) -> Sequence[Tensor]:
        """Store keys and values of new tokens, `[B, heads, N, D]`, and return all visible ones, `[B, heads, T, D]`."""


class Denoiser(nn.Module, ABC):
    """A transformer whose caller decides which token attends to which. Parameters have the names of its checkpoint.

    Attributes:
        vocab_size: Number of logits, including that of the mask token.
    """

    vocab_size: int

    @abstractmethod
    def hidden(
        self, tokens: Tensor, positions: Tensor, visible: Visible | None = None, cache: KeysValues | None = None
    ) -> Tensor:
        """Return the input of the head, `[B, N, H]`.

        Args:
            tokens: `[B, N]` int64.
            positions: `[B, N]` int64, or `[1, N]` if all sequences have the same.
            visible: `[B or 1, N, T]` bool, whether token i attends to slot j; None is all to all. Without a cache T is
                N, and this may be a mask of FlexAttention.
            cache: Store for the tokens' keys and values behind each sequence's committed tokens; the caller commits.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of the head's input `[..., H]`."""

    @property
    @abstractmethod
    def kv_shape(self) -> tuple[int, int, int]:
        """Number of layers, key/value heads per layer, and head size."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def why_not_denoiser(config: DecoderConfig) -> str | None:
    """Return why `CausalDenoiser` cannot run a decoder, or None if it can."""
    unsupported = {
        "sliding windows": config.windows != (None,),
        "soft-caps": config.attention_softcap is not None or config.final_softcap is not None,
        "norms of what layers add": config.post_norms,
        "norm weights that begin at 0": config.norm_plus_one,
        "scaled embeddings": config.embedding_scale != 1,
        "scaled residuals or logits": config.residual_scale != 1 or config.logit_scale != 1,
        "layers without positions": any(not any(rope.inverse_frequencies) for rope in config.ropes),
        "fused projections": config.fused_names,
    }
    names = [name for name, present in unsupported.items() if present]
    return f"it has {' and '.join(names)}, which models of the Llama and Qwen families do not have" if names else None


class CausalDenoiser(Denoiser):
    """The layers of a causal language model of the Llama and Qwen families, without its causal mask."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert why_not_denoiser(config) is None
        self.config, self.vocab_size = config, config.vocab_size
        self.model = _Body(config)
        if not config.tied_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Not a buffer, because it must stay float32 when the weights are cast: bfloat16 cannot distinguish positions.
        with torch.device("cpu"):  # also if the network is created on the meta device
            self.frequencies = rope_frequencies(config)

    def hidden(
        self, tokens: Tensor, positions: Tensor, visible: Visible | None = None, cache: KeysValues | None = None
    ) -> Tensor:
        self.frequencies = self.frequencies.to(tokens.device)
        x: Tensor = self.model.embed_tokens(tokens)
        angles = rope_angles(self.config, self.frequencies, positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, angles, visible, cache)
        out: Tensor = self.model.norm(x)
        return out

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return len(self.config.layers), self.config.num_kv_heads, self.config.head_dim

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens if self.config.tied_head else self.lm_head
        return F.linear(hidden, head.weight)


class _Body(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, number) for number in range(len(config.layers)))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, number)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: Tensor, angles: list[tuple[Tensor, Tensor]], visible: Visible | None, cache: KeysValues | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, visible, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.number, self.head_dim = number, config.head_dim
        self.rope = config.ropes.index(config.layers[number].rope)
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(size, config.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.has_norms = config.qk_norm

    def forward(
        self, x: Tensor, angles: list[tuple[Tensor, Tensor]], visible: Visible | None, cache: KeysValues | None
    ) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cos, sin = angles[self.rope]
        queries, keys = (heads * cos + heads.roll(self.head_dim // 2, dims=-1) * sin for heads in (queries, keys))
        queries, keys, values = (heads.transpose(1, 2).to(x.dtype) for heads in (queries, keys, values))
        if cache is not None:
            keys, values = cache.write(self.number, keys, values)
        out: Tensor = self.o_proj(attend(queries, keys, values, visible).transpose(1, 2).flatten(-2))
        return out


class _MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out
