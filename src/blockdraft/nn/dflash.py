"""The DFlash draft network (arXiv 2602.06036): a few layers that read a target's features as context keys and values.

Training and decoding run the same layers; they differ in where keys and values of the context come from, so both pass
an `attend` function in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.layers import GatedMLP, RMSNorm, rotate

# (layer, queries [B, heads, N, D], keys and values of the block [B, kv_heads, N, D]) -> [B, heads, N, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rotary_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """Radians a position of each pair of channels `[D / 2]` float32, and a factor on cosine and sine."""
    # The many kinds of rotary scaling are transformers' business.
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    with torch.device("cpu"):  # also where the weights are still to come
        rotary = Qwen3RotaryEmbedding(
            Qwen3Config(
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
        )
    return cast(Tensor, rotary.inv_freq), float(rotary.attention_scaling)


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        queries, keys, values = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = rotate(self.q_norm(queries), cos, sin)
        keys = rotate(self.k_norm(keys), cos, sin)
        out = attend(layer, queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return projected


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashNetwork(nn.Module):
    """The draft layers, `fc` and norms; embedding and head are the target's.

    Parameter names equal the tensor names of z-lab's checkpoints, so `state_dict` is the checkpoint.

    Attributes:
        config_class: What it is built from; `layer_class`: what its layers are. Networks that extend this one set both.
    """

    config_class: type[DraftConfig] = DraftConfig
    layer_class: type[DraftLayer] = DraftLayer

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffer of this module, because they must stay float32 when the weights are cast: rounded to bfloat16,
        # positions blur.
        frequencies, self._rope_scale = rotary_frequencies(config)
        self._frequencies = {frequencies.device: frequencies}

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions `[B, N]`, each `[B, N, D]`."""
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = next(iter(self._frequencies.values())).to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies[positions.device]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._rope_scale).to(dtype), (angles.sin() * self._rope_scale).to(dtype)

    def context_weights(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Key and value projections of all layers in one matrix, their biases, and the key norms' scales."""
        attentions = [cast(DraftLayer, layer).self_attn for layer in self.layers]
        projections = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        bias = torch.cat([p.bias for p in projections]) if self.config.attention_bias else None
        return torch.cat([p.weight for p in projections]), bias, torch.stack([a.k_norm.weight for a in attentions])

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers for committed tokens, in one product.

        Context rows go through `fc` and `hidden_norm` only: no input norm, no query, no MLP.

        Args:
            features: `[B, N, m * H]` of the tapped target layers.
            positions: `[B, N]`, absolute.

        Returns:
            Keys and values, each `[layers, B, kv_heads, N, D]`, keys normed and rotated.
        """
        config = self.config
        weight, bias, scales = self.context_weights()
        both = F.linear(self.hidden_norm(self.fc(features)), weight, bias)
        shape = (2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        keys, values = both.unflatten(-1, shape).unbind(dim=2)  # [B, N, layers, kv_heads, D]
        keys = F.rms_norm(keys, (config.head_dim,), eps=config.rms_norm_eps) * scales[:, None, :]
        cos, sin = self.angles(positions, keys.dtype)
        keys = rotate(keys, cos.unsqueeze(2), sin.unsqueeze(2))
        return keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)

    def forward(self, block: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One parallel pass over blocks.

        Args:
            block: `[B, N, H]`, embedded `[anchor, mask, mask, ...]`.
            positions: `[B, N]`, absolute.
            attend: Attention of a layer's block rows over context and block.

        Returns:
            `[B, N, H]` after the final norm; slot j stands for the token at anchor + j, slot 0 for nothing.
        """
        return self.through_layers(block, *self.angles(positions, block.dtype), attend)

    def through_layers(self, block: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`forward` with the angles as its layers take them."""
        scale = self.config.input_embedding_scale
        x = block if scale == 1 else block * scale
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend)
        out: Tensor = self.norm(x)
        return out

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """The scale and soft-cap that some checkpoints ask for, on top of the target's output projection."""
        factor = self.config.output_multiplier
        logits = logits if factor == 1 else logits * factor
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
