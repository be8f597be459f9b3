"""Unmasking strategies: which tokens of a block a forward pass unmasks."""

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
    """Draft tokens of the M masked positions of one block, from left to right.

    Attributes:
        confidence: Probability of each token under the model, before temperature, top-k and top-p, `[M]`.
        entropy: Entropy of that distribution in nats, `[M]`.
        order: Uniform random number of each position, the same in all passes over the block, `[M]`.
    """

    confidence: Tensor
    entropy: Tensor
    order: Tensor


class Strategy(Protocol):
    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        """Return the draft tokens to unmask, `[M]` bool, at least one of them true."""


@settings
class FirstHitting:
    """Unmasks one random token per pass: time jumps to the next unmasking of the reverse process."""

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return _only(draft_tokens.order.argmax(), draft_tokens)


@settings
class Ancestral:
    """Runs the reverse process in equal time steps, each of which unmasks a token with the same probability.

    Steps that unmask nothing need no pass, since the network's input stays the same.

    Attributes:
        steps: Steps from noise to text, of each block.
    """

    steps: Count = 16

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        steps = (draft_tokens.order * self.steps).long()
        return steps == steps.max()


@settings
class Static:
    """Unmasks a fixed number of tokens per pass, the most probable ones.

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
    """Unmasks all tokens above a probability, and always the most probable one.

    Attributes:
        threshold: Minimum probability.
    """

    threshold: Share = 0.9

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return (draft_tokens.confidence >= self.threshold) | _only(draft_tokens.confidence.argmax(), draft_tokens)


@settings
class EntropyBounded:
    """Unmasks the tokens of least entropy, as many as a bound on the sum of entropies allows.

    The sum without the largest entropy bounds the error of sampling the tokens independently (arXiv 2505.24857).

    Attributes:
        bound: Largest sum, in nats.
    """

    bound: Amount = 0.3

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        entropies, order = draft_tokens.entropy.sort()
        within_bound = entropies.cumsum(dim=0) - entropies <= self.bound  # the last one has the largest entropy
        return torch.zeros_like(within_bound).index_copy(0, order, within_bound)


@settings
class LeftToRight:
    """Unmasks the first masked token."""

    def choose(self, draft_tokens: DraftTokens) -> Tensor:
        return _only(torch.zeros((), dtype=torch.int64), draft_tokens)


STRATEGIES: dict[str, type[Any]] = {
    "first_hitting": FirstHitting,
    "ancestral": Ancestral,
    "static": Static,
    "threshold": Threshold,
    "entropy": EntropyBounded,
    "left_to_right": LeftToRight,
}


def read_strategy(text: str) -> Strategy:
    """Parse a strategy: its name, optionally followed by `=` and its value, such as "threshold=0.9".

    Raises:
        UsageError: The name is unknown, or the value invalid.
    """
    name, equals, value = text.partition("=")
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(STRATEGIES)}."
        raise UsageError(f"strategy is {text!r}; {hint}")
    kind = STRATEGIES[name]
    names = [field.name for field in fields(kind)]
    if equals and not names:
        raise UsageError(f"strategy is {text!r}; {name} takes no value.")
    strategy: Strategy = kind(**{names[0]: from_text(kind, names[0], value)}) if equals else kind()
    return strategy


def _only(position: Tensor, draft_tokens: DraftTokens) -> Tensor:
    return torch.arange(len(draft_tokens.order)) == position
