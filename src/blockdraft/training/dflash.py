"""The training step of DFlash (arXiv 2602.06036): blocks at random anchors, each blind to the others.

A block at anchor p holds `[x_p, mask, ..., mask]` at positions p, p+1, ...; it sees the features of the tokens strictly
before p, because those of the anchor itself do not exist yet when a block is drafted. Slot j is taught token p + j.

Letters: B sequences, S tokens of a sequence, A anchors of a sequence, N slots of a block, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.nn.attention import attend
from blockdraft.nn.dflash import DFlashNetwork

# Decay constants for the block sizes of the paper; between and beyond them `default_gamma` goes by proportion.
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    return GAMMA.get(block_size, 7.0 * block_size / 16)


def sample_anchors(supervised_BS: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw anchors among supervised positions whose next token is supervised too, without replacement.

    Args:
        supervised_BS: Bool; tokens that the target wrote.
        count: Anchors a sequence.

    Returns:
        `[B, count]` int64, -1 where a sequence has too few positions.
    """
    eligible = supervised_BS & F.pad(supervised_BS[:, 1:], (0, 1))
    noise = torch.rand(eligible.shape, generator=generator).to(eligible.device)
    scores, anchors = noise.masked_fill(~eligible, -1.0).topk(count, dim=-1)
    return anchors.masked_fill(scores < 0, -1)


def block_tokens(tokens_BS: Tensor, anchors_BA: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions of each anchor's block, `[B, A, N]` both; positions may lie past the sequence."""
    positions = anchors_BA.unsqueeze(-1) + torch.arange(block_size, device=anchors_BA.device)
    inside = positions.clamp(0, tokens_BS.size(1) - 1)
    return tokens_BS.gather(1, inside.flatten(1)).view_as(positions), positions


def draft_hidden(
    network: DFlashNetwork, features_BSF: Tensor, anchors_BA: Tensor, anchor_embedding: Tensor, mask_embedding: Tensor
) -> Tensor:
    """The draft pass of every block at once.

    Args:
        network: The draft network.
        features_BSF: Tapped target outputs, `[B, S, m * H]`.
        anchors_BA: Anchor positions; a negative one gives a meaningless block.
        anchor_embedding: `[B, A, H]`, the target's embedding of the anchors' tokens.
        mask_embedding: `[H]`.

    Returns:
        `[B, A, N, H]`, as the drafter computes it when it decodes at that anchor.
    """
    config = network.config
    (batch, length, _), count, size = features_BSF.shape, anchors_BA.size(1), config.block_size
    device = features_BSF.device
    everywhere = torch.arange(length, device=device).expand(batch, length)
    keys_LBKSD, values_LBKSD = network.context(features_BSF, everywhere)

    anchors = anchors_BA.flatten()
    slots = torch.arange(size, device=device)
    positions = anchors.clamp(min=0)[:, None] + slots
    block = torch.cat(
        [anchor_embedding.unsqueeze(2), mask_embedding.expand(batch, count, size - 1, -1)], dim=2
    ).flatten(0, 1)

    masks = {}
    for kind in set(config.layers):
        context = (everywhere[:1, None, :] < anchors[:, None, None]).expand(-1, size, -1)
        within = slots[:, None] >= slots if kind.causal else torch.ones(size, size, device=device).bool()
        if kind.window is not None:
            context = context & (positions[:, :, None] - everywhere[:1, None, :] < kind.window)
            within = within & ((slots[:, None] - slots).abs() < kind.window)
        masks[kind] = torch.cat([context, within.expand(len(anchors), -1, -1)], dim=-1)

    def attend_to_context(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context_keys = keys_LBKSD[layer].repeat_interleave(count, dim=0)
        context_values = values_LBKSD[layer].repeat_interleave(count, dim=0)
        keys, values = torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
        return attend(queries, keys, values, masks[config.layers[layer]])

    hidden: Tensor = network(block, positions, attend_to_context)
    return hidden.view(batch, count, size, -1)


def decayed_cross_entropy(
    logits_BANV: Tensor, labels_BAN: Tensor, supervised_BAN: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of slots 1, 2, ... with weight exp(-(k - 1) / gamma) for slot k (paper, section 4).

    Args:
        logits_BANV: Logits of slots 1 to N-1.
        labels_BAN: Tokens of these slots.
        supervised_BAN: Which slots count.
        gamma: Decay constant in slots.

    Returns:
        Sum of weighted losses and sum of weights, so that a mean can be taken over ranks and accumulation steps.
    """
    decay = torch.exp(-torch.arange(logits_BANV.size(2), device=logits_BANV.device) / gamma)
    weights = supervised_BAN * decay
    losses = F.cross_entropy(logits_BANV.flatten(0, 2).float(), labels_BAN.flatten(), reduction="none")
    return (losses.view_as(weights) * weights).sum(), weights.sum()


def accepted_length(logits_BANV: Tensor, labels_BAN: Tensor, supervised_BAN: Tensor) -> Tensor:
    """Leading correct slots of each block plus the bonus token, `[B, A]`: what decoding would commit there."""
    right = (logits_BANV.argmax(dim=-1) == labels_BAN) & supervised_BAN
    return right.long().cumprod(dim=-1).sum(dim=-1) + 1
