"""Speculative speculative decoding (arXiv 2603.03251).

While the target verifies, a draft model on another device drafts for the most probable outcomes.

An outcome is the number of accepted draft tokens and the bonus token. All outcomes are drafted in one tree, to which
each pass adds a token of each. If one of them occurs, its tokens are used at once, and missing ones are drafted as
usual; otherwise all are. So the draft is the same as without drafting ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from threading import Event

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SampledPlan
from blockdraft.decode.sampling import best_tokens
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.draft_lm import DraftLMDrafter, DraftState, acceptance_probs_of
from blockdraft.drafters.work import Outcomes, Work
from blockdraft.errors import UsageError
from blockdraft.targets import Target, device_and_dtype

log = logging.getLogger(__name__)


class AheadState:
    """State of the draft model. Every change first stops drafting ahead."""

    def __init__(self, inner: DraftState, work: Work) -> None:
        self.inner, self.work = inner, work

    def of(self, rows: Sequence[int]) -> AheadState:
        return AheadState(self.inner.of(rows), self.work)

    def open(self, row: int, capacity: int) -> None:
        self._forget(row)
        self.inner.open(row, capacity)

    def close(self, row: int) -> None:
        self._forget(row)
        self.inner.close(row)

    def shrink(self, row: int, capacity: int) -> None:
        self._forget(row)
        self.inner.shrink(row, capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        self._forget(row)
        self.inner.copy(source, row, length)

    def zero_slots(self, row: int, whole: bool = False) -> None:
        self._forget(row)
        self.inner.zero_slots(row, whole)

    def _forget(self, row: int) -> None:
        self.work.stop()
        self.work.found.pop(row, None)


class AheadDrafter(Drafter):
    """Drafts with a smaller language model and, while the target verifies, ahead for the most probable outcomes.

    A batch saves time only if all its sequences were drafted ahead: the others wait for one that was not. Sampled
    tokens are not drafted ahead, because their random numbers are unknown. Nothing is drafted ahead near the end of the
    model's context, and less near the end of a sequence's KV slots.

    Args:
        drafter: Drafter whose model is not the target.
        target: Target that it drafts for.
        count: Number of outcomes to draft for per sequence, at least 1.

    Attributes:
        tried: Number of drafts for which some outcomes had been drafted ahead.
        foreseen: Number of these whose outcome was among them, so that their first draft tokens were ready.

    Raises:
        UsageError: The draft model is the target, or its backend cannot score trees.
    """

    target_layers: tuple[int, ...] = ()
    chooses_tree_size = chooses_length = True

    def __init__(self, drafter: DraftLMDrafter, target: Target, count: int) -> None:
        if drafter.model.lock is target.lock:
            raise UsageError("The draft model is the target itself, which is busy while it verifies; load it twice.")
        if not drafter.model.has_trees:
            raise UsageError(
                f"ahead is {count}, and the backend {drafter.model.backend} runs the draft model ({drafter.path}) on "
                "chains only; use ahead=0."
            )
        self._drafter, self._count = drafter, count
        self.path, self.block_size = drafter.path, drafter.block_size
        self.tried = self.foreseen = 0

    @property
    def kind(self) -> str:
        return self._drafter.kind

    @property
    def device(self) -> torch.device:
        return self._drafter.device

    def new_state(self, batch: int, capacity: int) -> AheadState:
        return AheadState(self._drafter.new_state(batch, capacity), Work())

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self._drafter.state_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return self._drafter.weight_bytes()

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return self._drafter.workspace_bytes(batch, nodes, slots)

    def observe(self, state: AheadState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        state.work.stop()
        self._drafter.observe(state.inner, tokens, hidden_states, lengths)

    def propose(self, state: AheadState, anchor: Tensor, plan: Plan) -> Proposal:
        state.work.stop()
        prepared = [state.work.found.pop(row, None) for row in state.inner.rows]
        if isinstance(plan, SampledPlan):
            return self._drafter.propose(state.inner, anchor, plan)
        known = [
            [] if entry is None else entry[1].get((*text[entry[0] :], token), [])
            for entry, text, token in zip(prepared, state.inner.texts, anchor.tolist(), strict=True)
        ]
        count = min(map(len, known))
        if None not in prepared:
            self.tried += 1
            self.foreseen += count > 0
        columns = [zip(*(row[depth] for row in known), strict=True) for depth in range(count)]
        foreseen = [tuple(torch.tensor(values, device=self.device) for values in column) for column in columns]
        proposal = self._drafter.propose(state.inner, anchor, plan, foreseen)
        self._begin(state, proposal)
        return proposal

    def _begin(self, state: AheadState, proposal: Proposal) -> None:
        """Start drafting for the outcomes of these chains, as many tokens for each as a chain has."""
        draft_tokens = proposal.tokens.size(1) - 1
        chains = [
            ids[: 1 + sum(parent >= 0 for parent in parents)]
            for ids, parents in zip(proposal.tokens.tolist(), proposal.parent_lists, strict=True)
        ]
        texts = state.inner.texts
        ends = [len(text) + len(chain) + draft_tokens for text, chain in zip(texts, chains, strict=True)]
        if not draft_tokens or max(ends) > self._drafter.model.max_context:
            return
        outcomes: list[Outcomes] = [{} for _ in texts]
        for row, text, row_outcomes in zip(state.inner.rows, texts, outcomes, strict=True):
            state.work.found[row] = len(text), row_outcomes
        state.work.begin(partial(self._draft, state.inner, chains, draft_tokens, outcomes))

    @torch.no_grad()
    def _draft(
        self,
        state: DraftState,
        chains: Sequence[list[int]],
        draft_tokens: int,
        outcomes: Sequence[Outcomes],
        stop: Event,
    ) -> None:
        """Draft for the most probable outcomes of verifying these chains. Runs in a thread."""
        try:
            branches = None if stop.is_set() else self._likeliest(state, chains, outcomes)
            if branches is not None:
                self._follow(state, chains, *branches, draft_tokens, outcomes, stop)
        except Exception:
            for row in state.rows:  # remove what an unfinished forward pass may have left
                state.zero_slots(row)
            raise

    def _likeliest(
        self, state: DraftState, chains: Sequence[list[int]], outcomes: Sequence[Outcomes]
    ) -> tuple[list[list[int]], Tensor] | None:
        """Read sequences and chains, and record the outcomes whose draft tokens the chains already hold.

        Returns:
            The K most probable outcomes of each sequence, best first: the index of the last accepted token in the
            chain, and the bonus tokens `[B, K]` int64. None if a sequence has too few KV slots.
        """
        texts = state.texts
        state.truncate([len(text) for text in texts])  # the chain is read as part of the tree
        unread = [text[held:] for text, held in zip(texts, state.cache.lengths, strict=True)]
        tokens, parents = _filled([new + chain for new, chain in zip(unread, chains, strict=True)])
        if tokens.size(1) > state.room:
            return None
        logits = self._forward(state, tokens, parents)
        state.cache.commit([range(len(new)) for new in unread])
        places, following = list[list[int]](), list[Tensor]()
        for row, (new, chain) in enumerate(zip(unread, chains, strict=True)):
            log_probs = logits[row, len(new) : len(new) + len(chain)].float().log_softmax(-1)
            rest = torch.tensor(chain[1:], device=log_probs.device)[:, None]
            own = log_probs[:-1].gather(1, rest)
            acceptance_probs = own[:, 0].exp().tolist()
            for place in range(1, len(rest)):  # the engine may verify fewer draft tokens
                outcomes[row][tuple(chain[: place + 1])] = list(
                    zip(chain[place + 1 :], acceptance_probs[place:], strict=True)
                )
            survival = torch.cat([own.new_zeros(1), own[:, 0].cumsum(0)])
            log_probs[:-1].scatter_(1, rest, float("-inf"))  # a bonus equal to the next draft token would be accepted
            size = log_probs.size(1)
            best = (survival[:, None] + log_probs).flatten().topk(min(self._count, size - 1)).indices
            places.append((best // size).tolist())
            following.append(best % size)
        return places, torch.stack(following)

    def _follow(
        self,
        state: DraftState,
        chains: Sequence[list[int]],
        places: list[list[int]],
        latest: Tensor,
        draft_tokens: int,
        outcomes: Sequence[Outcomes],
        stop: Event,
    ) -> None:
        """Draft for the outcomes from `_likeliest`. Each pass adds a token to each."""
        tokens, parents = _filled(chains)
        made = [
            [of_row.setdefault((*chain[: place + 1], token), []) for place, token in zip(row, ids, strict=True)]
            for of_row, chain, row, ids in zip(outcomes, chains, places, latest.tolist(), strict=True)
        ]
        tokens, above = tokens.to(latest.device), torch.tensor(places)
        for _ in range(draft_tokens):
            below = torch.arange(tokens.size(1), tokens.size(1) + latest.size(1)).expand_as(above)
            tokens, parents = torch.cat([tokens, latest], 1), torch.cat([parents, above], 1)
            if stop.is_set() or tokens.size(1) > state.room:
                return
            logits = self._forward(state, tokens, parents)[:, -latest.size(1) :]
            latest, above = best_tokens(logits), below
            pairs = zip(made, latest.tolist(), acceptance_probs_of(logits, latest).tolist(), strict=True)
            for of_row, ids, acceptance_probs in pairs:
                for branch, token, acceptance_prob in zip(of_row, ids, acceptance_probs, strict=True):
                    branch.append((token, acceptance_prob))

    def _forward(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._drafter.forward(tokens.to(self.device), state.cache, parents)


def _filled(chains: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens and parents of chains, `[B, N]` int64. Shorter chains are padded with nodes without children."""
    count = max(map(len, chains))
    tokens = torch.tensor([[*chain, *[chain[-1]] * (count - len(chain))] for chain in chains])
    parents = torch.tensor([[*range(-1, len(chain) - 1), *[-1] * (count - len(chain))] for chain in chains])
    return tokens, parents


def hits(drafter: Drafter) -> tuple[int, int]:
    """Return the sums of `AheadDrafter.foreseen` and `AheadDrafter.tried` over the members of a drafter."""
    members = [part for part in drafter.parts if isinstance(part, AheadDrafter)]
    return sum(member.foreseen for member in members), sum(member.tried for member in members)


def on_its_own(device: str | torch.device | None, ahead: int, target: Target) -> torch.device | None:
    """Return the device of a draft model; None is the target's device.

    Raises:
        UsageError: The device cannot be used, or is the target's although `ahead` is not 0.
    """
    if ahead < 0:
        raise UsageError(f"ahead is {ahead}; it must be at least 0 (nothing is drafted ahead).")
    if device is None:
        if ahead:
            raise UsageError(
                f"ahead is {ahead}, and the draft model would share {target.device} with the target, where one waits "
                "for the other; name a device of its own, such as device='cuda:1' (--drafter-device cuda:1), or 'cpu' "
                "beside a GPU."
            )
        return None
    placed, _ = device_and_dtype(device, None)
    if ahead and placed == target.device:
        if placed.type != "cpu":
            raise UsageError(
                f"ahead is {ahead}, and device is {placed}, where the target runs: one waits for the other. Name "
                "another device, or use ahead=0."
            )
        log.warning("Target and draft model share the cores of this machine, so drafting ahead slows both.")
    return placed


def draft_ahead(drafter: Drafter, target: Target, count: int) -> Drafter:
    """Make a drafter draft ahead for `count` outcomes; see `AheadDrafter`.

    Raises:
        UsageError: The drafter is not a smaller language model.
    """
    if not isinstance(drafter, DraftLMDrafter):
        raise UsageError(f"ahead is {count}; only a smaller language model drafts ahead, since it reads tokens alone.")
    return AheadDrafter(drafter, target, count)
