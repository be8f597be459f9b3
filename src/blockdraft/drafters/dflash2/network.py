"""The DFlash2 draft network: DFlash v1 with convolutions around each sublayer and a selector among candidates.

The architecture is that of z-lab's `dflash` package (`dflash/model.py`). A new network computes what the v1 network in
it does: its convolutions are the identity and its selector adds nothing. So training can start from a v1 checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, need
from blockdraft.nn.draft_network import Attend, DraftLayer


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DraftConfig):
    """Configuration of a DFlash2 drafter: that of DFlash v1, and sizes of the convolutions and the selector."""

    conv_kernel_size: int  # positions that a convolution reads: its own and earlier ones
    conv_group_size: int  # neighbouring channels that share a correction of the kernel
    selector_rank: int  # width of the codebooks
    selector_top_k: int  # candidates per position

    def __post_init__(self) -> None:
        super().__post_init__()
        group, size = self.conv_group_size, self.hidden_size
        need(size % group == 0, "conv_group_size", group, f"a divisor of hidden_size, {size}")
        top_k, vocab = self.selector_top_k, self.vocab_size
        need(top_k <= vocab, "selector_top_k", top_k, f"at most vocab_size, {vocab}")


# Standard deviation of a new predecessor codebook; a new successor codebook is 0. In a short warm-started run on the
# bundled pair (80 steps, AdamW 6e-4), 50% of the selector's choices were right with 0.5, 42% with the usual 0.02.
CODEBOOK_STD = 0.5


class DynamicConv(nn.Module):
    """Convolutions along the positions of a block, one before and one after a sublayer.

    Side 0 acts on the sublayer's input x, side 1 on its output. A side maps y at position j to the sum over taps o of
    `(base[side, o] + delta[side, o]) * y[j - o]`. The corrections delta of both sides are computed from x, one for each
    position and group of channels. Before position 0, y is zero, so nothing outside the block is read.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.corrections = (2, taps, size // config.conv_group_size)
        identity = torch.zeros(2, taps, size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(size, 2 * taps * self.corrections[2], bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x_BNH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output `[B, N, H]` of the sublayer between the convolutions, for B blocks."""
        delta = self.kernel_projection(x_BNH).unflatten(-1, self.corrections).unsqueeze(-1)
        kernels_BN2KH = (self.base_kernel.unflatten(-1, (self.corrections[2], -1)) + delta).flatten(-2)
        before_BNKH, after_BNKH = kernels_BN2KH.unbind(dim=2)
        return _convolve(sublayer(_convolve(x_BNH, before_BNKH)), after_BNKH)


def _convolve(x_BNH: Tensor, kernel_BNKH: Tensor) -> Tensor:
    out = kernel_BNKH[:, :, 0] * x_BNH
    for tap in range(1, min(kernel_BNKH.size(2), x_BNH.size(1))):
        out = out + F.pad(kernel_BNKH[:, tap:, tap] * x_BNH[:, :-tap], (0, 0, tap, 0))
    return out


class ConvolvedLayer(DraftLayer):
    """Draft layer with convolutions before and after attention and MLP."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, pairs: Tensor | None = None
    ) -> Tensor:
        assert pairs is None, "convolutions are for whole blocks"
        x = x + self.attention_conv(self.input_layernorm(x), lambda y: self.self_attn(y, cos, sin, layer, attend))
        out: Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return out


class CandidateSelector(nn.Module):
    """Score of token b after token a at a position with hidden state h: `<A[a] * H(h), B[b]>`.

    A and B are codebooks of rank r over the vocabulary, H is a projection to r, and * multiplies element by element.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(CODEBOOK_STD * torch.randn(size))
        self.successor_codebook = nn.Parameter(torch.zeros(size))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """Return scores of K candidates after each of P tokens.

        Args:
            hidden: `[..., H]`, hidden states of the positions.
            predecessors: `[..., P]` int64.
            candidates: `[..., K]` int64.

        Returns:
            `[..., P, K]`.
        """
        gate: Tensor = self.hidden_projection(hidden).unsqueeze(-2) * F.embedding(
            predecessors, self.predecessor_codebook
        )
        return gate @ F.embedding(candidates, self.successor_codebook).mT


class DFlash2Network(DFlashNetwork):
    """DFlash v1 with convolutions and a candidate selector. Parameters of v1 keep their names."""

    config_class: type[DraftConfig] = DFlash2Config
    layer_class: type[DraftLayer] = ConvolvedLayer
    convolved = True
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `selector_top_k` best tokens of each position, and their logits, `[..., K]` each.

        Tokens are ascending int64.

        Args:
            logits: `[..., V]`, from `adjust_logits`.
        """
        ids = logits.topk(self.config.selector_top_k, dim=-1, sorted=False).indices
        ids = ids.sort(dim=-1).values  # so that the lowest id wins among equal scores, as everywhere
        return ids, logits.gather(-1, ids)

    def lattice(self, hidden_BDH: Tensor, logits_BDV: Tensor, anchor_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates of the D positions behind the anchor, and their scores after each other.

        Args:
            hidden_BDH: Hidden states of the positions.
            logits_BDV: Their logits, from `adjust_logits`.
            anchor_B: int64.

        Returns:
            Tokens `[B, D, K]` int64, and scores `[B, D, K, K]` float32: `[b, d, p, k]` is the score of candidate k of
            position d after candidate p of the position before. Before the first position is the anchor for every p.
        """
        ids, unary = self.candidates(logits_BDV)
        anchors = anchor_B[:, None, None].expand(-1, 1, ids.size(2))
        pairs = self.candidate_selector(hidden_BDH, torch.cat([anchors, ids[:, :-1]], dim=1), ids)
        return ids, unary.unsqueeze(2).float() + pairs.float()
