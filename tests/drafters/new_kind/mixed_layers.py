"""A kind of drafter in one file: two layers of different kinds, declared as a description.

The first layer reads pairs, like EAGLE-3's, and the second one has a sliding window. Weights are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blockdraft.drafters import DrafterSpec
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.nn.draft_network import DraftDescription, DraftLayer, DraftLayerKind, LayeredNetwork
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.rotary import Rotary
from blockdraft.targets import Target


@dataclass(frozen=True)
class MixedConfig:
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    target_layers: tuple[int, ...] = (0, 1)
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    block_size: int = 6
    window: int = 5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: None = None
    max_position_embeddings: int = 256
    attention_bias: bool = False


class MixedNetwork(LayeredNetwork):
    config: MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layers) * size, size, bias=False)
        self.fc_norm = RMSNorm(size, eps)
        self.embedding_norm, self.state_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.first = DraftLayer(config, 2 * size)
        self.second = DraftLayer(config, qk_norm=False)
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        self.description = DraftDescription(
            layers=(DraftLayerKind("first"), DraftLayerKind("second", window=config.window)),
            entry="pair",
            fused_norm="fc_norm",
            token_norm="embedding_norm",
            hidden_state_norm="state_norm",
            normed_feedback=True,
        )


class MixedDrafter(Eagle3Drafter):
    """Drafts chains and trees as EAGLE-3 does, with the target's embedding and head."""

    has_target_head = True


def load(path: Path | None, target: Target) -> MixedDrafter:
    network = MixedNetwork(MixedConfig(target.hidden_size, target.vocab_size, target.num_layers))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1))
    return MixedDrafter(network, target, path, owned=True)


DRAFTER = DrafterSpec(load, by_name=True, network=MixedNetwork, drafter=MixedDrafter)
