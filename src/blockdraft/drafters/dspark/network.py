"""The DSpark draft network (arXiv 2607.05147): DFlash v1, a bias by the guess before, and a guess at acceptance.

The backbone is that of DFlash; only, its slot j stands for the token at anchor + j + 1. A new network adds nothing to
the backbone's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, need


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DraftConfig):
    """A DSpark draft model: DFlash v1 whose slots guess one token further, with a Markov and a confidence head.

    Slot j guesses the token at anchor + j + 1, the anchor's own slot included, so that a block holds `block_size`
    guesses.
    """

    markov_rank: int  # width of the factors of the bias
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # whether it sees the guess before its own
    confidence_temperatures: tuple[float, ...] | None = None  # divisors of the confidence's logits, one a slot

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, temperatures = self.markov_head_type, self.confidence_temperatures
        need(kind == "vanilla", "markov_head_type", kind, "vanilla, the one that is supported")
        if temperatures is not None:
            one_each = isinstance(temperatures, list | tuple) and len(temperatures) == self.block_size
            sound = one_each and all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures)
            need(sound, "confidence_temperatures", temperatures, f"{self.block_size} positive numbers, one a slot")
            object.__setattr__(self, "confidence_temperatures", tuple(temperatures))


EMBEDDING_STD = 0.01  # of a new Markov embedding; what it is multiplied with begins at 0


class MarkovHead(nn.Module):
    """A bias on the logits of a slot by the token before it: `W1[token] W2` of rank r (paper, section 3)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=EMBEDDING_STD)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.confidence_head_with_markov * config.markov_rank, 1)


class DSparkNetwork(DFlashNetwork):
    """DFlash v1 with two heads. What has v1's parameter names is v1's."""

    config_class: type[DraftConfig] = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def previous(self, tokens: Tensor) -> Tensor:
        """`[..., r]` of the tokens `[...]` that stand before the slots, int64."""
        return cast(Tensor, self.markov_head.markov_w1(tokens))

    def bias(self, previous: Tensor, candidates: Tensor | None = None) -> Tensor:
        """What is added to the logits of slots after these tokens.

        Args:
            previous: `[..., P, r]`, from `previous`.
            candidates: `[..., K]` int64, the tokens whose bias is wanted; None is the whole vocabulary.

        Returns:
            `[..., P, K]` or `[..., P, V]`.
        """
        successors = self.markov_head.markov_w2.weight
        return previous @ (successors if candidates is None else successors[candidates]).mT

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of the chance that a slot's guess is accepted, given that those before it were; float32.

        Args:
            hidden: `[..., H]`, of the slots, in order of slots in the second last dimension.
            previous: `[..., r]`, from `previous`.

        Returns:
            `[...]`, before `confidence_temperatures`.
        """
        assert self.confidence_head is not None
        features = torch.cat([hidden, previous], dim=-1) if self.config.confidence_head_with_markov else hidden
        return cast(Tensor, self.confidence_head.proj(features)).squeeze(-1).float()
