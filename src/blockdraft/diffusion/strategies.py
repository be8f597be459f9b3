"""Strategies: choices of the tokens of a block that a pass settles."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Share, from_text, settings


@dataclass(frozen=True)
class DraftTokens:
    """Guesses of the M unknown tokens of one block, from left to right.

    Attributes:
        confidence: Probability of each guess under the model's own distribution, before temperature and cuts, `[M]`.
        entropy: Entropy of that distribution in nats, `[M]`.
        order: Uniform random numbers, `[M]`, one for each position of the block, the same in all its passes.
    """

    confidence: Tensor
    entropy: Tensor
    order: Tensor


class Strategy(Protocol):
    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        """Guesses that become tokens in this pass, `[M]` bool, at least one of them true."""


@settings
class FirstHitting:
    """One token a pass, at random: time jumps to the moment at which the reverse process unmasks the next token."""

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return _one(draft_tokens.order.argmax(), draft_tokens)


@settings
class Ancestral:
    """The reverse process in steps of equal length, each of which unmasks a token with the same probability. Steps that
    unmask nothing need no pass, since the network's input stays the same.

    Attributes:
        steps: Steps from noise to text, of each block.
    """

    steps: Count = 16

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        steps = (draft_tokens.order * self.steps).long()
        return steps == steps.max()


@settings
class Static:
    """The likeliest tokens, as many in each pass.

    Attributes:
        tokens: Tokens of a pass.
    """

    tokens: Count = 2

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        chosen = torch.zeros_like(draft_tokens.confidence, dtype=torch.bool)
        chosen[draft_tokens.confidence.topk(min(self.tokens, len(chosen))).indices] = True
        return chosen


@settings
class Threshold:
    """All tokens with a certain probability, and the likeliest one in any case.

    Attributes:
        threshold: Least probability.
    """

    threshold: Share = 0.9

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return (draft_tokens.confidence >= self.threshold) | _one(draft_tokens.confidence.argmax(), draft_tokens)


@settings
class EntropyBounded:
    """As many tokens as a bound on their entropies allows, those of least entropy first. The sum of the entropies
    without the largest bounds the error of sampling the tokens independently of each other (arXiv 2505.24857).

    Attributes:
        bound: Largest sum, in nats.
    """

    bound: Amount = 0.3

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        entropies, places = draft_tokens.entropy.sort()
        enough = entropies.cumsum(dim=0) - entropies <= self.bound  # the last one has the largest entropy
        return torch.zeros_like(enough).index_copy(0, places, enough)


@settings
class LeftToRight:
    """The first unknown token."""

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return _one(torch.zeros((), dtype=torch.int64), draft_tokens)


STRATEGIES: dict[str, type[Any]] = {
    "first_hitting": FirstHitting,
    "ancestral": Ancestral,
    "static": Static,
    "threshold": Threshold,
    "entropy": EntropyBounded,
    "left_to_right": LeftToRight,
}


def read_strategy(text: str) -> Strategy:
    """Strategy from its name, with its value after an equals sign if it has one, such as "threshold=0.9".

    Raises:
        UsageError: The name is unknown, or the value invalid.
    """
    name, equals, value = text.partition("=")
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        told = f"did you mean {near[0]}?" if near else f"use one of {', '.join(STRATEGIES)}."
        raise UsageError(f"strategy is {text!r}; {told}")
    kind = STRATEGIES[name]
    names = [field.name for field in fields(kind)]
    if equals and not names:
        raise UsageError(f"strategy is {text!r}; {name} takes no value.")
    found: Strategy = kind(**{names[0]: from_text(kind, names[0], value)}) if equals else kind()
    return found


def _one(place: Tensor, draft_tokens: DraftTokens) -> Tensor:
    return torch.arange(len(draft_tokens.order)) == place
