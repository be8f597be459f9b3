"""The DSpark draft network (arXiv 2607.05147): DFlash v1 with a Markov head and a confidence head.

Position j of a block predicts the token at anchor + j + 1, one token further than in DFlash. A new network adds nothing
to the logits of the v1 network in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, need


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DraftConfig):
    """Configuration of a DSpark drafter: that of DFlash v1, and of the two heads.

    Every position of a block drafts a token, the anchor's included, so a block has `block_size` draft tokens.
    """

    markov_rank: int  # width of the factors of the bias
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # whether it reads the token before its draft token
    confidence_temperatures: tuple[float, ...] | None = None  # divisors of the confidence's logits, one per position

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, temperatures = self.markov_head_type, self.confidence_temperatures
        need(kind == "vanilla", "markov_head_type", kind, "vanilla, the one that is supported")
        if temperatures is not None:
            one_each = isinstance(temperatures, list | tuple) and len(temperatures) == self.block_size
            sound = one_each and all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures)
            need(
                sound, "confidence_temperatures", temperatures, f"{self.block_size} positive numbers, one per position"
            )
            object.__setattr__(self, "confidence_temperatures", tuple(temperatures))


EMBEDDING_STD = 0.01  # of the first factor of a new bias; the second factor is 0


class MarkovHead(nn.Module):
    """Bias on the logits of a draft token by the token before it: `W1[token] W2` of rank r (paper, section 3)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=EMBEDDING_STD)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Projection to the logit of the probability that a draft token is accepted, given that those before it were."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.confidence_head_with_markov * config.markov_rank, 1)


class DSparkNetwork(DFlashNetwork):
    """DFlash v1 with two heads. Parameters of v1 keep their names."""

    config_class: type[DraftConfig] = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def previous(self, tokens: Tensor) -> Tensor:
        """Return the first factor of the bias after tokens: `[..., r]` for tokens `[...]` int64."""
        return cast(Tensor, self.markov_head.markov_w1(tokens))

    def bias(self, previous: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Return the bias on the logits of the draft tokens after tokens.

        Args:
            previous: `[..., P, r]`, `previous` of these tokens.
            candidates: `[..., K]` int64, tokens to compute the bias of; None is the whole vocabulary.

        Returns:
            `[..., P, K]` or `[..., P, V]`.
        """
        successors = self.markov_head.markov_w2.weight
        return F.linear(previous, successors) if candidates is None else previous @ successors[candidates].mT

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return logits of the probability that a draft token is accepted, given that those before it were, float32.

        Args:
            hidden: `[..., H]`, hidden states of the draft tokens' positions.
            previous: `[..., r]`, `previous` of the tokens before them.

        Returns:
            `[...]`, before `confidence_temperatures`.
        """
        assert self.confidence_head is not None
        hidden_states = torch.cat([hidden, previous], dim=-1) if self.config.confidence_head_with_markov else hidden
        return cast(Tensor, self.confidence_head.proj(hidden_states)).squeeze(-1).float()
