"""Hybrid drafters: several drafters that draft together for one target, such as lookup and a draft model.

Members are independent of each other. A tree takes the draft tokens with the highest acceptance probability, from any
member. A chain comes from the member with the most expected accepted tokens, or members are asked in order until one
expects enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from blockdraft.decode.merging import beside, filled, merged
from blockdraft.decode.proposal import HybridPlan, Plan, Proposal, SampledPlan, chain
from blockdraft.drafters.base import Drafter, DrafterSpec, State
from blockdraft.errors import UsageError, describe
from blockdraft.timing import DRAFT_CHOICE, mark
from blockdraft.types import JOINT

log = logging.getLogger(__name__)

FIRST_YIELD = 1.0  # assumed accepted tokens of a chain, until a chain of its member has been verified
NEWEST = 0.1  # weight of the newest chain in the running mean of accepted tokens
MOST_PENDING = 512  # tokens of a sequence to accumulate for a member before it observes them


@dataclass
class Yields:
    """Accepted draft tokens of a sequence so far, for members that do not state how many they expect.

    Attributes:
        accepted: For each member, the running mean of the accepted tokens of its chains.
        last: Index of the member whose chain was proposed last; None once its outcome has been counted.
    """

    accepted: list[float]
    last: int | None = None


# By first slot of a sequence: tokens [n] and hidden states [n, m * H] of each pending observation.
Pending: TypeAlias = dict[int, list[tuple[Tensor, Tensor | None]]]


class HybridState:
    """Draft state of a hybrid drafter: one state per member.

    A member with a network observes committed tokens lazily, when it drafts next or when many have accumulated, so that
    steps drafted by another member do not pay for it.

    Args:
        parts: The members.
        pending: Committed tokens that each member has not observed yet.
    """

    def __init__(
        self,
        parts: Sequence[Drafter],
        inner: Sequence[State],
        rows: Sequence[int],
        of_rows: dict[int, Yields],
        pending: Sequence[Pending],
    ) -> None:
        self.inner = list(inner)
        self.rows = list(rows)
        self._parts, self._of_rows, self._pending = parts, of_rows, pending

    @property
    def yields(self) -> list[Yields]:
        return [self._of_rows[row] for row in self.rows]

    def of(self, rows: Sequence[int]) -> HybridState:
        return HybridState(self._parts, [state.of(rows) for state in self.inner], rows, self._of_rows, self._pending)

    def keep(self, index: int, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        """Add pending tokens of a member, which first observes earlier ones if they are many. Adds none if it fails."""
        pending = self._pending[index]
        if any(sum(len(ids) for ids, _ in pending.get(row, ())) >= MOST_PENDING for row in self.rows):
            self.catch_up(index)
        for place, (row, count) in enumerate(zip(self.rows, lengths, strict=True)):
            observation = tokens[place, :count], None if hidden_states is None else hidden_states[place, :count]
            pending.setdefault(row, []).append(observation)

    def catch_up(self, index: int) -> None:
        """Let a member observe its pending tokens."""
        pending, by_length = self._pending[index], dict[int, list[int]]()
        for row in self.rows:
            if count := sum(len(ids) for ids, _ in pending.get(row, ())):
                by_length.setdefault(count, []).append(row)
        for rows in by_length.values():  # without padding, for which there may be no KV slots
            tokens = torch.stack([torch.cat([ids for ids, _ in pending[row]]) for row in rows])
            hidden_states = None
            if self._parts[index].target_layers:
                states = [[state for _, state in pending[row] if state is not None] for row in rows]
                hidden_states = torch.stack([torch.cat(of_row) for of_row in states])
            self._parts[index].observe(self.inner[index].of(rows), tokens, hidden_states, [tokens.size(1)] * len(rows))
            for row in rows:
                del pending[row]

    def _catch_up(self, row: int) -> None:
        """Let the members observe a sequence that is about to change. If one fails, only its drafts get worse."""
        for index, part in enumerate(self._parts):
            try:
                self.of([row]).catch_up(index)
            except Exception as error:
                self._pending[index].pop(row, None)
                log.warning("The drafter %s missed tokens, and may draft worse: %s", part.kind, describe(error))

    def _forget(self, row: int) -> None:
        for pending in self._pending:
            pending.pop(row, None)

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

    def zero_slots(self, row: int, whole: bool = False) -> None:
        if whole:
            self._forget(row)
        for state in self.inner:
            state.zero_slots(row, whole)

    def _begin(self, row: int) -> None:
        """Reset what was learned in this sequence. A new request must not depend on the one before."""
        self._of_rows[row] = Yields([FIRST_YIELD] * len(self.inner))


class HybridDrafter(Drafter):
    """Drafts with several drafters at once.

    A tree merges the members' trees: draft tokens with the same path are one node. The probability of a node, given its
    parent, is the highest that any member states, and the most probable nodes are taken. A chain comes, for each
    sequence, from the member with the most expected accepted tokens. With a `HybridPlan` all sequences get chains of
    one member, the first that expects enough.

    If draft tokens are sampled, the first member that can sample does so. A tree then holds its whole chain, and nodes
    of the others. In a choice between chains, the expected tokens of a sampled chain are the mean of what was accepted
    in the sequence so far, because a choice that depends on the sample would change the output's distribution.

    Args:
        parts: Two or more drafters, each of another kind or folder. Ties go to the first.
    """

    knows_probabilities = True
    knows_lengths = False

    def __init__(self, parts: Sequence[Drafter]) -> None:
        if len(parts) < 2:
            raise UsageError(f"A hybrid drafter has {len(parts)} members; join two or more, as in lookup+bundled.")
        for part in parts:
            if part.block_size == 1:
                raise UsageError(
                    "A member of the hybrid drafter drafts nothing, as the drafter none does; leave it out."
                )
        self._parts = tuple(parts)
        self.path: Path | None = next((part.path for part in parts if part.path is not None), None)
        self.target_layers = tuple(sorted({target_layer for part in parts for target_layer in part.target_layers}))
        self.block_size = max(part.block_size for part in parts)

    def new_state(self, batch: int, capacity: int) -> HybridState:
        rows = [place * capacity for place in range(batch)]
        of_rows = {row: Yields([FIRST_YIELD] * len(self.parts)) for row in rows}
        inner = [part.new_state(batch, capacity) for part in self.parts]
        return HybridState(self.parts, inner, rows, of_rows, [{} for _ in self.parts])

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

    def observe(self, state: HybridState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        for yields, length in zip(state.yields, lengths, strict=True):
            if yields.last is not None and length:  # length counts the anchor and the accepted draft tokens
                yields.accepted[yields.last] += NEWEST * (length - 1 - yields.accepted[yields.last])
                yields.last = None
        # Members with a network come first, because they may fail. The sequences are then observed again, one by one,
        # and no member may observe the same tokens twice.
        for index, part in sorted(enumerate(self.parts), key=lambda item: not item[1].has_pass):
            own = self._hidden_states_of(part, hidden_states)
            if part.has_pass:
                state.keep(index, tokens, own, lengths)
            else:
                part.observe(state.inner[index], tokens, own, lengths)

    def remember(self, state: HybridState, scope: str, tokens: Sequence[int]) -> None:
        for part, inner in zip(self.parts, state.inner, strict=True):
            part.remember(inner, scope, tokens)

    def _hidden_states_of(self, part: Drafter, hidden_states: Tensor | None) -> Tensor | None:
        if hidden_states is None or not part.target_layers:
            return None
        if part.target_layers == self.target_layers:
            return hidden_states
        by_target_layer = hidden_states.chunk(len(self.target_layers), dim=-1)
        return torch.cat(
            [by_target_layer[self.target_layers.index(target_layer)] for target_layer in part.target_layers], dim=-1
        )

    def propose(self, state: HybridState, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        if isinstance(plan, HybridPlan):
            return self._in_turn(state, anchor, plan)
        proposals, sampled = list[Proposal](), None
        for index, part in enumerate(self.parts):
            state.catch_up(index)
            proposals.append(part.propose(state.inner[index], anchor, _asked(part, plan)))
            if isinstance(plan, SampledPlan) and proposals[-1].q is not None:
                sampled, plan = proposals[-1], plan.as_chosen()
        mark(DRAFT_CHOICE)
        if not plan.tree_budget:
            return self._best_chains(state, anchor, proposals)
        if sampled is None:
            return merged(anchor, proposals, plan)
        return beside(
            anchor, sampled, [proposal for proposal in proposals if proposal is not sampled], plan.tree_budget
        )

    def _in_turn(self, state: HybridState, anchor: Tensor, plan: HybridPlan) -> Proposal:
        rates = [turn.tokens_per_second for turn in plan.turns]
        for place, (index, asked, rate) in enumerate(plan.turns):
            state.catch_up(index)
            proposal = self.parts[index].propose(state.inner[index], anchor, asked)
            mark(DRAFT_CHOICE)
            if _expected_rate(proposal, asked, rate) >= max(rates[place + 1 :], default=0.0):
                break
        return replace(proposal, part=index)

    def _best_chains(self, state: HybridState, anchor: Tensor, proposals: Sequence[Proposal]) -> Proposal:
        tokens, parents, chosen = list[list[int]](), list[list[int]](), list[Proposal]()
        texts = [proposal.tokens.tolist() for proposal in proposals]
        for row, yields in enumerate(state.yields):
            expected = [
                min(_expected_accepted(proposal, row, known), sum(parent >= 0 for parent in proposal.parent_lists[row]))
                for proposal, known in zip(proposals, yields.accepted, strict=True)
            ]
            yields.last = best = max(range(len(expected)), key=expected.__getitem__)
            chosen.append(proposals[best])
            tokens.append(texts[best][row])
            parents.append(proposals[best].parent_lists[row])
        q = tuple(None if proposal.q is None else proposal.q[row] for row, proposal in enumerate(chosen))
        return Proposal(*filled(anchor, tokens, parents), q if any(dist is not None for dist in q) else None)


def _asked(part: Drafter, plan: Plan) -> Plan:
    """Return the plan for one member.

    Without step times it gets equal ones, with which every draft token pays: a drafter states acceptance probabilities
    only if it gets times.
    """
    block_size = min(plan.block_size, part.block_size)
    seconds, calibration = (plan.cycle_seconds, plan.calibration) if plan.tree_budget else (None, 1.0)
    if seconds is None and (plan.tree_budget or not isinstance(plan, SampledPlan)):
        seconds = [1.0] * (1 + (plan.tree_budget or block_size - 1))
    asked = replace(plan, block_size=block_size, cycle_seconds=seconds, calibration=calibration)
    return replace(asked, uniforms=asked.uniforms[:, : block_size - 1]) if isinstance(asked, SampledPlan) else asked


def _expected_rate(proposal: Proposal, plan: Plan, rate: float) -> float:
    """Return the expected tokens per second of a step with this proposal.

    It is 0 without draft tokens, so that other members are asked.
    """
    if proposal.tokens.size(1) == 1:
        return 0.0
    if proposal.expected is None or plan.cycle_seconds is None:
        return rate
    tokens = len(proposal.expected) + plan.calibration * sum(proposal.expected)
    return tokens / plan.cycle_seconds[proposal.tokens.size(1) - 1]


def _expected_accepted(proposal: Proposal, row: int, known: float) -> float:
    """Return the expected number of accepted tokens of a chain; `known` is the mean of its member so far."""
    if proposal.q is not None:
        return known
    if proposal.acceptance_probs is not None:
        return sum(proposal.acceptance_probs[row])
    return known if proposal.expected is None else proposal.expected[row]


DRAFTER = DrafterSpec(lambda members, target: HybridDrafter(members))
