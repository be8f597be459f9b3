"""Prompt lookup: what followed the same tokens earlier in the text is guessed to follow again (A. Saxena, "Prompt
Lookup Decoding", 2023). It needs no model, and pays where an answer repeats its prompt or itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal
from blockdraft.drafters.base import Drafter, Entry

BLOCK_SIZE = 16
LONGEST = 4  # most tokens that are matched; longer matches rarely tell places apart that these do not
GUESSES_A_TOKEN = 4  # for each matched token, since what a single one is followed by soon turns out otherwise
START = (0.2, 0.4, 0.6, 0.75)  # share of the guesses after matches of 1, 2, ... tokens that come true, to begin with
NEWEST = 0.05  # weight of the newest one in that share
RECENT = 8  # most occurrences of one n-gram that a tree looks at
BYTES_PER_TOKEN = 800  # of the text and its index on the host; measured on text that repeats nothing


class Text:
    """The committed tokens of one row, with an index of their n-grams that grows with them.

    Attributes:
        rates: How often a match of 1, 2, ... tokens was followed by the same token again, lately more than long ago.
            It is learned at each token of the text, whether or not anyone guessed there, so it depends on nothing else.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.rates = list(START)
        self._foretold: tuple[int, int] | None = None  # of the indexed text: tokens of the longest match, what followed
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of each n-gram, the positions right behind it
        self._indexed = 0

    def continuations(self, anchor: int, most: int) -> Iterator[tuple[int, list[int]]]:
        """How many of the last tokens matched earlier ones, and what followed these: at most `most` tokens each time.

        Longer matches come first, and of equally long ones the most recent. Where a continuation runs into the end of
        the text it goes on with itself, as the text would if it repeated this passage.
        """
        self._index()
        last = (*self.tokens[-(LONGEST - 1) :], anchor)
        for length in range(len(last), 0, -1):
            count = min(most, GUESSES_A_TOKEN * length)
            for end in reversed(self._ends.get(last[-length:], [])[-RECENT:]):
                yield length, list(islice(cycle([*self.tokens[end : end + count], anchor]), count))

    def _index(self) -> None:
        for end in range(self._indexed + 1, len(self.tokens) + 1):
            if self._foretold is not None:
                length, token = self._foretold
                self.rates[length - 1] += NEWEST * ((token == self.tokens[end - 1]) - self.rates[length - 1])
            self._foretold = None
            for length in range(1, min(LONGEST, end) + 1):
                ends = self._ends.setdefault(tuple(self.tokens[end - length : end]), [])
                if ends:
                    self._foretold = length, self.tokens[ends[-1]]
                ends.append(end)
        self._indexed = len(self.tokens)


class Texts:
    """The texts of some rows.

    Attributes:
        rows: Of a batch, by the first of their slots.
    """

    def __init__(self, rows: Sequence[int], of_rows: dict[int, Text]) -> None:
        self.rows = list(rows)
        self._of_rows = of_rows

    @property
    def texts(self) -> list[Text]:
        return [self._of_rows[row] for row in self.rows]

    def of(self, rows: Sequence[int]) -> Texts:
        return Texts(rows, self._of_rows)

    def open(self, row: int, capacity: int) -> None:
        self._of_rows[row] = Text()

    def close(self, row: int) -> None:
        del self._of_rows[row]

    def shrink(self, row: int, capacity: int) -> None:
        if capacity < len(self._of_rows[row].tokens):
            self.copy(row, row, capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        self._of_rows[row] = Text(self._of_rows[source].tokens[:length])

    def wipe(self, row: int, whole: bool = False) -> None:
        pass


class PromptLookupDrafter(Drafter):
    """Guesses by looking up the longest match of the last tokens, anchor included, in prompt and answer so far.

    A chain is the continuation of the most recent among the longest matches; a tree merges the continuations of several
    matches. A row without a match gets no guesses. How likely guesses are is learned from the text; no decision is made
    by it here, so `plan.cycle_seconds` is ignored, as are `plan.params` and `plan.draws`.
    """

    path: Path | None = None
    taps: tuple[int, ...] = ()
    block_size = BLOCK_SIZE
    knows_probabilities = knows_lengths = False

    def new_state(self, batch: int, capacity: int) -> Texts:
        rows = [place * capacity for place in range(batch)]
        return Texts(rows, {row: Text() for row in rows})

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * BYTES_PER_TOKEN

    def weight_bytes(self) -> int:
        return 0

    def observe(self, state: Texts, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        for text, row, length in zip(state.texts, tokens.tolist(), lengths, strict=True):
            text.tokens += row[:length]

    def propose(self, state: Texts, anchor: Tensor, plan: Plan) -> Proposal:
        rows = [_tree(text, token, plan) for text, token in zip(state.texts, anchor.tolist(), strict=True)]
        count = max(len(tokens) for tokens, _, _ in rows)
        tokens = [[*tokens, *[0] * (count - len(tokens))] for tokens, _, _ in rows]
        parents = [[*parents, *[-1] * (count - len(parents))] for _, parents, _ in rows]
        chances = tuple(tuple(chances) for _, _, chances in rows)
        return Proposal(torch.tensor(tokens, device=anchor.device), torch.tensor(parents), chances=chances)


def _tree(text: Text, anchor: int, plan: Plan) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and chances of one row: its first continuation, or as many as the tree's budget holds.

    A guess that comes true makes the match longer by a token, so its child has the rate of that length, of what its
    likelier siblings have left.
    """
    tokens, parents, chances = [anchor], [-1], list[float]()
    left = [1.0]  # of each node: the chance that it is accepted and none of its children so far
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    budget = plan.tree_budget or plan.block_size - 1
    for length, guesses in text.continuations(anchor, plan.block_size - 1):
        node = 0
        for depth, token in enumerate(guesses):
            if (node, token) not in nodes:
                if len(tokens) > budget:
                    return tokens, parents, chances
                nodes[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                chance = left[node] * text.rates[min(length + depth, LONGEST) - 1]
                left[node] -= chance
                left.append(chance)
                chances.append(chance)
            node = nodes[node, token]
        if plan.tree_budget == 0:
            break
    return tokens, parents, chances


DRAFTER = Entry(lambda folder, target: PromptLookupDrafter(), by_name=True)
