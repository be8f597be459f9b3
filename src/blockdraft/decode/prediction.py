"""Draft tokens from a text that an output is expected to repeat."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from blockdraft.decode.suffix_index import MatchRates

START = (0.6, 0.75, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98)  # initial acceptance rates, as in `MatchRates`
MIN_PROB = 0.05  # acceptance probability of a path below which it ends
MAX_MATCH = 8  # compared tokens before a position
CANDIDATES = 16  # positions before and behind the last one that are compared
NEAR = 16  # tokens ahead of the last position within which a match of one token counts
MAX_REPLACED, MAX_REPLACEMENT = 4, 8  # tokens of a replaced passage, and of what replaces it, that are repeated
MAX_SHARE = 25  # a passage that makes up a larger part of the text than the inverse is not replaced further on
MAX_GROWTH = 2  # times its first length that replacements may make a text long, since each may multiply the next


class Prediction:
    """Expected text of an output, which is drafted while the output agrees with it.

    After a change the position is found again by a short match of the output's end, the nearest if several are equally
    long. Directly after a difference one token is assumed to have been replaced. A replaced passage, such as a name, is
    replaced further on too, until the output contradicts.

    Attributes:
        agreed: Tokens that match before the position.
    """

    def __init__(self, tokens: Sequence[int], agreed: int = 4 * MAX_MATCH) -> None:
        self.agreed = agreed
        self.tokens = list(tokens)
        self._max_length = MAX_GROWTH * len(self.tokens)
        self._output: list[int] = []
        self._ends: dict[int, list[int]] = {}  # positions behind each token, filled at the first difference
        self._rates = MatchRates(START)
        self.position: int | None = 0  # position of the next token, if known
        self._nearest = 0  # last known position
        self._difference: tuple[int, int] | None = None  # its positions in text and output, until both agree again

    @property
    def length(self) -> int:
        """Number of tokens of the output."""
        return len(self._output)

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow the next tokens of the output."""
        for token in tokens:
            self._output.append(token)
            self._follow_last()

    def draft(self, most: int) -> tuple[list[int], list[float]]:
        """Return at most `most` tokens that should follow the output, and their acceptance probabilities."""
        if self.position is None:
            return [], []
        following = self.tokens[self.position : self.position + most]
        acceptance_probs = self._rates.path_probs(self.agreed, len(following), MIN_PROB)
        return following[: len(acceptance_probs)], acceptance_probs

    def _follow_last(self) -> None:
        position = self.position
        agrees = False
        if position is not None and position < len(self.tokens):
            agrees = self.tokens[position] == self._output[-1]
            self._rates.learn(self.agreed, agrees)
        if position is not None and agrees:
            self.position = position + 1
            self.agreed += 1
        else:
            followed = position is not None and self.agreed > 0
            if position is not None and followed and self._difference is None:
                self._difference = position, len(self._output) - 1
            self.position, self.agreed = self._realigned()
            if self.position is None and followed:
                self.position = self._nearest + 1  # as if one token had been replaced
        if self.position is not None:
            self._nearest = self.position
        if self._difference is not None:
            self._repeat_replacement(*self._difference)

    def _realigned(self) -> tuple[int | None, int]:
        """Return the best position for the output, if any, and the number of tokens that match before it."""
        if not self._ends:
            self._ends = defaultdict(list)
            for position, token in enumerate(self.tokens, start=1):
                self._ends[token].append(position)
        ends = self._ends.get(self._output[-1], [])
        middle = bisect_left(ends, self._nearest)
        best, longest = None, 0
        for candidate in sorted(
            ends[max(middle - CANDIDATES, 0) : middle + CANDIDATES], key=lambda place: abs(place - self._nearest)
        ):
            length = self._match_length(candidate)
            if length > longest and (length > 1 or 0 <= candidate - self._nearest <= NEAR):
                best, longest = candidate, length
        return best, longest

    def _match_length(self, position: int) -> int:
        length, most = 1, min(MAX_MATCH, position, len(self._output))
        while length < most and self.tokens[position - 1 - length] == self._output[-1 - length]:
            length += 1
        return length

    def _repeat_replacement(self, begin: int, output_begin: int) -> None:
        """Replace what was replaced in the rest of the text too, once text and output agree in two tokens again."""
        output_end = len(self._output) - self.agreed
        if self.position is None or self.agreed < 2:
            if output_end - output_begin > MAX_REPLACEMENT:
                self._difference = None
            return
        self._difference = None
        old, new = self.tokens[begin : self.position - self.agreed], self._output[output_begin:output_end]
        if not 0 < len(old) <= MAX_REPLACED or not 0 < len(new) <= MAX_REPLACEMENT:
            return
        rest, count = replaced(self.tokens[self.position :], old, new)
        if 0 < count <= 1 + len(self.tokens) // MAX_SHARE and self.position + len(rest) <= self._max_length:
            self.tokens[self.position :] = rest
            self._ends = {}


def replaced(tokens: list[int], old: list[int], new: list[int]) -> tuple[list[int], int]:
    """Return tokens in which a passage is replaced wherever it occurs, and how often it occurs."""
    result, position, count = list[int](), 0, 0
    with suppress(ValueError):  # none is left; `index` reads a long text much faster than a loop
        while True:
            begin = tokens.index(old[0], position)
            result += tokens[position:begin]
            position = begin + 1
            if tokens[begin : begin + len(old)] == old:
                result += new
                position, count = begin + len(old), count + 1
            else:
                result.append(old[0])
    return result + tokens[position:], count
