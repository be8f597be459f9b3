"""Memory of finished requests, so that a request which begins like one of them need not read those tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.drafters import State
from blockdraft.targets import Cache


@dataclass(frozen=True)
class Prefix:
    """Tokens, and what target and drafter remember of them: one row each."""

    tokens: list[int]
    cache: Cache
    state: State


class PrefixStore:
    """Holds the most recently used prefixes, as many as fit.

    Args:
        max_tokens: Most tokens of all prefixes together; 0 keeps none.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._prefixes: list[Prefix] = []  # the most recently used one is last

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix; what it contains as a whole, and the least recently used, make room for it."""
        if len(prefix.tokens) > self.max_tokens:
            return
        self._prefixes = [p for p in self._prefixes if _common(p.tokens, prefix.tokens) < len(p.tokens)]
        self._prefixes.append(prefix)
        while sum(len(p.tokens) for p in self._prefixes) > self.max_tokens:
            self._prefixes.pop(0)

    def longest(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest remembered beginning of a prompt, its last token left out: that one must yield logits.

        Returns:
            A copy, cut to the tokens in common; None if not even the first token is remembered.
        """
        lengths = [_common(p.tokens, prompt[:-1]) for p in self._prefixes]
        length = max(lengths, default=0)
        if length == 0:
            return None
        found = self._prefixes.pop(lengths.index(length))
        self._prefixes.append(found)
        return Prefix(found.tokens[:length], found.cache.prefix(0, length), found.state.prefix(0, length))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
