"""Several drafters that draft together for one target, such as prompt lookup and a draft model.

The drafters do not know of each other. A tree takes the guesses that are likeliest to be accepted, from any drafter.
For a chain, the drafter with the highest expected number of accepted guesses is chosen, or they are asked in turn until
one promises enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution, chain
from blockdraft.decode.tree import best_count
from blockdraft.drafters.base import Drafter, Entry, State
from blockdraft.errors import UsageError, describe
from blockdraft.timing import GUESSES, mark
from blockdraft.types import JOINT

log = logging.getLogger(__name__)

FIRST_YIELD = 1.0  # assumed accepted guesses of a chain, until a chain of its drafter has been verified
ASSUMED = 0.5  # chance of a guess whose drafter states none, where those before it are accepted
NEWEST = 0.1  # weight of the newest chain in the running mean of accepted guesses
MOST_UNREAD = 512  # tokens of a row that are kept for a drafter until it is asked


@dataclass
class Yields:
    """Accepted guesses of a row so far, used for drafters that do not state how many they expect.

    Attributes:
        accepted: For each drafter, the running mean of the accepted guesses of its chains.
        last: Index of the drafter whose chain was proposed last; None once its outcome has been counted.
    """

    accepted: list[float]
    last: int | None = None


Unread: TypeAlias = dict[int, list[tuple[Tensor, Tensor | None]]]  # by row, tokens [n] and features [n, m * H]


class CombinedState:
    """States of all drafters of a combination, for the same rows.

    A drafter with a network is told of committed tokens when it is asked next, or when there are many: a call in each
    cycle of another drafter would cost time.

    Args:
        parts: The drafters.
        unread: For each of them, what it has not been told.
    """

    def __init__(
        self,
        parts: Sequence[Drafter],
        inner: Sequence[State],
        rows: Sequence[int],
        of_rows: dict[int, Yields],
        unread: Sequence[Unread],
    ) -> None:
        self.inner = list(inner)
        self.rows = list(rows)
        self._parts, self._of_rows, self._unread = parts, of_rows, unread

    @property
    def yields(self) -> list[Yields]:
        return [self._of_rows[row] for row in self.rows]

    def of(self, rows: Sequence[int]) -> CombinedState:
        return CombinedState(self._parts, [state.of(rows) for state in self.inner], rows, self._of_rows, self._unread)

    def keep(self, index: int, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        """Keep tokens for a drafter, which is first told of what is kept if that is much. Keeps none if it fails."""
        unread = self._unread[index]
        if any(sum(len(ids) for ids, _ in unread.get(row, ())) >= MOST_UNREAD for row in self.rows):
            self.catch_up(index)
        for place, (row, count) in enumerate(zip(self.rows, lengths, strict=True)):
            kept = tokens[place, :count], None if features is None else features[place, :count]
            unread.setdefault(row, []).append(kept)

    def catch_up(self, index: int) -> None:
        """Tell a drafter of what is kept for it."""
        unread, by_length = self._unread[index], dict[int, list[int]]()
        for row in self.rows:
            if count := sum(len(ids) for ids, _ in unread.get(row, ())):
                by_length.setdefault(count, []).append(row)
        for rows in by_length.values():  # no row is filled up, which would take slots that it may not have
            tokens = torch.stack([torch.cat([ids for ids, _ in unread[row]]) for row in rows])
            features = None
            if self._parts[index].taps:
                found = [[each for _, each in unread[row] if each is not None] for row in rows]
                features = torch.stack([torch.cat(each) for each in found])
            self._parts[index].observe(self.inner[index].of(rows), tokens, features, [tokens.size(1)] * len(rows))
            for row in rows:
                del unread[row]

    def _catch_up(self, row: int) -> None:
        """Tell the drafters of a row that is about to change. The guesses of one that fails get worse, no answer."""
        for index, part in enumerate(self._parts):
            try:
                self.of([row]).catch_up(index)
            except Exception as error:
                self._unread[index].pop(row, None)
                log.warning("The drafter %s missed tokens, and may guess worse: %s", part.kind, describe(error))

    def _forget(self, row: int) -> None:
        for unread in self._unread:
            unread.pop(row, None)

    def open(self, row: int, capacity: int) -> None:
        for state in self.inner:
            state.open(row, capacity)
        self._begin(row)

    def close(self, row: int) -> None:
        self._forget(row)
        for state in self.inner:
            state.close(row)
        del self._of_rows[row]

    def shrink(self, row: int, capacity: int) -> None:
        self._catch_up(row)
        for state in self.inner:
            state.shrink(row, capacity)
        self._begin(row)

    def copy(self, source: int, row: int, length: int) -> None:
        self._catch_up(source)
        for state in self.inner:
            state.copy(source, row, length)

    def wipe(self, row: int, whole: bool = False) -> None:
        if whole:
            self._forget(row)
        for state in self.inner:
            state.wipe(row, whole)

    def _begin(self, row: int) -> None:
        """Forget what was learned in this row, since a new request must not depend on the one before."""
        self._of_rows[row] = Yields([FIRST_YIELD] * len(self.inner))


class CombinedDrafter(Drafter):
    """Drafts with several drafters at once.

    A tree merges the drafters' trees: guesses with the same path and token are one node. The probability of a node,
    given its parent, is the highest that any drafter states, and the likeliest nodes are taken. A chain comes, in each
    row, from the drafter with the most expected accepted guesses. With `plan.turns` all rows get chains of one drafter,
    the first that promises enough.

    If guesses are sampled, the first drafter that can sample does so. A tree then holds its whole chain, and guesses of
    the others beside it. In a choice between chains, the expected guesses of a sampled one are the mean of what was
    accepted in the row so far, because a choice that depends on the sample would change the output's distribution.

    Args:
        parts: Two or more drafters, each of another kind or folder. Ties go to the first.
    """

    knows_probabilities = True
    knows_lengths = False

    def __init__(self, parts: Sequence[Drafter]) -> None:
        if len(parts) < 2:
            raise UsageError(f"A combination has {len(parts)} drafters; join two or more, as in prompt_lookup+bundled.")
        for part in parts:
            if part.block_size == 1:
                raise UsageError("A drafter of a combination guesses nothing (as the drafter none); leave it out.")
        self._parts = tuple(parts)
        self.path: Path | None = next((part.path for part in parts if part.path is not None), None)
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))
        self.block_size = max(part.block_size for part in parts)

    def new_state(self, batch: int, capacity: int) -> CombinedState:
        rows = [place * capacity for place in range(batch)]
        of_rows = {row: Yields([FIRST_YIELD] * len(self.parts)) for row in rows}
        inner = [part.new_state(batch, capacity) for part in self.parts]
        return CombinedState(self.parts, inner, rows, of_rows, [{} for _ in self.parts])

    @property
    def parts(self) -> Sequence[Drafter]:
        return self._parts

    @property
    def kind(self) -> str:
        return JOINT.join(part.kind for part in self.parts)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return sum(part.state_bytes(batch, capacity) for part in self.parts)

    def weight_bytes(self) -> int:
        return sum(part.weight_bytes() for part in self.parts)

    def observe(self, state: CombinedState, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        for yields, length in zip(state.yields, lengths, strict=True):
            if yields.last is not None and length:  # length counts the anchor and the accepted guesses
                yields.accepted[yields.last] += NEWEST * (length - 1 - yields.accepted[yields.last])
                yields.last = None
        # Drafters with a network come first, because they may fail. The rows are then observed again, one by one, and
        # no drafter may observe the same tokens twice.
        for index, part in sorted(enumerate(self.parts), key=lambda each: not each[1].has_pass):
            own = self._features_of(part, features)
            if part.has_pass:
                state.keep(index, tokens, own, lengths)
            else:
                part.observe(state.inner[index], tokens, own, lengths)

    def _features_of(self, part: Drafter, features: Tensor | None) -> Tensor | None:
        if features is None or not part.taps:
            return None
        if part.taps == self.taps:
            return features
        by_tap = features.chunk(len(self.taps), dim=-1)
        return torch.cat([by_tap[self.taps.index(tap)] for tap in part.taps], dim=-1)

    def propose(self, state: CombinedState, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        if plan.turns:
            return self._in_turn(state, anchor, plan)
        proposals, sampled = list[Proposal](), None
        for index, part in enumerate(self.parts):
            asked = _asked(part, plan if sampled is None else replace(plan, draws=None))
            state.catch_up(index)
            proposals.append(part.propose(state.inner[index], anchor, asked))
            sampled = proposals[-1] if proposals[-1].q is not None else sampled
        mark(GUESSES)
        if not plan.tree_budget:
            return self._best_chains(state, anchor, proposals)
        if sampled is None:
            return merged(anchor, proposals, plan)
        return beside(anchor, sampled, [each for each in proposals if each is not sampled], plan.tree_budget)

    def _in_turn(self, state: CombinedState, anchor: Tensor, plan: Plan) -> Proposal:
        rates = [asked.rate for _, asked in plan.turns]
        for place, (index, asked) in enumerate(plan.turns):
            state.catch_up(index)
            proposal = self.parts[index].propose(state.inner[index], anchor, asked)
            mark(GUESSES)
            if _promise(proposal, asked) >= max(rates[place + 1 :], default=0.0):
                break
        return replace(proposal, part=index)

    def _best_chains(self, state: CombinedState, anchor: Tensor, proposals: Sequence[Proposal]) -> Proposal:
        tokens, parents, chosen = list[list[int]](), list[list[int]](), list[Proposal]()
        texts = [proposal.tokens.tolist() for proposal in proposals]
        for row, yields in enumerate(state.yields):
            hopes = [
                min(_hope(proposal, row, known), sum(parent >= 0 for parent in proposal.parent_lists[row]))
                for proposal, known in zip(proposals, yields.accepted, strict=True)
            ]
            yields.last = best = max(range(len(hopes)), key=hopes.__getitem__)
            chosen.append(proposals[best])
            tokens.append(texts[best][row])
            parents.append(proposals[best].parent_lists[row])
        q = tuple(None if each.q is None else each.q[row] for row, each in enumerate(chosen))
        return Proposal(*_filled(anchor, tokens, parents), q if any(dist is not None for dist in q) else None)


def _asked(part: Drafter, plan: Plan) -> Plan:
    """Plan for one drafter of a combination. If the plan has no cycle times, it gets equal ones, with which every guess
    pays, because a drafter states how likely its guesses are only if it gets times."""
    block_size = min(plan.block_size, part.block_size)
    draws = None if plan.draws is None else plan.draws[:, : block_size - 1]
    seconds, trust = (plan.cycle_seconds, plan.trust) if plan.tree_budget else (None, 1.0)
    if seconds is None and (draws is None or plan.tree_budget):
        seconds = [1.0] * (1 + (plan.tree_budget or block_size - 1))
    return replace(plan, block_size=block_size, draws=draws, cycle_seconds=seconds, trust=trust)


def _promise(proposal: Proposal, plan: Plan) -> float:
    """Tokens a second that a cycle with these guesses is expected to yield; 0 without any, for others may have some."""
    if proposal.tokens.size(1) == 1:
        return 0.0
    if proposal.expected is None or plan.cycle_seconds is None:
        return plan.rate
    tokens = len(proposal.expected) + plan.trust * sum(proposal.expected)
    return tokens / plan.cycle_seconds[proposal.tokens.size(1) - 1]


def _hope(proposal: Proposal, row: int, known: float) -> float:
    """Expected number of accepted guesses of a chain; `known` is the mean of its drafter so far."""
    if proposal.q is not None:
        return known
    if proposal.chances is not None:
        return sum(proposal.chances[row])
    return known if proposal.expected is None else proposal.expected[row]


def merged(anchor: Tensor, proposals: Sequence[Proposal], plan: Plan) -> Proposal:
    """Tree of the guesses that are likeliest to be accepted, from any of the proposals.

    Args:
        anchor: `[B]` int64.
        proposals: Trees behind these anchors, of guesses that were not sampled, each with its probability.
        plan: Gives the most nodes of a row, and the cycle times that decide how many of them pay.
    """
    texts = [proposal.tokens.tolist() for proposal in proposals]
    rows = [
        _likeliest(
            [
                (tokens[row], proposal.parent_lists[row], _chances(proposal, row))
                for tokens, proposal in zip(texts, proposals, strict=True)
            ],
            plan.tree_budget,
        )
        for row in range(len(anchor))
    ]
    count, expected = plan.tree_budget, None
    if plan.cycle_seconds is not None:
        chances = [[chance for chance, _, _ in nodes] for nodes in rows]
        count = best_count(chances, plan.cycle_seconds, plan.trust)
        expected = tuple(sum(row[:count]) for row in chances)
    tokens = [[0, *(token for _, _, token in nodes[:count])] for nodes in rows]
    parents = [[-1, *(parent for _, parent, _ in nodes[:count])] for nodes in rows]
    return Proposal(*_filled(anchor, tokens, parents), expected=expected)


def beside(anchor: Tensor, sampled: Proposal, others: Sequence[Proposal], budget: int) -> Proposal:
    """Tree of a whole sampled chain, and of as many of the others' likeliest guesses as the budget leaves.

    Nodes beside the chain may depend on what was sampled. The chain's length must not.

    Args:
        anchor: `[B]` int64.
        sampled: Chain whose guesses were sampled.
        others: As `proposals` of `merged`.
        budget: Most guesses of a row.
    """
    chains, texts = sampled.tokens.tolist(), [proposal.tokens.tolist() for proposal in others]
    rows, above, dists = list[list[int]](), list[list[int]](), list[SparseDistribution | None]()
    for row in range(len(anchor)):
        parents = [parent for node, parent in enumerate(sampled.parent_lists[row]) if node == 0 or parent >= 0]
        tokens, dist = chains[row][: len(parents)], None if sampled.q is None else sampled.q[row]
        dists.append(dist and SparseDistribution(dist.ids[: len(parents)], dist.probs[: len(parents)]))
        nodes = {(parents[node], tokens[node]): node for node in range(1, len(parents))}
        trees = [
            (said[row], proposal.parent_lists[row], _chances(proposal, row))
            for said, proposal in zip(texts, others, strict=True)
        ]
        places = [0]  # indices of the others' nodes in this tree
        for _, parent, token in _likeliest(trees, budget):
            at = places[parent], token
            if at not in nodes:
                if len(tokens) > budget:
                    break
                nodes[at] = len(tokens)
                tokens.append(token)
                parents.append(at[0])
            places.append(nodes[at])
        rows.append(tokens)
        above.append(parents)
    return Proposal(*_filled(anchor, rows, above), tuple(dists))


def _chances(proposal: Proposal, row: int) -> Sequence[float]:
    if proposal.chances is not None:
        return proposal.chances[row]
    found = [1.0]
    for parent in proposal.parent_lists[row][1:]:
        if parent >= 0:  # else padding
            found.append(ASSUMED * found[parent])
    return found[1:]


def _likeliest(
    trees: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], budget: int
) -> list[tuple[float, int, int]]:
    """Nodes `(chance, parent, token)` behind the anchor, the likeliest first, so parents come before their children.

    Args:
        trees: Tokens, parents and chances of several trees of one row; chances begin with the first guess.
        budget: Most nodes.
    """
    # children[node][token] is the index of a child, and the chance that it is accepted if its parent is.
    children: list[dict[int, tuple[int, float]]] = [{}]
    for tokens, parents, guessed in trees:
        places, chances = [0], [1.0, *guessed]
        for node in range(1, len(chances)):
            before = parents[node]
            siblings, token = children[places[before]], tokens[node]
            if token not in siblings:
                siblings[token] = len(children), 0.0
                children.append({})
            place, known = siblings[token]
            share = chances[node] / chances[before] if chances[before] > 0 else 0.0
            siblings[token] = place, max(known, share)
            places.append(place)
    nodes = list[tuple[float, int, int]]()
    heap = [(-share, place, 0, token) for token, (place, share) in children[0].items()]
    heapify(heap)
    while heap and len(nodes) < budget:
        cost, place, parent, token = heappop(heap)
        nodes.append((-cost, parent, token))
        for following, (child, share) in children[place].items():
            heappush(heap, (cost * share, child, len(nodes), following))
    return nodes


def _filled(anchor: Tensor, tokens: list[list[int]], parents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens, on the anchor's device, and parents of all rows, padded to one length."""
    count = max(map(len, tokens))
    filled = torch.tensor([[*row, *[0] * (count - len(row))] for row in tokens]).to(anchor.device)
    filled[:, 0] = anchor
    return filled, torch.tensor([[*row, *[-1] * (count - len(row))] for row in parents])


DRAFTER = Entry(lambda parts, target: CombinedDrafter(parts), joins=True)
