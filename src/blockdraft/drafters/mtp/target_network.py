"""Network of the MTP heads in published models (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5).

It is an `MTPHead` around a layer of transformers, which supports latent and gated attention and experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockdraft.drafters.mtp.network import MTPHead
from blockdraft.nn.cache import cache_argument
from blockdraft.nn.draft_network import Attend
from blockdraft.nn.torch_runner import CachedAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class TargetMTPConfig:
    """Configuration of an MTP head in a target's checkpoint.

    Attributes:
        layer: Configuration of a model whose only layer is the head's; from `one_layer`.
        num_target_layers: Number of the target's layers.
        block_size: Tokens per path, anchor included; checkpoints do not state it.
        normed_feedback: Whether the next step reads the output of the last norm.
    """

    layer: PretrainedConfig
    num_target_layers: int
    block_size: int = 8
    normed_feedback: bool = True

    def network(self) -> MTPHead:
        """Return a new network of this configuration."""
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
    def target_layers(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


def one_layer(config: PretrainedConfig, experts: bool) -> PretrainedConfig:
    """Return the configuration of a model with one layer of full attention, otherwise like the target.

    Args:
        config: Configuration of the target's text model.
        experts: Whether the layer's MLP is a mixture of experts.
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
    """Rotary module of transformers, not registered as a submodule.

    So its frequencies stay float32 when the network's weights are cast.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if hasattr(self._module, "mrope_section"):  # time, height and width; releases before 5.19 need all three
            positions = positions.expand(3, -1, -1)
        like = torch.empty(0, dtype=dtype, device=positions.device)
        angles: tuple[Tensor, Tensor] = self._module.to(positions.device)(like, positions)
        return angles


class Writing:
    """Cache of transformers that passes keys and values to a function, for one call of a layer."""

    def __init__(self, write: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> None:
        self._write = write

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        return self._write(keys, values)


class TargetMTPNetwork(MTPHead):
    """MTP head with a layer of transformers.

    The layer computes attention itself and needs a `CachedAttention`, so this network cannot be trained.
    """

    config: TargetMTPConfig

    def __init__(self, config: TargetMTPConfig) -> None:
        with torch.device("meta"):
            from transformers import AutoModel

            model: Any = AutoModel.from_config(config.layer, attn_implementation="sdpa")
        layer, norm = type(model.layers[0]), type(model.norm)
        super().__init__(
            config,
            lambda: layer(model.config, 0),
            lambda size, eps: norm(size, eps=eps),
            torch_only="layers of transformers",
        )
        self._cache_argument = cache_argument(self.layers[0])
        with torch.device("cpu"):  # its frequencies are needed even if the weights are on the meta device
            self._angles = Angles(type(model.rotary_emb)(model.config))

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        layer: Any = self.config.layer
        if hasattr(layer, "kv_lora_rank"):  # latent attention is cached before it is expanded
            return (1, layer.kv_lora_rank), (1, layer.qk_rope_head_dim)
        heads = layer.num_key_value_heads, layer.head_dim
        return heads, heads

    def keys_values(
        self, embedded: Tensor, hidden_state: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        (entries, _), written = self.entries(embedded, hidden_state), list[Tensor]()

        def keep(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            written.extend((keys, values))
            return keys[:, :, :1], values[:, :, :1]  # makes the unused attention cheap

        normed, angles = layer.input_layernorm(entries), self._angles(positions, entries.dtype)
        cache = {self._cache_argument: Writing(keep)}
        layer.self_attn(normed, position_embeddings=angles, attention_mask=None, **cache)
        return written[0], written[1]

    def forward(
        self, embedded: Tensor, positions: Tensor, attend: Attend, hidden_state: Tensor | None = None
    ) -> Tensor:
        assert isinstance(attend, CachedAttention)
        entries, _ = self.entries(embedded, hidden_state)
        out: Tensor = self.layers[0](
            entries,
            attention_mask=attend.visible[0].unsqueeze(1),
            position_ids=positions,
            position_embeddings=self._angles(positions, entries.dtype),
            **{self._cache_argument: Writing(partial(attend.write, 0))},
        )
        return out

    def to(self, *args: Any, **kwargs: Any) -> TargetMTPNetwork:
        """Move the network, but keep the dtypes of buffers: routers' biases are always float32."""
        exact = dict(self.named_buffers())
        super().to(*args, **kwargs)
        for name, buffer in exact.items():
            module, _, own = name.rpartition(".")
            setattr(self.get_submodule(module), own, buffer.to(self.like.device))
        return self
