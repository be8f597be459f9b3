"""The MTP head (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next).

One layer predicts one token at a time from the target's last hidden state. Embedding and output projection are the
target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from blockdraft.nn.draft_config import check_fields, check_layer
from blockdraft.nn.draft_network import DraftDescription, DraftLayer, DraftLayerKind, LayeredNetwork
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Configuration of an MTP head. Raises ValueError for a value out of range."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    block_size: int  # tokens per path, anchor included
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None  # `rope_type` and its parameters, without theta; None is plain RoPE
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960  # tokens
    attention_bias: bool = False
    normed_feedback: bool = True  # the next step reads the output of the last norm, as in Qwen3-Next

    def __post_init__(self) -> None:
        check_fields(self, {"block_size": 2})
        check_layer(self)

    def network(self) -> MTPHead:
        """Return a new network of this configuration."""
        return MTPNetwork(self)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


class MTPHead(LayeredNetwork):
    """Base of MTP heads: everything except the layer. Parameter names are those of Qwen3-Next's tensors under `mtp.`.

    Args:
        config: Configuration with at least `hidden_size`, `vocab_size`, `rms_norm_eps` and `normed_feedback`.
        layer: Function that makes the layer.
        norm: Function that makes a norm of a given size and epsilon.
        packed_decoder, torch_only: As in `DraftDescription`.
    """

    def __init__(
        self,
        config: Any,
        layer: Callable[[], nn.Module],
        norm: Callable[[int, float], nn.Module] = RMSNorm,
        packed_decoder: bool = False,
        torch_only: str | None = None,
    ) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(size, eps)
        self.pre_fc_norm_hidden = norm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer()])
        self.norm = norm(size, eps)  # type: ignore[assignment]
        self.description = DraftDescription(
            layers=(DraftLayerKind("layers.0"),),
            entry="joined pair",
            token_norm="pre_fc_norm_embedding",
            hidden_state_norm="pre_fc_norm_hidden",
            normed_feedback=config.normed_feedback,
            packed_decoder=packed_decoder,
            torch_only=torch_only,
        )


class MTPNetwork(MTPHead):
    """MTP head with a layer of our own, which can be trained."""

    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config, lambda: DraftLayer(config))
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
