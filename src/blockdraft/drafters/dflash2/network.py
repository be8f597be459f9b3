"""The DFlash2 draft network: DFlash v1 with convolutions around each sublayer and a selector among candidates.

The architecture is that of z-lab's `dflash` package (`dflash/model.py`). A new network computes what the v1 network in
it does: its convolutions are the identity and its selector adds nothing. So a v1 checkpoint is a start for training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, need
from blockdraft.nn.draft_layer import Attend, DraftLayer


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DraftConfig):
    """A DFlash2 draft model: DFlash v1 with convolutions in its layers and a selector among candidates."""

    conv_kernel_size: int  # slots that a convolution reads: its own and those before
    conv_group_size: int  # neighbouring channels that share a correction of the kernel
    selector_rank: int  # width of the codebooks
    selector_top_k: int  # candidates of a slot

    def __post_init__(self) -> None:
        super().__post_init__()
        group, size = self.conv_group_size, self.hidden_size
        need(size % group == 0, "conv_group_size", group, f"a divisor of hidden_size, {size}")
        top_k, vocab = self.selector_top_k, self.vocab_size
        need(top_k <= vocab, "selector_top_k", top_k, f"at most vocab_size, {vocab}")


# Of a new predecessor codebook; the successor codebook begins at 0. In a short warm-started run on the bundled pair (80
# steps, AdamW 6e-4) the selector came to 50% right choices with 0.5, and to 42% with the 0.02 usual for embeddings.
CODEBOOK_STD = 0.5


class DynamicConv(nn.Module):
    """Convolutions along the slots of a block, one before and one after a sublayer.

    Side 0 acts on the sublayer's input x, side 1 on its output: of y it makes the sum over taps o of
    `(base[side, o] + delta[side, o]) * y[slot - o]`. The corrections delta of both sides come from x, one for each slot
    and group of channels. Before slot 0 there are zeros: nothing from outside the block comes in.
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
        """The sublayer's output between the convolutions, `[B, N, H]`; each of the B rows is one block."""
        delta = self.kernel_projection(x_BNH).unflatten(-1, self.corrections).unsqueeze(-1)
        kernels_BN2KH = (self.base_kernel.unflatten(-1, (self.corrections[2], -1)) + delta).flatten(-2)
        before_BNKH, after_BNKH = kernels_BN2KH.unbind(dim=2)
        return _convolve(sublayer(_convolve(x_BNH, before_BNKH)), after_BNKH)


def _convolve(x_BNH: Tensor, kernel_BNKH: Tensor) -> Tensor:
    out = kernel_BNKH[:, :, 0] * x_BNH
    for tap in range(1, min(kernel_BNKH.size(2), x_BNH.size(1))):
        out[:, tap:].addcmul_(kernel_BNKH[:, tap:, tap], x_BNH[:, :-tap])
    return out


class ConvolvedLayer(DraftLayer):
    """A draft layer whose attention and MLP stand between convolutions."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.attention_conv(self.input_layernorm(x), lambda y: self.self_attn(y, cos, sin, layer, attend))
        out: Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return out


class CandidateSelector(nn.Module):
    """How well one token follows another at a slot: `<A[a] * H(h), B[b]>` for a before b, h the slot's hidden state.

    A and B are codebooks of rank r over the vocabulary, H is a projection to r, * goes by element.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(CODEBOOK_STD * torch.randn(size))
        self.successor_codebook = nn.Parameter(torch.zeros(size))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """Scores of K candidates after each of P tokens.

        Args:
            hidden: `[..., H]`, of each slot.
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
    """DFlash v1 with convolutions in its layers and a candidate selector. What has v1's parameter names is v1's."""

    config_class: type[DraftConfig] = DFlash2Config
    layer_class: type[DraftLayer] = ConvolvedLayer
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The `selector_top_k` best tokens of each slot, by their ids, and their logits; `[..., K]` both.

        Args:
            logits: `[..., V]`, adjusted.
        """
        ids = logits.topk(self.config.selector_top_k, dim=-1, sorted=False).indices
        ids = ids.sort(dim=-1).values  # so that of equal scores the lowest id wins, as everywhere
        return ids, logits.gather(-1, ids)

    def lattice(self, hidden_BDH: Tensor, logits_BDV: Tensor, anchor_B: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of the slots behind the anchor, and what they score after each other.

        Args:
            hidden_BDH: Hidden states of slots 1 to D.
            logits_BDV: Their adjusted logits.
            anchor_B: Int64.

        Returns:
            Tokens `[B, D, K]`, and scores `[B, D, K, K]` float32: `[b, d, p, k]` is that of candidate k of slot d after
            candidate p of the slot before. What comes before the first slot is the anchor, whichever p.
        """
        ids, unary = self.candidates(logits_BDV)
        anchors = anchor_B[:, None, None].expand(-1, 1, ids.size(2))
        pairs = self.candidate_selector(hidden_BDH, torch.cat([anchors, ids[:, :-1]], dim=1), ids)
        return ids, unary.unsqueeze(2).float() + pairs.float()
