"""Finds the longest earlier match of any context in a growing token sequence, and estimates how far to follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

MAX_UPDATES = 16  # contexts whose latest occurrence is updated per token; longer chains occur in repetitions only
MAX_FOLLOWERS = 8  # different next tokens of one context that are considered
NEWEST = 0.05  # weight of the newest token in an acceptance rate


class SuffixMatch(NamedTuple):
    """The longest suffix of a context that occurs in an index.

    Attributes:
        length: Its number of tokens; 0 without a match.
        state: State of the automaton.
    """

    length: int = 0
    state: int = 0


NO_MATCH = SuffixMatch()


class SuffixIndex:
    """Suffix automaton (Blumer et al., 1985) of a token sequence that grows at its end.

    It has at most two states per token, and appending a token takes constant amortized time. A state stands for all
    contexts that occur at the same positions. Its suffix link leads to the longest shorter context that occurs at
    others too.

    Attributes:
        tokens: The sequence.
        longest: The longest suffix of the sequence that also occurs earlier.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._end = [0]  # for each state, the position behind its latest known occurrence
        self._last = 0
        for token in tokens:
            self.append(token)

    @property
    def longest(self) -> SuffixMatch:
        state = max(self._link[self._last], 0)
        return SuffixMatch(self._length[state], state)

    def append(self, token: int) -> None:
        """Append a token."""
        following, link, length, ends = self._next, self._link, self._length, self._end
        last, end = self._last, len(self.tokens)
        state = link[last]
        for _ in range(MAX_UPDATES):  # the contexts before this token, which is what follows their latest occurrence
            if state <= 0:
                break
            ends[state] = end
            state = link[state]
        self.tokens.append(token)
        new = self._last = len(following)
        following.append({})
        link.append(0)
        length.append(end + 1)
        ends.append(end + 1)
        state = last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state < 0:
            return
        child = following[state][token]
        if length[child] > length[state] + 1:  # its shorter contexts now occur at more positions than the longer ones
            clone = len(following)
            following.append(following[child].copy())
            link.append(link[child])
            length.append(length[state] + 1)
            ends.append(ends[child])
            link[child] = clone
            while state >= 0 and following[state].get(token) == child:
                following[state][token] = clone
                state = link[state]
            child = clone
        link[new] = child

    def extend(self, match: SuffixMatch, token: int) -> SuffixMatch:
        """Return the match of the context that a token makes longer."""
        length, state = match
        while token not in self._next[state]:
            if state == 0:
                return NO_MATCH
            state = self._link[state]
            length = self._length[state]
        return SuffixMatch(length + 1, self._next[state][token])

    def match(self, context: Sequence[int]) -> SuffixMatch:
        """Return the longest suffix of a context that occurs in the sequence."""
        match = NO_MATCH
        for token in context:
            match = self.extend(match, token)
        return match

    def end(self, match: SuffixMatch) -> int:
        """Return the position behind the latest known occurrence of a match."""
        return self._end[match.state]

    def followers(self, match: SuffixMatch) -> Iterator[tuple[int, int]]:
        """Yield the tokens that follow a match or a suffix of it, each with the length of that suffix.

        Longer suffixes come first, and for each suffix the tokens that followed it most recently. A token may come
        again behind a shorter suffix.
        """
        length, state = match
        while state > 0:
            following, ends = self._next[state], self._end
            tokens = list(following)
            if len(tokens) > 1:
                tokens = nlargest(MAX_FOLLOWERS, tokens, key=lambda token: ends[following[token]])
            for token in tokens:
                yield length, token
            state = self._link[state]
            length = self._length[state]


class MatchRates:
    """Acceptance rates of the token that follows a match, by the length of the match.

    Args:
        start: Initial rates after matches of 1, 2, 3, 4, up to 8, 16, 32 and more tokens.
    """

    def __init__(self, start: tuple[float, float, float, float, float, float, float, float]) -> None:
        self._rates = list(start)

    def __getitem__(self, length: int) -> float:
        return self._rates[_bucket(length)]

    def learn(self, length: int, accepted: bool) -> None:
        """Learn whether the token that followed a match came again."""
        bucket = _bucket(length)
        self._rates[bucket] += NEWEST * (accepted - self._rates[bucket])

    def path_probs(self, length: int, most: int, least: float) -> list[float]:
        """Return the acceptance probability of each token of the path behind a match, while it is at least `least`.

        An accepted token makes the match one token longer.
        """
        probs, prob = list[float](), 1.0
        for longer in range(length, length + most):
            prob *= self[longer]
            if prob < least:
                break
            probs.append(prob)
        return probs


def _bucket(length: int) -> int:
    return max(length - 1, 0) if length <= 4 else min((length - 1).bit_length() + 1, 7)
