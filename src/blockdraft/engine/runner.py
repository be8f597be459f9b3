"""Executes: reads prompts and runs cycles. It decides nothing, and there is one decode loop: plain decoding is a
proposal that holds only the anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.decode.distributions import PART, Distributions
from blockdraft.decode.proposal import Plan, Proposal, chain, cut
from blockdraft.decode.verification import Verdict, verify
from blockdraft.drafters import Drafter
from blockdraft.engine.draft_context import DraftContext
from blockdraft.engine.request import Request, Row
from blockdraft.machine import send
from blockdraft.targets import Target, TargetOutput
from blockdraft.timing import (
    BOOKKEEPING,
    COMMIT,
    DRAFTING,
    FORWARD,
    GUESSES,
    OBSERVE,
    VERIFICATION,
    Cycle,
)
from blockdraft.types import CycleTrace, TokenLogprob


class Outcome(NamedTuple):
    """What a cycle yielded.

    Attributes:
        guesses: Guesses a row, those that fill up shorter rows included.
        deepest: For each row the guesses on its longest path.
        lengths: For each row the guesses that were accepted.
        expected: For each row the guesses that the drafter expected to be accepted, where it says so.
        seconds: Time of the cycle, less what earlier ones had left to do.
        lawless: Rows, by their place, for which the target computed no finite numbers; nothing of them was committed.
    """

    guesses: int
    deepest: list[int]
    lengths: list[int]
    expected: Sequence[float] | None
    seconds: float
    lawless: list[int]


class Runner:
    """Runs a target and a drafter on rows of their stores.

    Args:
        slots: Tokens that the stores hold, nodes included.
        sampled: As in `Drafting`.
    """

    def __init__(self, target: Target, drafter: Drafter, slots: int, sampled: bool = False) -> None:
        self.target, self.drafter = target, drafter
        self._sampled = sampled
        self.cache, self.state = target.new_cache(1, slots), drafter.new_state(1, slots)
        for store in (self.cache, self.state):
            store.close(0)
        self.draft_context = DraftContext(drafter, self.state, target.device)

    def open(self, row: int, capacity: int) -> None:
        """Begin an empty row."""
        for store in (self.cache, self.state):
            store.open(row, capacity)

    def close(self, row: int, wipe: bool = False) -> None:
        """Forget a row; its numbers too, where they may not be finite."""
        self.draft_context.forget(row)
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            if wipe:
                store.wipe(row, whole=True)
            store.close(row)

    def shrink(self, row: int, capacity: int) -> None:
        """Give up what a row holds beyond so many tokens, and their slots."""
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            store.shrink(row, capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        """Make the first tokens of one row those of another, which is empty."""
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            store.copy(source, row, length)

    def restore(self, row: Row) -> None:
        """Make a row as it was before a forward that failed: nothing is in its slots but what its request knows."""
        request, cache = row.request, self.cache.of([row.start])
        known = row.read if row.reading else len(request.prompt) + len(request.token_ids) - 1
        cache.truncate([min(known, *cache.lengths)])
        self.wipe(row.start)

    def wipe(self, row: int) -> None:
        """Let no number stay that a forward has left behind the row's committed tokens."""
        for store in (self.cache, self.state):
            store.wipe(row)

    def held(self, row: int) -> int:
        """Committed tokens of a row."""
        lengths: list[int] = self.cache.of([row]).lengths
        return lengths[0]

    def read(self, rows: Sequence[Row], counts: Sequence[int]) -> list[int]:
        """Read the next tokens of prompts; the last token of a prompt yields the first of the answer.

        Args:
            counts: Tokens of each row. Each row has slots for as many nodes as the largest of them says.

        Returns:
            Rows, by their place, whose prompt is read and for whose next token there are no finite numbers.
        """
        starts = [row.start for row in rows]
        cache = self.cache.of(starts)
        parts = [row.request.prompt[row.read : row.read + count] for row, count in zip(rows, counts, strict=True)]
        longest = max(counts)
        # Filled up with a token of its own, so that nothing comes into a row that is not its text.
        tokens = self._tensor([[*part, *part[-1:] * (longest - len(part))] for part in parts])
        last = self._tensor([count - 1 for count in counts])
        scored = any(row.request.params.prompt_logprobs is not None for row in rows)
        wanted = None if scored else last
        output = self.target.forward(tokens, chain(tokens).parents, cache, self.drafter.taps, logits_at=wanted)
        every = output.logits
        if scored:
            place = torch.arange(len(rows)), last.cpu()
            best = None if output.best is None else output.best[place][:, None]
            output = TargetOutput(every[place][:, None], output.features, best)
        ready = [at for at, row in enumerate(rows) if row.read + counts[at] == len(row.request.prompt)]
        lawless: list[int] = []
        if ready:
            anchors = chain(tokens.gather(1, last[:, None])[ready])
            best = None if output.best is None else output.best[ready]
            logits = output.logits if len(ready) == len(rows) else output.logits[ready]
            _, verdict = self._verdict([rows[at] for at in ready], anchors, TargetOutput(logits, None, best))
            lawless = [at for at, path in zip(ready, verdict.path, strict=True) if not path]
        first = {
            at: token for at, token in zip(ready, verdict.bonus if ready else (), strict=True) if at not in lawless
        }
        # Memory may run out here, and whoever has read no token yet can read them again.
        scores = {at: answer_logprobs(rows[at].request, output.logits, at, [0], [token]) for at, token in first.items()}
        known = [prompt_logprobs(row, every[at, : counts[at]]) for at, row in enumerate(rows)]
        path = [range(0 if at in lawless else count) for at, count in enumerate(counts)]
        cache.commit(path)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if at not in lawless:
                row.request.prompt_logprobs += known[at]
                row.read += count
        for at, token in first.items():
            rows[at].request.extend([token], [False], scores[at])
        self.draft_context.observe(rows, tokens, output.features, path)
        return lawless

    def step(self, rows: Sequence[Row], plan: Plan) -> Outcome:
        """One cycle: propose, score, verify, commit, observe. No row may be reading, and no request may have ended."""
        with Cycle() as timer:
            requests, starts = [row.request for row in rows], [row.start for row in rows]
            cache, state = self.cache.of(starts), self.state.of(starts)
            if self._sampled and plan.block_size > 1:
                plan = replace(plan, draws=self._fresh(requests)[:, : plan.block_size - 1])
            anchor = self._tensor([request.token_ids[-1] for request in requests])
            timer.mark(BOOKKEEPING)
            late = self._catch_up_in(timer) if self.draft_context.due(rows, plan) else 0.0
            proposal = chain(anchor[:, None]) if plan.block_size == 1 else self.drafter.propose(state, anchor, plan)
            if any(request.drafting for request in requests):
                proposal = cut(proposal, [request.drafting for request in requests])
            timer.mark(GUESSES)
            output = self.target.forward(proposal.tokens, proposal.parents, cache, self.drafter.taps)
            timer.mark(FORWARD)
            distributions, verdict = self._verdict(rows, proposal, output)
            deepest = [max(row) for row in proposal.depth_lists]
            lawless = [place for place, path in enumerate(verdict.path) if not path]
            new = [
                [*(distributions.tokens[place][node] for node in path[1:]), verdict.bonus[place]]
                for place, path in enumerate(verdict.path)
            ]
            # Memory may run out here, and what has not been committed can be done again.
            scores = [
                answer_logprobs(request, output.logits, place, verdict.path[place], new[place])
                for place, request in enumerate(requests)
            ]
            timer.mark(VERIFICATION)
            cache.commit(verdict.path)
            timer.mark(COMMIT)
            for place, request in enumerate(requests):
                if place in lawless:
                    continue
                guessed = [True] * (len(new[place]) - 1) + [False]
                taken = request.extend(new[place], guessed, scores[place])
                request.stats.committed.append(taken)
                request.stats.drafted.append(deepest[place])
            timer.mark(BOOKKEEPING)
            if plan.block_size == 1 and not lawless:
                self.draft_context.keep(rows, proposal.tokens, output.features)
            else:
                self.draft_context.catch_up()
                self.draft_context.observe(rows, proposal.tokens, output.features, verdict.path)
            for place in distributions.invalid_rows:  # what no walk has met lies in the row's slots, and must not stay
                self.wipe(starts[place])
            timer.mark(OBSERVE)
        drafting, verifying = timer.of(DRAFTING), timer.seconds[FORWARD]
        total = timer.total
        for place, request in enumerate(requests):
            stats = request.stats
            stats.draft_seconds += drafting
            stats.verify_seconds += verifying
            stats.total_seconds += total
            if request.trace and place not in lawless:
                request.cycle = _traced(proposal, distributions.tokens, verdict, place, total)
        lengths = [max(len(nodes) - 1, 0) for nodes in verdict.path]
        guesses = proposal.tokens.size(1) - 1
        return Outcome(guesses, deepest, lengths, proposal.expected, total - late, lawless)

    def _catch_up_in(self, timer: Cycle) -> float:
        """Tell the drafter what is kept. Returns the seconds that it took, which say nothing of this cycle."""
        before = timer.total
        self.draft_context.catch_up()
        timer.mark(OBSERVE)
        return timer.total - before

    def _verdict(self, rows: Sequence[Row], proposal: Proposal, output: TargetOutput) -> tuple[Distributions, Verdict]:
        requests = [row.request for row in rows]
        params = [request.params for request in requests]
        uniforms = tests = None
        if any(each.temperature > 0 for each in params):
            # Node i's draw decides the output token that follows it.
            each = zip(requests, proposal.depth_lists, strict=True)
            uniforms = torch.stack([r.random.at([len(r.token_ids) + d for d in depths]) for r, depths in each])
        if proposal.q is not None:
            tests = self._fresh(requests)[:, self.drafter.block_size :][:, : proposal.tokens.size(1)]
        prompts, outputs = [request.prompt for request in requests], [request.token_ids for request in requests]
        rules = [request.grammar for request in requests]
        distributions = Distributions(
            output.logits, params, proposal.tokens, proposal.parents, prompts, outputs, output.best, rules
        )
        return distributions, verify(proposal, distributions, uniforms, tests)

    def _fresh(self, requests: Sequence[Request]) -> Tensor:
        """Numbers `[B, 2 * block_size]` of this cycle: to draw the guesses of a chain, then to test its nodes."""
        count = 2 * self.drafter.block_size
        return torch.stack([request.random.fresh(len(request.token_ids), count) for request in requests])

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return send(torch.tensor(values), self.target.device)


def _traced(proposal: Proposal, tokens: list[list[int]], verdict: Verdict, row: int, seconds: float) -> CycleTrace:
    parents = proposal.parent_lists[row]
    count = 1 + max(node for node, parent in enumerate(parents) if node == 0 or parent >= 0)  # what fills up is last
    return CycleTrace(tuple(tokens[row][:count]), tuple(parents[:count]), tuple(verdict.path[row]), seconds)


def token_logprobs(logits_MV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-softmax of each token under its logits, with the `count` likeliest tokens, of equals the lower ids first."""
    found = []
    step, count = max(1, PART // logits_MV.size(-1)), min(count, logits_MV.size(-1))
    for first in range(0, len(tokens), step):
        own = tokens[first : first + step]
        log_probs = logits_MV[first : first + step].float().log_softmax(dim=-1)
        ids = torch.tensor(own, device=log_probs.device)
        chosen = log_probs.gather(1, ids[:, None])[:, 0].tolist()
        top = log_probs.topk(count, dim=-1)
        for token, value, each in zip(
            own, chosen, zip(top.indices.tolist(), top.values.tolist(), strict=True), strict=True
        ):
            best = sorted(zip(*each, strict=True), key=lambda entry: (-entry[1], entry[0]))
            found.append(TokenLogprob(token, value, tuple(best)))
    return found


def answer_logprobs(
    request: Request, logits_BNV: Tensor, row: int, nodes: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Of the tokens after these nodes, if the request asks for them."""
    count = request.params.logprobs
    return () if count is None or not nodes else token_logprobs(logits_BNV[row, nodes], tokens, count)


def prompt_logprobs(row: Row, logits_NV: Tensor) -> Sequence[TokenLogprob | None]:
    """Of the tokens of a prompt that follow those just read, if the request asks for it."""
    request, first = row.request, row.read + 1
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    following = request.prompt[first : first + len(logits_NV)]
    known = token_logprobs(logits_NV[: len(following)], following, count)
    return [None, *known] if row.read == 0 else known
