"""MTP heads that published models have beside their own layers (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5): those of
`network.py` around a layer of transformers, which knows latent and gated attention and experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig

from blockdraft.drafters.mtp.network import MTPHead
from blockdraft.nn.autoregressive import Attend, CachedAttention


@dataclass(frozen=True, kw_only=True)
class TargetMTPConfig:
    """Attributes:
    layer: Of a model whose only layer is the head's; from `one_layer`.
    num_target_layers: Of the target.
    block_size: Tokens of a path, anchor included; no checkpoint says it.
    normed_feedback: The state that is fed on is behind the last norm, like the target's that the first step reads.
    """

    layer: PretrainedConfig
    num_target_layers: int
    block_size: int = 8
    normed_feedback: bool = True

    def network(self) -> MTPHead:
        """A new network of this configuration."""
        return TargetMTPNetwork(self)

    @property
    def hidden_size(self) -> int:
        return cast(int, self.layer.hidden_size)

    @property
    def vocab_size(self) -> int:
        return cast(int, self.layer.vocab_size)

    @property
    def rms_norm_eps(self) -> float:
        return cast(float, self.layer.rms_norm_eps)

    @property
    def taps(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


def one_layer(config: PretrainedConfig, experts: bool) -> PretrainedConfig:
    """The configuration of a model of one layer with full attention, otherwise like this one.

    Args:
        config: The target's, of its text.
        experts: Whether the layer's MLP is one of experts.
    """
    changes: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "mlp_only_layers": [] if experts else [0],
        "decoder_sparse_step": 1,
    }
    made = copy.deepcopy(config)
    made.num_hidden_layers = 1
    for name, value in changes.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


class Angles:
    """cos and sin of positions by a module of transformers, which is no part of a network: its frequencies must stay
    float32 when weights are cast."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=dtype, device=positions.device)
        found: tuple[Tensor, Tensor] = self._module.to(positions.device)(like, positions)
        return found


class Writing:
    """A cache of transformers for one call of a layer, which writes keys and values by a function."""

    def __init__(self, write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._write = write

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._write(keys, values)


class TargetMTPNetwork(MTPHead):
    """The layer attends by itself, over `CachedAttention` alone, so that it decodes and cannot be trained."""

    config: TargetMTPConfig

    def __init__(self, config: TargetMTPConfig) -> None:
        with torch.device("meta"):
            model: Any = AutoModel.from_config(config.layer, attn_implementation="sdpa")
        layer, norm = type(model.layers[0]), type(model.norm)
        super().__init__(config, lambda: layer(model.config, 0), lambda size, eps: norm(size, eps=eps))
        with torch.device("cpu"):  # also where the weights are still to come
            self._angles = Angles(type(model.rotary_emb)(model.config))

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        layer: Any = self.config.layer
        if hasattr(layer, "kv_lora_rank"):  # latent attention is cached before it is expanded
            return (1, layer.kv_lora_rank), (1, layer.qk_rope_head_dim)
        heads = layer.num_key_value_heads, layer.head_dim
        return heads, heads

    def keys_values(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        rows, found = self._rows(embedded, feature), list[Tensor]()

        def keep(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            found.extend((keys, values))
            return keys[:, :, :1], values[:, :, :1]  # what attention makes of them is not wanted, and shall cost little

        angles = self._angles(positions, rows.dtype)
        layer.self_attn(
            layer.input_layernorm(rows), position_embeddings=angles, attention_mask=None, past_key_values=Writing(keep)
        )
        return found[0], found[1]

    def forward(self, embedded: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, CachedAttention)
        rows = self._rows(embedded, feature)
        out: Tensor = self.layers[0](
            rows,
            attention_mask=attend.visible.unsqueeze(1),
            position_ids=positions,
            past_key_values=Writing(attend.write),
            position_embeddings=self._angles(positions, rows.dtype),
        )
        return out

    def to(self, *args: Any, **kwargs: Any) -> TargetMTPNetwork:
        """As ever, but for buffers, which keep their dtype: routers' biases are float32 whatever the weights are."""
        exact = dict(self.named_buffers())
        super().to(*args, **kwargs)
        for name, buffer in exact.items():
            module, _, own = name.rpartition(".")
            setattr(self.get_submodule(module), own, buffer.to(self.fc.weight.device))
        return self
