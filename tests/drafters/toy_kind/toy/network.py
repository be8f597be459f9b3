"""The toy's network, which draft tokens one token after the other from the target's hidden state before the anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    target_layers: tuple[int, ...]
    block_size: int  # anchor included


class ToyNetwork(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.norm = nn.RMSNorm(config.hidden_size)

    def begin(self, hidden_state: Tensor) -> Tensor:
        """Hidden state `[..., H]` for the hidden state `[..., m * H]` before the anchor."""
        return cast(Tensor, self.fc(hidden_state))

    def step(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Hidden state that drafts the token after the embedded one, `[..., H]` each."""
        mixed = hidden + torch.tanh(self.mix(torch.cat([hidden, embedded], dim=-1)))
        return cast(Tensor, self.norm(mixed.float()))  # under autocast the sum may be in bfloat16
