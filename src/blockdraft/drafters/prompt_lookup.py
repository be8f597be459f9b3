"""Prompt lookup (A.

Saxena, "Prompt Lookup Decoding", 2023): drafts the tokens that followed the same tokens earlier in the sequence. It
needs no model, and saves time where a response repeats its prompt or itself.
"""

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
LONGEST = 4  # maximum tokens of a match; longer matches are rarely better
DRAFT_PER_MATCHED = 4  # maximum draft tokens per matched token, since drafts behind a short match soon fail
START = (0.2, 0.4, 0.6, 0.75)  # initial acceptance rate after matches of 1, 2, ... tokens
NEWEST = 0.05  # weight of the newest token in that rate
RECENT = 8  # maximum occurrences of one n-gram that a tree uses
BYTES_PER_TOKEN = 800  # host memory of a sequence and its index, measured without repetitions


class Text:
    """Committed tokens of one sequence, with an index of their n-grams.

    Attributes:
        rates: Share of the matches of 1, 2, ... tokens that were followed by the same token again; recent matches count
            more. It is updated at each committed token, drafted or not, so it depends on the sequence alone.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.rates = list(START)
        # Length of the longest match at the end of the indexed tokens, and the token that followed it.
        self._predicted: tuple[int, int] | None = None
        self._ends: dict[tuple[int, ...], list[int]] = {}  # for each n-gram, the positions directly behind it
        self._indexed = 0

    def continuations(self, anchor: int, most: int) -> Iterator[tuple[int, list[int]]]:
        """Yield matches of the last tokens with earlier ones: their length, and up to `most` tokens that followed.

        Longer matches come first, and among equally long ones the most recent. A continuation that reaches the end of
        the sequence starts over, as if the sequence repeated this passage.
        """
        self._index()
        last = (*self.tokens[-(LONGEST - 1) :], anchor)
        for length in range(len(last), 0, -1):
            count = min(most, DRAFT_PER_MATCHED * length)
            for end in reversed(self._ends.get(last[-length:], [])[-RECENT:]):
                yield length, list(islice(cycle([*self.tokens[end : end + count], anchor]), count))

    def _index(self) -> None:
        for end in range(self._indexed + 1, len(self.tokens) + 1):
            if self._predicted is not None:
                length, token = self._predicted
                self.rates[length - 1] += NEWEST * ((token == self.tokens[end - 1]) - self.rates[length - 1])
            self._predicted = None
            for length in range(1, min(LONGEST, end) + 1):
                ends = self._ends.setdefault(tuple(self.tokens[end - length : end]), [])
                if ends:
                    self._predicted = length, self.tokens[ends[-1]]
                ends.append(end)
        self._indexed = len(self.tokens)


class Texts:
    """Indexed tokens of the sequences of a batch.

    Attributes:
        rows: First slots of the sequences.
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
    """Drafts the continuation of the longest match of the last tokens, anchor included, in the sequence so far.

    A chain is the continuation of the most recent among the longest matches. A tree merges the continuations of several
    matches. A sequence without a match gets no draft tokens. Acceptance probabilities are learned from the sequence;
    with `plan.step_seconds` a chain ends where a further token would not save time. `plan.params` and the numbers of a
    `SampledPlan` are ignored.
    """

    path: Path | None = None
    target_layers: tuple[int, ...] = ()
    block_size = BLOCK_SIZE
    chooses_tree_size = runs_network = False
    chooses_length = True

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
        if count and plan.step_seconds is not None and not plan.tree_budget:
            count = best_count(
                [acceptance_probs for _, _, acceptance_probs in rows], plan.step_seconds, plan.calibration
            )
            expected = tuple(sum(acceptance_probs[:count]) for _, _, acceptance_probs in rows)
        if not count:
            return replace(chain(anchor[:, None]), expected=(0.0,) * len(rows), acceptance_probs=((),) * len(rows))
        tokens = [[*tokens, *[0] * count][: 1 + count] for tokens, _, _ in rows]
        parents = [[*parents, *[-1] * count][: 1 + count] for _, parents, _ in rows]
        acceptance_probs = tuple(tuple(acceptance_probs[:count]) for _, _, acceptance_probs in rows)
        return Proposal(
            torch.tensor(tokens, device=anchor.device), torch.tensor(parents), None, expected, acceptance_probs
        )


def _tree(text: Text, anchor: int, plan: Plan) -> tuple[list[int], list[int], list[float]]:
    """Return the draft tree of one sequence: its best match, or as many matches as fit the tree budget.

    The result is tokens, parents and acceptance probabilities. An accepted token makes the match one token longer, so
    the probability of a child is the rate of matches of that length, times the probability that none of its likelier
    siblings is accepted.
    """
    tokens, parents, acceptance_probs = [anchor], [-1], list[float]()
    remaining = [1.0]  # for each node, the probability that it is accepted and none of its children so far is
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
                acceptance_prob = remaining[node] * text.rates[min(length + depth, LONGEST) - 1]
                remaining[node] -= acceptance_prob
                remaining.append(acceptance_prob)
                acceptance_probs.append(acceptance_prob)
            node = nodes[node, token]
        if plan.tree_budget == 0:
            break
    return tokens, parents, acceptance_probs


DRAFTER = DrafterSpec(lambda folder, target: PromptLookupDrafter(), by_name=True)
