"""A multi-token prediction head (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next): one layer that goes on from
the target's last hidden state, a token at a time.

A place of the text stands for a pair: the token there and the hidden state at the token before it, the input of the
target's own head. Behind the anchor, the head's own output takes the place of the target's state. The first token of a
text has no state before it, so no pair is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.nn.dflash import Attend, DraftLayer
from blockdraft.nn.draft_config import LayerShape
from blockdraft.nn.layers import RMSNorm, Rotary, rotate


@dataclass(frozen=True, kw_only=True)
class MTPConfig(LayerShape):
    """Attributes:
    draft_steps: Guesses behind the anchor, for each of which the layer runs once.
    normed_feedback: Whether a step goes on from the last one's output after the final norm, as in Qwen3-Next, or
        before it.
    """

    vocab_size: int
    num_target_layers: int
    draft_steps: int
    normed_feedback: bool = True

    @property
    def taps(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


class MTPNetwork(nn.Module):
    """The layer, what leads into it, and the norm behind it; embedding and head are the target's.

    Parameter names are those of Qwen3-Next's tensors behind `mtp.`.
    """

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = Rotary(config)

    def context(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What later places attend to of pairs that are known beforehand.

        Args:
            embedded: `[B, N, H]`, the tokens.
            hidden: `[B, N, H]`, the target's states at the tokens before them.
            positions: `[B, N]` int64, of the tokens.

        Returns:
            Keys and values, each `[B, kv_heads, N, D]`, keys normed and rotated.
        """
        layer = cast(DraftLayer, self.layers[0])
        attention, x = layer.self_attn, layer.input_layernorm(self._pair(embedded, hidden))
        keys, values = (
            proj(x).unflatten(-1, (-1, attention.head_dim)) for proj in (attention.k_proj, attention.v_proj)
        )
        keys = rotate(attention.k_norm(keys), *self._rotary(positions, keys.dtype))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            embedded, hidden, positions: As in `context`; behind the anchor `hidden` is what the last step gave back.
            attend: Attention over the context and these places.

        Returns:
            The state for the target's head, which makes the next token of it, and the one for the next step, both
            `[B, N, H]`.
        """
        x = self._pair(embedded, hidden)
        out: Tensor = self.layers[0](x, *self._rotary(positions, x.dtype), 0, attend)
        normed: Tensor = self.norm(out)
        return normed, normed if self.config.normed_feedback else out

    def _pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        return cast(Tensor, self.fc(both))
