"""Lookup: drafts the tokens that followed the longest earlier match of the sequence's end.

It needs no model, and saves time where an output repeats its prompt, itself, or an earlier output of the same scope
(SuffixDecoding, arXiv 2411.04975; Prompt Lookup Decoding, A. Saxena, 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush, merge
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.prediction import Prediction
from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.decode.step_time import best_count
from blockdraft.decode.suffix_index import MatchRates, SuffixIndex, SuffixMatch
from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.nn.cache import SequenceState

BLOCK_SIZE = 32
START = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.97)  # initial acceptance rates, as in `MatchRates`
MIN_PROB = 0.05  # acceptance probability of a path below which it ends
BYTES_PER_TOKEN = 800  # host memory of a token and its share of the index

COPY_MATCH, COPY_TOKENS = 8, 32  # least match, and least tokens behind it, from which a passage counts as copied
MAX_COPY = 8192  # tokens of a copied passage
MAX_MATCH = 32  # tokens of a sequence that are looked up in earlier outputs
SCOPE_TOKENS = 16_384  # of the earlier outputs of a scope
STORE_TOKENS = 65_536  # of all scopes
SEPARATOR = -1  # between outputs; no token of a vocabulary


class IndexedSequence:
    """Committed tokens of one sequence and their index.

    Attributes:
        tokens: The tokens. Those that the index lacks are added before the next draft.
        rates: Acceptance rates of matches. They are updated at each committed token, drafted or not, so they depend on
            the sequence alone.
        copy: The passage that the sequence copies at present, if any. It is followed through changes, where a match of
            the last tokens alone would be short.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.rates = MatchRates(START)
        self.index = SuffixIndex()
        self.copy: Prediction | None = None
        self._copy_from, self._copy_begin = self.index, 0  # source, and position of the first token that may be copied

    def draft_copy(self, anchor: int, matches: Matches, most: int) -> tuple[list[int], list[float]]:
        """Return the next tokens of the copied passage with their acceptance probabilities; none if a match is longer.

        A long match begins a copy.
        """
        index, match = _longest(matches)
        if self.copy is not None and any(source is self._copy_from for source, _ in matches):
            followed = self._copy_begin + self.copy.length
            self.copy.follow([*self.tokens[followed:], anchor][: len(self.tokens) + 1 - followed])
            tokens, acceptance_probs = self.copy.draft(most)
            if tokens and self.copy.agreed + COPY_MATCH >= match.length:
                return tokens, acceptance_probs
        if match.length >= COPY_MATCH:
            passage = _until_separator(index.tokens[index.end(match) : index.end(match) + MAX_COPY])
            if len(passage) >= COPY_TOKENS:
                self.copy = Prediction(passage, match.length)
                self._copy_from, self._copy_begin = index, len(self.tokens) + 1
        return [], []

    def update_index(self) -> None:
        """Index the tokens that were observed since the last call."""
        index = self.index
        for token in self.tokens[len(index.tokens) :]:
            match = index.longest
            if match.length:
                self.rates.learn(match.length, index.tokens[index.end(match)] == token)
            index.append(token)


class ScopeStore:
    """Earlier outputs by scope. Sequences of one scope are never drafted from the outputs of another.

    Each scope has two indexes. When the newer one has half of `SCOPE_TOKENS`, the older one is dropped.
    """

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, list[SuffixIndex]] = OrderedDict()  # least recently used first
        self._num_tokens = 0  # of all scopes

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """Add an output. The least recently used scopes are dropped if there are more than `STORE_TOKENS`."""
        indexes = self._scopes.setdefault(scope, [SuffixIndex()])
        self._scopes.move_to_end(scope)
        tokens = tokens[-SCOPE_TOKENS // 2 + 1 :]
        if len(indexes[-1].tokens) + len(tokens) >= SCOPE_TOKENS // 2:
            self._num_tokens -= sum(len(index.tokens) for index in indexes[:-1])
            indexes[:] = [indexes[-1], SuffixIndex()]
        for token in (*tokens, SEPARATOR):
            indexes[-1].append(token)
        self._num_tokens += len(tokens) + 1
        while self._num_tokens > STORE_TOKENS:
            _, oldest = self._scopes.popitem(last=False)
            self._num_tokens -= sum(len(index.tokens) for index in oldest)

    def indexes(self, scope: str | None) -> Sequence[SuffixIndex]:
        """Return the indexes of a scope, the newest first."""
        if scope is None or scope not in self._scopes:
            return ()
        self._scopes.move_to_end(scope)
        return self._scopes[scope][::-1]


class LookupState(SequenceState):
    """Indexed sequences of a batch, and the earlier outputs that all of them share."""

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity)
        self.store = ScopeStore()

    @property
    def sequences(self) -> list[IndexedSequence]:
        return [self.values[start] for start in self.starts]

    def new_value(self) -> IndexedSequence:
        return IndexedSequence()

    def cut(self, value: IndexedSequence, length: int) -> IndexedSequence:
        return IndexedSequence(value.tokens[:length])

    def value_of(self, start: int, tokens: Sequence[int]) -> IndexedSequence:
        return IndexedSequence(tokens)


class LookupDrafter(Drafter):
    """Drafts what followed the longest match of the last tokens, anchor included.

    Matches are found in the sequence so far, and in earlier outputs of its `SamplingParams.lookup_scope`. A chain is
    the continuation of the longest match, the latest if there are several, or of a passage that the sequence copies
    with changes. A tree also holds the continuations of shorter matches. Acceptance probabilities by the length of a
    match are learned from the sequence. A path ends where its probability falls below `MIN_PROB`; with
    `plan.step_seconds` a chain ends where a further token would not save time. A sequence without a match gets no draft
    tokens. The numbers of a `SampledPlan` are ignored.
    """

    path: Path | None = None
    target_layers: tuple[int, ...] = ()
    block_size = BLOCK_SIZE
    chooses_tree_size = runs_network = False
    chooses_length = True

    def new_state(self, batch: int, capacity: int) -> LookupState:
        return LookupState(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * BYTES_PER_TOKEN

    def weight_bytes(self) -> int:
        return 0

    def observe(self, state: LookupState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        for sequence, ids, length in zip(state.sequences, tokens.tolist(), lengths, strict=True):
            sequence.tokens += ids[:length]

    def remember(self, state: LookupState, scope: str, tokens: Sequence[int]) -> None:
        state.store.add(scope, tokens)

    def propose(self, state: LookupState, anchor: Tensor, plan: Plan) -> Proposal:
        draft = _draft_tree if plan.tree_budget else _draft_chain
        rows = []
        for sequence, params, token in zip(state.sequences, plan.params, anchor.tolist(), strict=True):
            sequence.update_index()
            index = sequence.index
            matches = [(index, index.extend(index.longest, token))]
            context = [*sequence.tokens[1 - MAX_MATCH :], token]
            matches += [(index, index.match(context)) for index in state.store.indexes(params.lookup_scope)]
            rows.append(draft(sequence, matches, token, plan))
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


Matches = Sequence[tuple[SuffixIndex, SuffixMatch]]
Draft = tuple[list[int], list[int], list[float]]  # tokens and parents, from the anchor on; acceptance probabilities


def _longest(matches: Matches) -> tuple[SuffixIndex, SuffixMatch]:
    """Return the longest match with its index, that of the first index if several are as long."""
    return max(matches, key=lambda item: item[1].length)


def _until_separator(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


def _draft_chain(sequence: IndexedSequence, matches: Matches, anchor: int, plan: Plan) -> Draft:
    """Return the continuation of the copied passage, or else of the longest match.

    One that reaches the end of the sequence starts over, as if the sequence repeated this passage.
    """
    most = plan.block_size - 1
    following, acceptance_probs = sequence.draft_copy(anchor, matches, most)
    index, match = _longest(matches)
    if not following and match.length:
        end = index.end(match)
        following = index.tokens[end : end + most]
        if SEPARATOR in following:
            following = _until_separator(following)
        elif len(following) < most and index is matches[0][0]:
            following = list(islice(cycle([*following, anchor]), most))
        acceptance_probs = sequence.rates.path_probs(match.length, len(following), MIN_PROB)
    count = len(acceptance_probs)
    return [anchor, *following[:count]], list(range(-1, count)), acceptance_probs


def _draft_tree(sequence: IndexedSequence, matches: Matches, anchor: int, plan: Plan) -> Draft:
    """Return the tree of the continuations that are most likely to be accepted, best first.

    An accepted token makes the match one token longer, so the probability of a child is the rate of matches of that
    length, times the probability that its parent is accepted and none of its siblings so far.
    """
    tokens, parents, depths, acceptance_probs = [anchor], [-1], [0], list[float]()
    contexts, remaining, followers = [matches], [1.0], [_followers(matches)]
    heap: list[tuple[float, int, int]] = []  # minus the probability, parent and token of the next child of each node

    def add_candidate(node: int) -> None:
        length, token = next(followers[node], (0, 0))
        acceptance_prob = remaining[node] * sequence.rates[length] if length else 0.0
        if acceptance_prob >= MIN_PROB:
            remaining[node] -= acceptance_prob
            heappush(heap, (-acceptance_prob, node, token))

    add_candidate(0)
    while heap and len(acceptance_probs) < plan.tree_budget:
        cost, parent, token = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        acceptance_probs.append(-cost)
        contexts.append([(index, index.extend(match, token)) for index, match in contexts[parent]])
        remaining.append(-cost)
        followers.append(_followers(contexts[-1]))
        add_candidate(parent)
        if depths[-1] < plan.block_size - 1:
            add_candidate(len(tokens) - 1)
    return tokens, parents, acceptance_probs


def _followers(matches: Matches) -> Iterator[tuple[int, int]]:
    """Yield the different tokens that follow any of the matches, each with the length of the longest, longest first."""
    seen = {SEPARATOR}
    streams = [index.followers(match) for index, match in matches]
    for length, token in merge(*streams, key=lambda item: -item[0]):
        if token not in seen:
            seen.add(token)
            yield length, token


DRAFTER = DrafterSpec(lambda folder, target: LookupDrafter(), by_name=True)
