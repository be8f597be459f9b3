"""Speculative speculative decoding (arXiv 2603.03251).

While the target verifies, a draft model on another device drafts for the most probable outcomes.

An outcome is the number of accepted draft tokens and the bonus token. All outcomes are drafted in one tree, to which
each pass adds a token of each. If one of them occurs, its tokens are used at once, and missing ones are drafted as
usual; otherwise all are. So the draft is the same as without drafting ahead.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread
from typing import TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SampledPlan
from blockdraft.decode.sampling import best_tokens
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.draft_lm import DraftLMDrafter, DraftState, acceptance_probs_of
from blockdraft.errors import UsageError, describe
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, device_and_dtype

log = logging.getLogger(__name__)

NAME = "blockdraft-ahead"  # of the threads

# Draft tokens and the model's probabilities of them, by the tokens between a sequence and the draft tokens.
Outcomes: TypeAlias = dict[tuple[int, ...], list[tuple[int, float]]]


class Work:
    """Background drafting for the sequences of one state.

    Attributes:
        drafts: By first slot of a sequence, its length when drafting began, and what was drafted. Read it only after
            `stop`.
    """

    def __init__(self) -> None:
        self.drafts: dict[int, tuple[int, Outcomes]] = {}
        self._stop = Event()
        self._thread: Thread | None = None
        _works.add(self)

    def begin(self, draft: Callable[[Event], None]) -> None:
        """Call a function in a thread. It must return soon after its event is set. Errors are logged."""
        self._stop = Event()
        # A daemon thread does not keep the process from ending.
        thread = Thread(target=_logged, args=(partial(draft, self._stop),), name=NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the process is exiting, which needs no warning
            if "shutdown" not in str(error):
                _log_failure(error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread after its current pass, and wait for it."""
        thread = self._thread
        if thread is not None:
            self._stop.set()
            thread.join()
            self._thread = None


def _logged(draft: Callable[[], None]) -> None:
    try:
        draft()
    except Exception as error:
        _log_failure(error)


def _log_failure(error: Exception) -> None:
    log.warning("Drafting ahead failed, and the next draft is made as usual: %s", describe(error))


_works: WeakSet[Work] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the process exits or forks.

    At exit, a thread inside a forward pass would crash. After a fork, the child would have the model's lock, but not
    the thread that releases it.
    """
    for work in list(_works):
        work.stop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_stop_all)


class AheadState(DraftState):
    """State of the draft model. Every change first stops drafting ahead."""

    def __init__(self, cache: KVCache, batch: int, capacity: int) -> None:
        super().__init__(cache, batch, capacity)
        self.work = Work()

    def before_change(self, start: int) -> None:
        self.work.stop()
        self.work.drafts.pop(start, None)


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
        return AheadState(self._drafter.model.new_cache(batch, capacity), batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self._drafter.state_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return self._drafter.weight_bytes()

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return self._drafter.workspace_bytes(batch, nodes, slots)

    def observe(self, state: AheadState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        state.work.stop()
        self._drafter.observe(state, tokens, hidden_states, lengths)

    def propose(self, state: AheadState, anchor: Tensor, plan: Plan) -> Proposal:
        state.work.stop()
        prepared = [state.work.drafts.pop(start, None) for start in state.starts]
        if isinstance(plan, SampledPlan):
            return self._drafter.propose(state, anchor, plan)
        known = [
            [] if drafts is None else drafts[1].get((*committed[drafts[0] :], token), [])
            for drafts, committed, token in zip(prepared, state.committed, anchor.tolist(), strict=True)
        ]
        count = min(map(len, known))
        if None not in prepared:
            self.tried += 1
            self.foreseen += count > 0
        columns = [zip(*(drafts[depth] for drafts in known), strict=True) for depth in range(count)]
        foreseen = [tuple(torch.tensor(values, device=self.device) for values in column) for column in columns]
        proposal = self._drafter.propose(state, anchor, plan, foreseen)
        self._begin(state, proposal)
        return proposal

    def _begin(self, state: AheadState, proposal: Proposal) -> None:
        """Start drafting for the outcomes of these chains, as many tokens for each as a chain has."""
        draft_tokens = proposal.tokens.size(1) - 1
        chains = [
            ids[: 1 + sum(parent >= 0 for parent in parents)]
            for ids, parents in zip(proposal.tokens.tolist(), proposal.parent_lists, strict=True)
        ]
        texts = state.committed
        ends = [len(text) + len(chain) + draft_tokens for text, chain in zip(texts, chains, strict=True)]
        if not draft_tokens or max(ends) > self._drafter.model.max_context:
            return
        outcomes: list[Outcomes] = [{} for _ in texts]
        for start, text, of_sequence in zip(state.starts, texts, outcomes, strict=True):
            state.work.drafts[start] = len(text), of_sequence
        state.work.begin(partial(self._draft, state, chains, draft_tokens, outcomes))

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
            for start in state.starts:  # remove what an unfinished forward pass may have left
                state.cache.zero_slots(start)
            raise

    def _likeliest(
        self, state: DraftState, chains: Sequence[list[int]], outcomes: Sequence[Outcomes]
    ) -> tuple[list[list[int]], Tensor] | None:
        """Read sequences and chains, and record the outcomes whose draft tokens the chains already hold.

        Returns:
            The K most probable outcomes of each sequence, best first: the index of the last accepted token in the
            chain, and the bonus tokens `[B, K]` int64. None if a sequence has too few KV slots.
        """
        texts = state.committed
        state.truncate([len(text) for text in texts])  # the chain is read as part of the tree
        unread = [text[cached:] for text, cached in zip(texts, state.cache.lengths, strict=True)]
        tokens, parents = _filled([new + chain for new, chain in zip(unread, chains, strict=True)])
        if tokens.size(1) > state.cache.spare:
            return None
        logits = self._forward(state, tokens, parents)
        state.cache.commit([range(len(new)) for new in unread])
        places, following = list[list[int]](), list[Tensor]()
        for index, (new, chain) in enumerate(zip(unread, chains, strict=True)):
            log_probs = logits[index, len(new) : len(new) + len(chain)].float().log_softmax(-1)
            rest = torch.tensor(chain[1:], device=log_probs.device)[:, None]
            own = log_probs[:-1].gather(1, rest)
            acceptance_probs = own[:, 0].exp().tolist()
            for place in range(1, len(rest)):  # the engine may verify fewer draft tokens
                outcomes[index][tuple(chain[: place + 1])] = list(
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
            [own.setdefault((*chain[: place + 1], token), []) for place, token in zip(own_places, ids, strict=True)]
            for own, chain, own_places, ids in zip(outcomes, chains, places, latest.tolist(), strict=True)
        ]
        tokens, above = tokens.to(latest.device), torch.tensor(places)
        for _ in range(draft_tokens):
            below = torch.arange(tokens.size(1), tokens.size(1) + latest.size(1)).expand_as(above)
            tokens, parents = torch.cat([tokens, latest], 1), torch.cat([parents, above], 1)
            if stop.is_set() or tokens.size(1) > state.cache.spare:
                return
            logits = self._forward(state, tokens, parents)[:, -latest.size(1) :]
            latest, above = best_tokens(logits), below
            pairs = zip(made, latest.tolist(), acceptance_probs_of(logits, latest).tolist(), strict=True)
            for branches, ids, acceptance_probs in pairs:
                for branch, token, acceptance_prob in zip(branches, ids, acceptance_probs, strict=True):
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
        raise UsageError(f"ahead must be at least 0 (nothing is drafted ahead), got {ahead}.")
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
