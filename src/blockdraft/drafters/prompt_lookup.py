"""Prompt lookup (A. Saxena, "Prompt Lookup Decoding", 2023): guesses that what followed the same tokens earlier in the
text follows again. It needs no model, and saves time where an answer repeats its prompt or itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.decode.tree import best_count
from blockdraft.drafters.base import Drafter, DrafterSpec

BLOCK_SIZE = 16
LONGEST = 4  # most tokens of a match; longer ones rarely find better places
DRAFT_TOKENS_A_TOKEN = 4  # most guesses per matched token, since guesses behind a short match soon fail
START = (0.2, 0.4, 0.6, 0.75)  # first estimate of the share of right guesses after matches of 1, 2, ... tokens
NEWEST = 0.05  # weight of the newest guess in that share
RECENT = 8  # most occurrences of one n-gram that a tree uses
BYTES_PER_TOKEN = 800  # host memory of the text and its index; measured on text without repetitions


class Text:
    """Committed tokens of one row, with an index of their n-grams that grows with them.

    Attributes:
        rates: Share of the matches of 1, 2, ... tokens that were followed by the same token again, where recent matches
            count more. It is updated at each token of the text, even where nothing was guessed, so it depends on the
            text alone.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.rates = list(START)
        # Length of the longest match at the end of the indexed text, and the token that followed it.
        self._foretold: tuple[int, int] | None = None
        self._ends: dict[tuple[int, ...], list[int]] = {}  # for each n-gram, the positions right behind it
        self._indexed = 0

    def continuations(self, anchor: int, most: int) -> Iterator[tuple[int, list[int]]]:
        """Matches of the last tokens with earlier ones: the length of each, and up to `most` tokens that followed it.

        Longer matches come first, and among equally long ones the most recent. A continuation that reaches the end of
        the text is repeated from its start, as the text would be if it repeated this passage.
        """
        self._index()
        last = (*self.tokens[-(LONGEST - 1) :], anchor)
        for length in range(len(last), 0, -1):
            count = min(most, DRAFT_TOKENS_A_TOKEN * length)
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
    """Texts of some rows.

    Attributes:
        rows: Rows of a batch, each given by its first slot.
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

    def zero_slots(self, row: int, whole: bool = False) -> None:
        pass


class PromptLookupDrafter(Drafter):
    """Guesses by finding the longest match of the last tokens, anchor included, in the prompt and the answer so far.

    A chain is the continuation of the most recent among the longest matches. A tree merges the continuations of several
    matches. A row without a match gets no guesses. The probability of a guess is learned from the text; with
    `plan.cycle_seconds` a chain ends where a further guess would not save time. `plan.params` and the
    numbers of a `SampledPlan` are ignored.
    """

    path: Path | None = None
    target_layers: tuple[int, ...] = ()
    block_size = BLOCK_SIZE
    knows_probabilities = has_pass = False
    knows_lengths = True

    def new_state(self, batch: int, capacity: int) -> Texts:
        rows = [place * capacity for place in range(batch)]
        return Texts(rows, {row: Text() for row in rows})

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * BYTES_PER_TOKEN

    def weight_bytes(self) -> int:
        return 0

    def observe(self, state: Texts, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        for text, row, length in zip(state.texts, tokens.tolist(), lengths, strict=True):
            text.tokens += row[:length]

    def propose(self, state: Texts, anchor: Tensor, plan: Plan) -> Proposal:
        rows = [_tree(text, token, plan) for text, token in zip(state.texts, anchor.tolist(), strict=True)]
        count, expected = max(len(acceptance_probs) for _, _, acceptance_probs in rows), None
        if count and plan.cycle_seconds is not None and not plan.tree_budget:
            count = best_count(
                [acceptance_probs for _, _, acceptance_probs in rows], plan.cycle_seconds, plan.calibration
            )
            expected = tuple(sum(acceptance_probs[:count]) for _, _, acceptance_probs in rows)
        if not count:
            nothing = chain(anchor[:, None])
            return replace(nothing, expected=(0.0,) * len(rows), acceptance_probs=((),) * len(rows))
        tokens = [[*tokens, *[0] * count][: 1 + count] for tokens, _, _ in rows]
        parents = [[*parents, *[-1] * count][: 1 + count] for _, parents, _ in rows]
        acceptance_probs = tuple(tuple(acceptance_probs[:count]) for _, _, acceptance_probs in rows)
        return Proposal(
            torch.tensor(tokens, device=anchor.device), torch.tensor(parents), None, expected, acceptance_probs
        )


def _tree(text: Text, anchor: int, plan: Plan) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and chances of one row: its first continuation, or as many as the tree's budget holds.

    A right guess makes the match one token longer, so the chance of a child is the rate of matches of that length,
    times the chance that none of its likelier siblings is right.
    """
    tokens, parents, acceptance_probs = [anchor], [-1], list[float]()
    left = [1.0]  # for each node, the chance that it is accepted and none of its children so far is
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    budget = plan.tree_budget or plan.block_size - 1
    for length, draft_tokens in text.continuations(anchor, plan.block_size - 1):
        node = 0
        for depth, token in enumerate(draft_tokens):
            if (node, token) not in nodes:
                if len(tokens) > budget:
                    return tokens, parents, acceptance_probs
                nodes[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                acceptance_prob = left[node] * text.rates[min(length + depth, LONGEST) - 1]
                left[node] -= acceptance_prob
                left.append(acceptance_prob)
                acceptance_probs.append(acceptance_prob)
            node = nodes[node, token]
        if plan.tree_budget == 0:
            break
    return tokens, parents, acceptance_probs


DRAFTER = DrafterSpec(lambda folder, target: PromptLookupDrafter(), by_name=True)
