"""Which tokens of a block are settled in a pass. A strategy looks at guesses and changes nothing."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Share, from_text, settings


@dataclass(frozen=True)
class Guesses:
    """What the model says of the M tokens of one block that are not known yet, from left to right.

    Attributes:
        confidence: `[M]` probability of each guess under the model's own distribution, before temperature and cuts.
        entropy: `[M]` nats, of that distribution.
        order: `[M]` uniform numbers, one of each place of the block, which stay the same in all its passes.
    """

    confidence: Tensor
    entropy: Tensor
    order: Tensor


class Strategy(Protocol):
    def choose(self, guesses: Guesses) -> Tensor:
        """`[M]` bool, at least one of them true: the guesses that become tokens now."""


@settings
class FirstHitting:
    """One token a pass, at random: when time runs on to the moment at which the next one is unmasked, this is it."""

    def choose(self, guesses: Guesses) -> Tensor:
        return _one(guesses.order.argmax(), guesses)


@settings
class Ancestral:
    """The reverse process in so many steps of equal length: each token is unmasked in one of them, each equally likely.
    Steps that unmask nothing need no pass, since the network's input stays.

    Attributes:
        steps: From noise to text, for each block.
    """

    steps: Count = 16

    def choose(self, guesses: Guesses) -> Tensor:
        steps = (guesses.order * self.steps).long()
        return steps == steps.max()


@settings
class Static:
    """The surest tokens, equally many in each pass.

    Attributes:
        tokens: Of a pass.
    """

    tokens: Count = 2

    def choose(self, guesses: Guesses) -> Tensor:
        chosen = torch.zeros_like(guesses.confidence, dtype=torch.bool)
        chosen[guesses.confidence.topk(min(self.tokens, len(chosen))).indices] = True
        return chosen


@settings
class Threshold:
    """All tokens that are sure enough, and the surest one in any case.

    Attributes:
        threshold: Probability from which on a guess is sure enough.
    """

    threshold: Share = 0.9

    def choose(self, guesses: Guesses) -> Tensor:
        return (guesses.confidence >= self.threshold) | _one(guesses.confidence.argmax(), guesses)


@settings
class EntropyBounded:
    """As many tokens, the surest first, as their entropies allow: what all but the least sure have together bounds how
    much is lost by drawing them as if they did not depend on each other (arXiv 2505.24857).

    Attributes:
        bound: Of that sum, in nats.
    """

    bound: Amount = 0.3

    def choose(self, guesses: Guesses) -> Tensor:
        entropies, places = guesses.entropy.sort()
        enough = entropies.cumsum(dim=0) - entropies <= self.bound  # the last one has the largest entropy
        return torch.zeros_like(enough).index_copy(0, places, enough)


@settings
class LeftToRight:
    """The first token that is not known."""

    def choose(self, guesses: Guesses) -> Tensor:
        return _one(torch.zeros((), dtype=torch.int64), guesses)


STRATEGIES: dict[str, type[Any]] = {
    "first_hitting": FirstHitting,
    "ancestral": Ancestral,
    "static": Static,
    "threshold": Threshold,
    "entropy": EntropyBounded,
    "left_to_right": LeftToRight,
}


def read_strategy(text: str) -> Strategy:
    """A strategy from its name, and behind an equals sign its one value, if it has one: "threshold=0.9".

    Raises:
        UsageError: There is none of this name, or its value is none.
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


def _one(place: Tensor, guesses: Guesses) -> Tensor:
    return torch.arange(len(guesses.order)) == place
