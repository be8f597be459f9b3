"""Predicted outputs: draft tokens from a text that an output is expected to repeat."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from blockdraft.decode.suffix_index import MatchRates

START = (0.6, 0.75, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98)  # initial acceptance rates, as in `MatchRates`
MIN_PROB = 0.05  # acceptance probability of a path below which it ends
MAX_MATCH = 8  # compared tokens before a position
CANDIDATES = 16  # positions before and behind the last one that are compared
NEAR = 16  # tokens ahead of the last position within which a match of one token counts


class Prediction:
    """Expected text of an output, which is drafted while the output agrees with it.

    After a change the position is found again by a short match of the output's end, the nearest if several are equally
    long. Directly after a difference one token is assumed to have been replaced.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._ends: dict[int, list[int]] = {}  # positions behind each token, filled at the first difference
        self._rates = MatchRates(START)
        self._observed = 0  # tokens of the output
        self._next: int | None = 0  # position of the next token, if known
        self._nearest = 0  # last known position
        self._agreed = 4 * MAX_MATCH  # tokens that match before the position; at the start all do

    def draft(self, output: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """Return at most `most` tokens that should follow the output, and their acceptance probabilities."""
        for end in range(self._observed + 1, len(output) + 1):
            self._observe(output, end)
        self._observed = len(output)
        if self._next is None:
            return [], []
        following = self._tokens[self._next : self._next + most]
        acceptance_probs = self._rates.path_probs(self._agreed, len(following), MIN_PROB)
        return following[: len(acceptance_probs)], acceptance_probs

    def _observe(self, output: Sequence[int], end: int) -> None:
        """Follow the last token of `output[:end]`."""
        position = self._next
        if position is not None and position < len(self._tokens):
            agrees = self._tokens[position] == output[end - 1]
            self._rates.learn(self._agreed, agrees)
            if agrees:
                self._next = self._nearest = position + 1
                self._agreed += 1
                return
        followed = position is not None and self._agreed > 0
        self._next, self._agreed = self._realigned(output, end)
        if self._next is None and followed:
            self._next = self._nearest + 1  # as if one token had been replaced
        if self._next is not None:
            self._nearest = self._next

    def _realigned(self, output: Sequence[int], end: int) -> tuple[int | None, int]:
        """Return the best position for `output[:end]`, if any, and the number of tokens that match before it."""
        if not self._ends:
            self._ends = defaultdict(list)
            for position, token in enumerate(self._tokens, start=1):
                self._ends[token].append(position)
        ends = self._ends.get(output[end - 1], [])
        middle = bisect_left(ends, self._nearest)
        best, longest = None, 0
        for candidate in sorted(
            ends[max(middle - CANDIDATES, 0) : middle + CANDIDATES], key=lambda place: abs(place - self._nearest)
        ):
            length = self._match_length(candidate, output, end)
            if length > longest and (length > 1 or 0 <= candidate - self._nearest <= NEAR):
                best, longest = candidate, length
        return best, longest

    def _match_length(self, position: int, output: Sequence[int], end: int) -> int:
        length, most = 1, min(MAX_MATCH, position, end)
        while length < most and self._tokens[position - 1 - length] == output[end - 1 - length]:
            length += 1
        return length
