"""The EAGLE-3 draft network (arXiv 2503.01840): one decoder layer that predicts one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.nn.draft_config import check_fields, check_shape, need
from blockdraft.nn.draft_network import DraftDescription, DraftLayer, DraftLayerKind, LayeredNetwork
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.rotary import Rotary

BLOCK_SIZE = 8  # default for checkpoints without one: the anchor, and as many steps as training usually unrolls
DRAFT_VOCAB = 32_000  # default number of tokens of its own output head


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Configuration of an EAGLE-3 drafter, read from any layout. Raises ValueError for a value out of range."""

    hidden_size: int  # same as the target's
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # number of tokens that the drafter can predict
    target_layers: tuple[int, ...]  # 0-based target layers whose outputs are read, in the order of the columns of `fc`
    num_target_layers: int
    block_size: int = BLOCK_SIZE  # tokens per path, anchor included
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None  # `rope_type` and its parameters, without theta; None is plain RoPE
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048  # tokens
    attention_bias: bool = False
    hidden_act: str = "silu"
    qk_norm: bool = False  # norms on queries and keys, as in Qwen3
    norm_before_residual: bool = False  # the residual stream starts from the normed hidden state
    norm_output: bool = False  # the next step reads the output of the last norm
    fc_norm: bool = False  # a norm on each target layer before `fc`
    norm_before_fc: bool = False  # one norm on all target layers together before `fc`
    tied_head: bool = False  # the rows of `lm_head` are those of the target's head

    def __post_init__(self) -> None:
        check_fields(self, {"block_size": 2})
        check_shape(self)
        size, whole = self.draft_vocab_size, self.vocab_size
        need(size <= whole, "draft_vocab_size", size, f"at most vocab_size, {whole}")
        need(not (self.fc_norm and self.norm_before_fc), "fc_norm", True, "false where norm_before_fc is true")


class Eagle3Layer(DraftLayer):
    """Layer that reads pairs. Its input norm is that of their embeddings, and `hidden_norm` that of hidden states."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, config.qk_norm)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Network(LayeredNetwork):
    """EAGLE-3's network: `fc`, norms, one layer that reads entries, and a head. The target lends its embedding.

    Parameter names equal the tensor names of SafeAILab's and SpecForge's checkpoints, so `state_dict` is the
    checkpoint without `t2d`, which follows from `d2t`.
    """

    config: Eagle3Config
    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layers) * size, size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in config.target_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(config.target_layers) * size, eps)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # Token i of the draft vocabulary is the target's token i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        fusing = [f"fc_norm.{index}" for index in range(len(config.target_layers))] if config.fc_norm else []
        self.description = DraftDescription(
            layers=(DraftLayerKind("midlayer"),),
            entry="pair",
            fusing_norms=("input_norm",) if config.norm_before_fc else tuple(fusing),
            token_norm="midlayer.input_layernorm",
            hidden_state_norm="midlayer.hidden_norm",
            head="lm_head",
            tied_head=config.tied_head,
            normed_stream=config.norm_before_residual,
            normed_feedback=config.norm_output,
        )

    @property
    def kept(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def keep(self, tokens: Tensor) -> None:
        """Set the draft vocabulary to these tokens of the target, `[Vd]` int64."""
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))


def default_target_layers(num_target_layers: int) -> tuple[int, ...]:
    """Return the target layers of checkpoints that name none: the inputs of the layers 2, T // 2 and T - 3 of T.

    Raises:
        ValueError: These are not three different layers.
    """
    target_layers = (1, num_target_layers // 2 - 1, num_target_layers - 4)
    need(
        target_layers[0] < target_layers[1] < target_layers[2],
        "num_target_layers",
        num_target_layers,
        "7 or more, or the target layers be named",
    )
    return target_layers
