"""The DFlash draft network (arXiv 2602.06036): a few layers that read a target's hidden states as keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.draft_network import Attend, DraftDescription, DraftLayer, DraftLayerKind, LayeredNetwork
from blockdraft.nn.layers import RMSNorm, rotate
from blockdraft.nn.rotary import Rotary


class DFlashNetwork(LayeredNetwork):
    """Draft layers, `fc` and norms. Embedding and head are the target's.

    Parameter names equal the tensor names of z-lab's checkpoints, so `state_dict` is the checkpoint.

    Attributes:
        config_class: Class of its configuration, to be set by subclasses.
        layer_class: Class of its layers, likewise.
        convolved: Whether these layers have convolutions, likewise.
    """

    config_class: type[DraftConfig] = DraftConfig
    layer_class: type[DraftLayer] = DraftLayer
    convolved = False
    config: DraftConfig

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        self.description = DraftDescription(
            layers=tuple(
                DraftLayerKind(f"layers.{index}", kind.causal, kind.window, self.convolved)
                for index, kind in enumerate(config.layers)
            ),
            fused_norm="hidden_norm",
            embedding_scale=config.input_embedding_scale,
        )

    def context(self, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all layers for committed tokens, in one product.

        Hidden states of context tokens pass through `fc` and `hidden_norm` only: no input norm, no query, no MLP.

        Args:
            hidden_states: `[B, N, m * H]`, hidden states of the m target layers.
            positions: `[B, N]`, absolute.

        Returns:
            Keys and values, each `[layers, B, kv_heads, N, D]`, keys normed and rotated.
        """
        config, attentions = self.config, [layer.self_attn for layer in self.draft_layers]
        projections = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        weight = torch.cat([p.weight for p in projections])
        scales = torch.stack([a.k_norm.weight for a in attentions])
        bias = torch.cat([p.bias for p in projections]) if config.attention_bias else None
        both = F.linear(self.hidden_norm(self.fc(hidden_states)), weight, bias)
        shape = (2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        keys, values = both.unflatten(-1, shape).unbind(dim=2)  # [B, N, layers, kv_heads, D]
        keys = F.rms_norm(keys, (config.head_dim,), eps=config.rms_norm_eps) * scales[:, None, :]
        cos, sin = self.angles(positions, keys.dtype)
        keys = rotate(keys, cos.unsqueeze(2), sin.unsqueeze(2))
        return keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)

    def forward(
        self, embedded: Tensor, positions: Tensor, attend: Attend, hidden_state: Tensor | None = None
    ) -> Tensor:
        """Run all layers over blocks, all positions of a block in parallel.

        Args:
            embedded: `[B, N, H]`, embedded `[anchor, mask, mask, ...]`.
            positions: `[B, N]`, absolute.
            attend: Attention of a layer's block over context and block.

        Returns:
            `[B, N, H]` after the final norm; position j belongs to the token at anchor + j, and position 0 is unused.
        """
        out: Tensor = self.norm(super().forward(embedded, positions, attend))
        return out

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """Apply the checkpoint's scale and soft-cap, if any, to logits of the target's head."""
        factor = self.config.output_multiplier
        logits = logits if factor == 1 else logits * factor
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
