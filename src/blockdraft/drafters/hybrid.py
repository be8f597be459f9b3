"""Hybrid drafters: several drafters that draft together for one target, such as lookup and a draft model.

Members are independent of each other. A tree takes the draft tokens with the highest acceptance probability, from any
member. A chain comes from the member with the most expected accepted tokens. Where the engine chooses how far to draft,
members are asked in order until one expects enough.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.merging import beside, filled, merged
from blockdraft.decode.proposal import HybridPlan, Plan, Proposal, SampledPlan, chain
from blockdraft.drafters.base import Drafter, DrafterSpec, select_layers
from blockdraft.errors import UsageError, describe
from blockdraft.nn.cache import SequenceState
from blockdraft.timing import DRAFT_CHOICE, mark
from blockdraft.types import JOINT

log = logging.getLogger(__name__)

FIRST_YIELD = 1.0  # assumed accepted tokens of a chain, until a chain of its member has been verified
NEWEST = 0.1  # weight of the newest chain in the running mean of accepted tokens
MAX_PENDING = 512  # tokens of a sequence to accumulate for a member before it observes them


@dataclass
class HybridSequence:
    """Value of a sequence in a `HybridState`.

    Attributes:
        accepted: For each member, the running mean of the accepted tokens of its chains. It serves for members that do
            not state how many they expect.
        pending: For each member, tokens `[n]` and hidden states `[n, m * H]` that it has not observed yet.
        last: Index of the member whose chain was proposed last; None once its outcome has been counted.
    """

    accepted: list[float]
    pending: list[list[tuple[Tensor, Tensor | None]]]
    last: int | None = None

    def num_pending(self, index: int) -> int:
        return sum(len(ids) for ids, _ in self.pending[index])


class HybridState(SequenceState):
    """Draft state of a hybrid drafter, with the states of its members inside.

    A member with a network observes committed tokens lazily, when it drafts next or when many have accumulated, so that
    steps drafted by another member do not pay for it.

    Args:
        parts: The members.
    """

    values: dict[int, HybridSequence]

    def __init__(self, parts: Sequence[Drafter], batch: int, capacity: int) -> None:
        self._parts = parts
        super().__init__(batch, capacity, [part.new_state(batch, capacity) for part in parts])

    def new_value(self) -> HybridSequence:
        return HybridSequence([FIRST_YIELD] * len(self._parts), [[] for _ in self._parts])

    def cut(self, value: HybridSequence, length: int) -> HybridSequence:
        return self.new_value()  # a new request must not depend on the one before

    @property
    def sequences(self) -> list[HybridSequence]:
        return [self.values[start] for start in self.starts]

    def add_pending(self, index: int, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        """Add pending tokens of a member, which first observes earlier ones if they are many. Adds none if it fails."""
        if any(sequence.num_pending(index) >= MAX_PENDING for sequence in self.sequences):
            self.catch_up(index)
        for i, (sequence, count) in enumerate(zip(self.sequences, lengths, strict=True)):
            states = None if hidden_states is None else hidden_states[i, :count]
            sequence.pending[index].append((tokens[i, :count], states))

    def catch_up(self, index: int) -> None:
        """Let a member observe its pending tokens."""
        by_length = dict[int, list[int]]()
        for start in self.starts:
            if count := self.values[start].num_pending(index):
                by_length.setdefault(count, []).append(start)
        for starts in by_length.values():  # without padding, for which there may be no KV slots
            pending = [self.values[start].pending[index] for start in starts]
            tokens = torch.stack([torch.cat([ids for ids, _ in parts]) for parts in pending])
            hidden_states = None
            if self._parts[index].target_layers:
                states = [[state for _, state in parts if state is not None] for parts in pending]
                hidden_states = torch.stack([torch.cat(parts) for parts in states])
            lengths = [tokens.size(1)] * len(starts)
            self._parts[index].observe(self.inner[index].of(starts), tokens, hidden_states, lengths)
            for parts in pending:
                parts.clear()

    def _catch_up_all(self, start: int) -> None:
        """Let the members observe a sequence that is about to change. If one fails, only its drafts get worse."""
        for index, part in enumerate(self._parts):
            try:
                self.of([start]).catch_up(index)
            except Exception as error:
                self.values[start].pending[index].clear()
                log.warning("The drafter %s missed tokens, and may draft worse: %s", part.kind, describe(error))

    def shrink(self, start: int, capacity: int) -> None:
        self._catch_up_all(start)
        super().shrink(start, capacity)

    def copy(self, source: int, start: int, length: int) -> None:
        self._catch_up_all(source)
        super().copy(source, start, length)

    def export(self, start: int, length: int) -> dict[str, Tensor]:
        self._catch_up_all(start)
        return super().export(start, length)


class HybridDrafter(Drafter):
    """Drafts with several drafters at once.

    A tree merges the members' trees: draft tokens with the same path are one node. The probability of a node, given its
    parent, is the highest that any member states, and the most probable nodes are taken. A chain comes, for each
    sequence, from the member with the most expected accepted tokens. With a `HybridPlan` all sequences get the draft of
    one member, the first that expects enough.

    If draft tokens are sampled, the first member that can sample does so. A tree then holds its whole chain, and nodes
    of the others. In a choice between chains, the expected tokens of a sampled chain are the mean of what was accepted
    in the sequence so far, because a choice that depends on the sample would change the output's distribution.

    Args:
        parts: Two or more drafters, each of another kind or folder. Ties go to the first.
    """

    chooses_tree_size = True
    chooses_length = False

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
        return HybridState(self.parts, batch, capacity)

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
        for sequence, length in zip(state.sequences, lengths, strict=True):
            if sequence.last is not None and length:  # length counts the anchor and the accepted draft tokens
                sequence.accepted[sequence.last] += NEWEST * (length - 1 - sequence.accepted[sequence.last])
                sequence.last = None
        # Members with a network come first, because they may fail. The sequences are then observed again, one by one,
        # and no member may observe the same tokens twice.
        for index, part in sorted(enumerate(self.parts), key=lambda item: not item[1].runs_network):
            own = select_layers(hidden_states, self.target_layers, part.target_layers)
            if part.runs_network:
                state.add_pending(index, tokens, own, lengths)
            else:
                part.observe(state.inner[index], tokens, own, lengths)

    def remember(self, state: HybridState, scope: str, tokens: Sequence[int]) -> None:
        for part, inner in zip(self.parts, state.inner, strict=True):
            part.remember(inner, scope, tokens)

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
        rates, catch_up_seconds = [turn.tokens_per_second for turn in plan.turns], 0.0
        for place, (index, asked, rate) in enumerate(plan.turns):
            # Tokens of more than its own last step, which other members drafted: no part of what a draft costs.
            late = any(sequence.num_pending(index) > self.parts[index].block_size for sequence in state.sequences)
            began = time.perf_counter()
            state.catch_up(index)
            catch_up_seconds += late * (time.perf_counter() - began)
            proposal = self.parts[index].propose(state.inner[index], anchor, asked)
            mark(DRAFT_CHOICE)
            if _expected_rate(proposal, asked, rate) >= max(rates[place + 1 :], default=0.0):
                break
        return replace(proposal, part=index, catch_up_seconds=catch_up_seconds)

    def _best_chains(self, state: HybridState, anchor: Tensor, proposals: Sequence[Proposal]) -> Proposal:
        tokens, parents, chosen = list[list[int]](), list[list[int]](), list[Proposal]()
        texts = [proposal.tokens.tolist() for proposal in proposals]
        for i, sequence in enumerate(state.sequences):
            expected = [
                min(expected_accepted(proposal, i, known), sum(parent >= 0 for parent in proposal.parent_lists[i]))
                for proposal, known in zip(proposals, sequence.accepted, strict=True)
            ]
            sequence.last = best = max(range(len(expected)), key=expected.__getitem__)
            chosen.append(proposals[best])
            tokens.append(texts[best][i])
            parents.append(proposals[best].parent_lists[i])
        q = tuple(None if proposal.q is None else proposal.q[i] for i, proposal in enumerate(chosen))
        return Proposal(*filled(anchor, tokens, parents), q if any(dist is not None for dist in q) else None)


def _asked(part: Drafter, plan: Plan) -> Plan:
    """Return the plan for one member.

    Without step times it gets equal ones, with which every draft token pays: a drafter states acceptance probabilities
    only if it gets times.
    """
    block_size = min(plan.block_size, part.block_size)
    seconds, calibration = (plan.step_seconds, plan.calibration) if plan.tree_budget else (None, 1.0)
    if seconds is None and (plan.tree_budget or not isinstance(plan, SampledPlan)):
        seconds = [1.0] * (1 + (plan.tree_budget or block_size - 1))
    asked = replace(plan, block_size=block_size, step_seconds=seconds, calibration=calibration)
    return replace(asked, uniforms=asked.uniforms[:, : block_size - 1]) if isinstance(asked, SampledPlan) else asked


def _expected_rate(proposal: Proposal, plan: Plan, rate: float) -> float:
    """Return the expected tokens per second of a step with this proposal.

    It is 0 without draft tokens, so that other members are asked.
    """
    if proposal.tokens.size(1) == 1:
        return 0.0
    if proposal.expected is None or plan.step_seconds is None:
        return rate
    tokens = len(proposal.expected) + plan.calibration * sum(proposal.expected)
    return tokens / plan.step_seconds[proposal.tokens.size(1) - 1]


def expected_accepted(proposal: Proposal, index: int, known: float) -> float:
    """Return the expected number of accepted tokens of a chain; `known` is the mean of its member so far."""
    if proposal.q is not None:
        return known
    if proposal.acceptance_probs is not None:
        return sum(proposal.acceptance_probs[index])
    return known if proposal.expected is None else proposal.expected[index]


DRAFTER = DrafterSpec(lambda members, target: HybridDrafter(members))
