"""The P-EAGLE draft network: EAGLE-3 with further layers that guesses all its tokens in one pass. A row whose token and
feature do not exist yet has a mask token, and a feature that is learned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.nn.dflash import Attend, DraftLayer
from blockdraft.nn.draft_config import need, whole
from blockdraft.nn.eagle3 import Eagle3Base, Eagle3Config


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """A P-EAGLE draft model. A block holds the anchor and as many guesses as the network was trained for."""

    mask_token_id: int
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mask, size = whole("mask_token_id", self.mask_token_id, minimum=0), self.vocab_size
        need(mask < size, "mask_token_id", mask, f"below vocab_size, {size}")
        need(not self.norm_output, "norm_output", True, "false, since nothing is fed on")


class PEagleNetwork(Eagle3Base):
    """The layers, `fc`, norms, embedding and a head of its own. Names of parameters are as in `Eagle3Network`.

    Row s stands for the token x[s], which it sees, and guesses x[s + 1]; it gets the fused features of s - 1. The rows
    behind the anchor's are `masks`.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): _layer(config) for i in range(1, config.num_hidden_layers)})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.taps) * config.hidden_size))

    def masks(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and features, each `[B, count, H]`, of rows whose tokens are to be guessed."""
        token = torch.tensor(self.config.mask_token_id, device=self.mask_hidden.device)
        embedded, feature = self.embed_tokens(token), self.fuse(self.mask_hidden)
        return embedded.expand(batch, count, -1), feature.expand(batch, count, -1)

    def forward(self, embedded: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States `[B, N, H]` of rows, before the last norm: what `logits` takes.

        Args:
            embedded, feature: `[B, N, H]`.
            positions: `[B, N]`.
            attend: Attention of a layer's rows to those that they see, themselves included.
        """
        x = self.first(embedded, feature, positions, lambda *heads: attend(0, *heads))
        angles = self.rotary(positions, x.dtype)
        for index, layer in enumerate(self.layers.values(), start=1):
            x = layer(x, *angles, index, attend)
        return x


def _layer(config: PEagleConfig) -> DraftLayer:
    layer = DraftLayer(config)
    if not config.qk_norm:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()  # type: ignore[assignment]
    return layer
