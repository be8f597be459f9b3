"""Proposals from the logits of draft networks: whole blocks at once, or chains that grow while drafting pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockdraft.decode.distributions import best_tokens, probabilities
from blockdraft.decode.proposal import (
    Plan,
    Proposal,
    SampledPlan,
    SparseDistribution,
    TreePlan,
    chain,
    chain_q,
    sparsify,
)
from blockdraft.decode.sampling import draw
from blockdraft.decode.step_time import best_count
from blockdraft.decode.tree import best_first, best_tree
from blockdraft.timing import DRAFT_CHOICE, mark
from blockdraft.types import SamplingParams


class GrowingChain:
    """Decides after each draft token of a chain whether one more pays. `pays` in `decoder.c` is its twin.

    One more draft token is assumed to be accepted as often as the last one, if all before it are.

    Args:
        drafts_B: Float, 1 for each sequence that gets draft tokens, else 0.
        step_seconds, calibration: As in `Plan`; without times each draft token pays.

    Attributes:
        expected: Float `[B]`, expected accepted draft tokens of each sequence.
        survivals: For each draft token, the probabilities `[B]` that the chain is accepted up to it.
    """

    def __init__(self, drafts_B: Tensor, step_seconds: Sequence[float] | None, calibration: float = 1.0) -> None:
        self.expected, self.survivals = torch.zeros_like(drafts_B), list[Tensor]()
        self._survival, self._following = drafts_B, drafts_B
        self._seconds, self._calibration = step_seconds, calibration

    def pays(self) -> bool:
        """Return whether the time of one more draft token per sequence pays."""
        if self._seconds is None:
            return True
        count = len(self.survivals)
        if count + 1 >= len(self._seconds):
            return False
        now = len(self.expected) + self._calibration * float(self.expected.sum())
        more = now + self._calibration * float(self._following.sum())
        return more / self._seconds[count + 1] > now / self._seconds[count]

    def add(self, probs_B: Tensor) -> None:
        """Add a draft token per sequence with these acceptance probabilities, 0 where a sequence gets none."""
        self._survival = self._survival * probs_B
        self._following = self._survival * probs_B
        self.survivals.append(self._survival)
        self.expected = self.expected + self._survival


def paying_part(tokens: Tensor, probs: Tensor, seconds: Sequence[float], calibration: float) -> tuple[Tensor, Tensor]:
    """Return the part of drafted chains that pays, and the expected number of accepted draft tokens of each.

    Args:
        tokens: `[B, 1 + n]`, anchors first.
        probs: Probabilities `[B, n]` of the draft tokens.
        seconds, calibration: `step_seconds` and `calibration` of a `Plan`.
    """
    probs, growing = probs.cpu(), GrowingChain(torch.ones(len(tokens)), seconds, calibration)
    for column in probs.unbind(dim=1):
        if not growing.pays():
            break
        growing.add(column)
    return tokens[:, : 1 + len(growing.survivals)], growing.expected


def draft_chain(
    anchor: Tensor,
    plan: Plan,
    rooms: Sequence[int],
    next_logits: Callable[[Tensor], Tensor],
    kept: Tensor | None = None,
) -> Proposal:
    """Draft a chain token by token while one more pays. Its length never depends on a sample.

    Args:
        anchor: `[B]` int64.
        rooms: Maximum number of draft tokens of each sequence.
        next_logits: Returns the logits `[B, Vd]` that follow the last tokens `[B]` int64, which are the anchors first.
        kept: `[Vd]` int64, tokens that the logits are of; None is all.
    """
    draws = plan.uniforms if isinstance(plan, SampledPlan) else None
    seconds = plan.step_seconds if draws is None else None
    room = torch.tensor(rooms, device=anchor.device)
    growing = GrowingChain((room > 0).float(), seconds, plan.calibration)
    tokens, dists = [anchor], list[SparseDistribution]()
    for depth in range(max(rooms)):
        if not growing.pays():
            break
        mark(DRAFT_CHOICE)
        logits = next_logits(tokens[-1])[:, None]
        if draws is None:
            ids = best_tokens(logits)
            if seconds is not None:
                growing.add(log_probabilities(logits, plan.params)[:, 0].amax(dim=-1).exp() * (room > depth))
        else:
            dists.append(sparsify(probabilities(logits, plan.params)))  # [B, 1, K]
            sampled = draw(dists[-1].probs, draws[:, depth : depth + 1]).to(anchor.device)
            ids = dists[-1].ids[:, 0].gather(1, sampled)
        tokens.append(ids[:, 0] if kept is None else kept[ids[:, 0].to(anchor.device)])
    nodes = torch.stack(tokens, dim=1)
    parents = chain(nodes).parents.masked_fill(torch.arange(len(tokens), device=anchor.device) > room[:, None], -1)
    if dists:
        ids, probs = torch.cat([dist.ids for dist in dists], 1), torch.cat([dist.probs for dist in dists], 1)
        whole = SparseDistribution(ids if kept is None else kept[ids], probs)
        return Proposal(nodes, parents, chain_q(whole, len(dists), plan.params))
    if seconds is None:
        return Proposal(nodes, parents)
    survivals = [survival.tolist() for survival in growing.survivals]
    acceptance_probs = tuple(tuple(probs[row] for probs in survivals[:most]) for row, most in enumerate(rooms))
    return Proposal(nodes, parents, expected=tuple(growing.expected.tolist()), acceptance_probs=acceptance_probs)


def independent_draft_tokens(anchor: Tensor, logits: Tensor, plan: Plan) -> Proposal:
    """Return a proposal whose draft tokens are independent of each other, as many as the plan allows.

    Args:
        anchor: `[B]` int64.
        logits: `[B, D, V]` of the D positions behind the anchors.
    """
    if isinstance(plan, SampledPlan):
        return sampled_chain(anchor, logits, plan)
    if isinstance(plan, TreePlan):
        log_probs = log_probabilities(logits, plan.params)
        return best_tree(anchor, log_probs, plan.tree_budget, plan.step_seconds, plan.calibration)
    if plan.step_seconds is None:
        return chain(torch.cat([anchor[:, None], best_tokens(logits)], dim=1))
    best = log_probabilities(logits, plan.params).max(dim=-1, keepdim=True)
    return best_first(anchor, best.values, best.indices, plan.block_size - 1, plan.step_seconds, plan.calibration)


def sampled_chain(anchor: Tensor, logits: Tensor, plan: SampledPlan) -> Proposal:
    """Sample draft tokens with `plan.uniforms`, each from the distribution of its position.

    A sequence at temperature 0 gets the argmax, and no distributions. With `plan.step_seconds`, the length is
    that of the chain of the most probable draft tokens: if it depended on the sample, the output's distribution would
    change.

    Args:
        anchor: `[B]` int64.
        logits: `[B, D, V]`.
    """
    dists = sparsify(probabilities(logits, plan.params))
    draft_tokens = dists.ids.gather(2, draw(dists.probs, plan.uniforms).to(logits.device).unsqueeze(2)).squeeze(2)
    count = draft_tokens.size(1)
    if plan.step_seconds is not None:
        best = log_probabilities(logits, plan.params).amax(dim=-1)
        count = best_count(best.cumsum(dim=-1).exp().tolist(), plan.step_seconds, plan.calibration)
    tokens = torch.cat([anchor[:, None], draft_tokens[:, :count]], dim=1)
    return Proposal(tokens, chain(tokens).parents, chain_q(dists, count, plan.params))


def log_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return log probabilities `[B, ..., V]` at each sequence's temperature, or at 1 for temperature 0."""
    scores = logits.float()
    temperatures = [p.temperature or 1.0 for p in params]
    if any(temperature != 1 for temperature in temperatures):
        scores = scores - scores.amax(dim=-1, keepdim=True)  # avoids overflow at small temperatures
        scores = scores / torch.tensor(temperatures, device=scores.device).view(-1, *[1] * (scores.ndim - 1))
    return scores.log_softmax(dim=-1)
