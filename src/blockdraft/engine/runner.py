"""Executes what the scheduler decides: reads prompts and runs cycles.

There is one decode loop, `Runner.step`: plain decoding is a proposal that holds the anchor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdraft.decode.distributions import PART, Distributions, by_temperature
from blockdraft.decode.proposal import Plan, Proposal, chain, cut
from blockdraft.decode.verification import Verdict, verify
from blockdraft.drafters import Drafter
from blockdraft.engine.draft_context import DraftContext
from blockdraft.engine.request import Request, Row
from blockdraft.machine import send
from blockdraft.targets import Target, TargetOutput
from blockdraft.timing import BOOKKEEPING, COMMIT, DRAFT_TOKENS, DRAFTING, FORWARD, OBSERVE, VERIFICATION, Cycle, mark
from blockdraft.types import CycleTokens, CycleTrace, TokenLogprob


class Outcome(NamedTuple):
    """Outcome of a cycle.

    Attributes:
        draft_tokens: Guesses a row, padding of shorter rows included.
        deepest: For each row the guesses on its longest path.
        lengths: For each row the guesses that were accepted.
        expected: For each row the guesses that the drafter expected to be accepted, where it says so.
        part: Index of the drafter that drafted, where drafters take turns.
        seconds: Time of the cycle, without `late`.
        late: Seconds in which the drafter observed what earlier cycles had left to it.
        invalid: Indices of rows for which no token could be chosen, since logits were not finite or the grammar allows
            none. Nothing of them was committed.
    """

    draft_tokens: int
    deepest: list[int]
    lengths: list[int]
    expected: Sequence[float] | None
    part: int
    seconds: float
    late: float
    invalid: list[int]


class Runner:
    """Runs a target and a drafter on rows of their caches. Rows are named by their first slot.

    Args:
        slots: Slots of the caches, those of nodes included.
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

    def close(self, row: int, zero_slots: bool = False) -> None:
        """Forget a row.

        Args:
            zero_slots: Clear its slots too, in which there may be numbers that are not finite.
        """
        self.draft_context.forget(row)
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            if zero_slots:
                store.zero_slots(row, whole=True)
            store.close(row)

    def shrink(self, row: int, capacity: int) -> None:
        """Give up the slots of a row beyond the first `capacity`, with their tokens."""
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            store.shrink(row, capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another, which is empty."""
        self.draft_context.catch_up()
        for store in (self.cache, self.state):
            store.copy(source, row, length)

    def restore(self, row: Row) -> None:
        """Make a row as it was before a step that failed, so that its slots hold no more than its request knows."""
        request, cache = row.request, self.cache.of([row.start])
        # The last token of the answer is the anchor, which is not in the cache.
        known = row.read if row.reading else len(request.prompt) + len(request.token_ids) - 1
        cache.truncate([min(known, *cache.lengths)])
        self.zero_slots(row.start)

    def zero_slots(self, row: int) -> None:
        """Clear the slots behind a row's committed tokens."""
        for store in (self.cache, self.state):
            store.zero_slots(row)

    def held(self, row: int) -> int:
        """Number of committed tokens of a row."""
        lengths: list[int] = self.cache.of([row]).lengths
        return lengths[0]

    def read(self, rows: Sequence[Row], counts: Sequence[int]) -> list[int]:
        """Read the next tokens of prompts. The last token of a prompt yields the first one of the answer.

        Args:
            counts: Tokens to read of each row. Each row needs free slots for the largest of these numbers.

        Returns:
            Indices of rows whose prompt is read and for which no first token could be chosen, as `Outcome.invalid`.
        """
        cache = self.cache.of([row.start for row in rows])
        parts = [row.request.prompt[row.read : row.read + count] for row, count in zip(rows, counts, strict=True)]
        longest = max(counts)
        # Padded with a token of the row itself, so that nothing foreign comes into its slots.
        tokens = self._tensor([[*part, *part[-1:] * (longest - len(part))] for part in parts])
        last = self._tensor([count - 1 for count in counts])
        scored = any(row.request.params.prompt_logprobs is not None for row in rows)
        output = self.target.forward(
            tokens,
            chain(tokens).parents,
            cache,
            target_layers=self.drafter.target_layers,
            logits_at=None if scored else last,
        )
        prompt_logits = output.logits
        if scored:
            at = torch.arange(len(rows)), last.cpu()
            best = None if output.best is None else output.best[at][:, None]
            output = TargetOutput(prompt_logits[at][:, None], output.hidden_states, best)
        ready = [i for i, row in enumerate(rows) if row.read + counts[i] == len(row.request.prompt)]
        first, invalid = dict[int, int](), list[int]()  # first token of the answer, by the row's index
        if ready:
            logits = output.logits if len(ready) == len(rows) else output.logits[ready]
            best = None if output.best is None else output.best[ready]
            anchors = chain(tokens.gather(1, last[:, None])[ready])
            _, verdict = self._verdict([rows[i] for i in ready], anchors, TargetOutput(logits, None, best))
            for i, path, token in zip(ready, verdict.path, verdict.bonus, strict=True):
                if path:
                    first[i] = token
                else:
                    invalid.append(i)
        # Before the commit, since memory may run out here, and tokens not yet committed can be read again.
        scores = {i: answer_logprobs(rows[i].request, output.logits, i, [0], [token]) for i, token in first.items()}
        prompt_scores = [prompt_logprobs(row, prompt_logits[i, : counts[i]]) for i, row in enumerate(rows)]
        paths = [range(0 if i in invalid else count) for i, count in enumerate(counts)]
        cache.commit(paths)
        for i, row in enumerate(rows):
            if i not in invalid:
                row.request.prompt_logprobs += prompt_scores[i]
                row.read += counts[i]
        for i, token in first.items():
            rows[i].request.extend([token], [False], scores[i])
        self.draft_context.observe(rows, tokens, output.hidden_states, paths)
        return invalid

    def step(self, rows: Sequence[Row], plan: Plan) -> Outcome:
        """One cycle: propose, score, verify, commit, observe.

        Args:
            rows: Their prompts have been read, and their requests have not ended.
        """
        with Cycle() as timer:
            requests, starts = [row.request for row in rows], [row.start for row in rows]
            cache = self.cache.of(starts)
            anchor = self._tensor([request.token_ids[-1] for request in requests])
            timer.mark(BOOKKEEPING)
            late = self._catch_up(timer) if self.draft_context.due(rows, plan) else 0.0
            program, output = self._program(rows, plan), None
            if program is not None:
                proposal, tokens, verdict, broken = self._run(program, rows, cache, plan)
            else:
                proposal = self._propose(rows, anchor, plan)
                timer.mark(DRAFT_TOKENS)
                output = self.target.forward(
                    proposal.tokens, proposal.parents, cache, target_layers=self.drafter.target_layers
                )
                timer.mark(FORWARD)
                distributions, verdict = self._verdict(rows, proposal, output)
                tokens, broken = distributions.tokens, distributions.invalid_rows
            deepest = [max(depths) for depths in proposal.depth_lists]
            invalid = [i for i, path in enumerate(verdict.path) if not path]
            new = [[*(tokens[i][node] for node in path[1:]), verdict.bonus[i]] for i, path in enumerate(verdict.path)]
            # Before the commit, since memory may run out here, and what is not committed can be repeated.
            scores: list[Sequence[TokenLogprob]] = [()] * len(rows)
            if output is not None:
                scores = [
                    answer_logprobs(request, output.logits, i, verdict.path[i], new[i])
                    for i, request in enumerate(requests)
                ]
                timer.mark(VERIFICATION)
                cache.commit(verdict.path)
                timer.mark(COMMIT)
            for i, request in enumerate(requests):
                if i not in invalid:
                    count = request.extend(new[i], [True] * (len(new[i]) - 1) + [False], scores[i])
                    request.stats.committed.append(count)
                    request.stats.drafted.append(deepest[i])
            timer.mark(BOOKKEEPING)
            if output is None:  # the program has observed
                pass
            elif plan.block_size == 1 and not invalid:
                self.draft_context.keep(rows, proposal.tokens, output.hidden_states)
            else:
                self.draft_context.catch_up()
                self.draft_context.observe(rows, proposal.tokens, output.hidden_states, verdict.path)
            for i in broken:  # also of nodes that were not reached: their slots must not keep NaN
                self.zero_slots(starts[i])
            timer.mark(OBSERVE)
        for i, request in enumerate(requests):
            request.stats.draft_seconds += timer.of(DRAFTING)
            request.stats.verify_seconds += timer.seconds[FORWARD]
            request.stats.total_seconds += timer.total
            if request.trace and i not in invalid:
                request.cycle = _trace(proposal, tokens, verdict, i, timer.total)
        return Outcome(
            draft_tokens=proposal.tokens.size(1) - 1,
            deepest=deepest,
            lengths=[max(len(path) - 1, 0) for path in verdict.path],
            expected=proposal.expected,
            part=proposal.part,
            seconds=timer.total - late,
            late=late,
            invalid=invalid,
        )

    def _program(self, rows: Sequence[Row], plan: Plan) -> Callable[..., CycleTokens] | None:
        """The drafter's program for the whole cycle, where it has one and no request asks for more than it does."""
        requests = [row.request for row in rows]
        if self._sampled or any(each.drafting or each.grammar is not None for each in requests):
            return None
        if any(not by_temperature(each) or each.logprobs is not None for each in plan.params):
            return None
        return self.drafter.cycle(plan)

    def _run(
        self, program: Callable[..., CycleTokens], rows: Sequence[Row], cache: Any, plan: Plan
    ) -> tuple[Proposal, list[list[int]], Verdict, list[int]]:
        """Run a whole cycle as one program.

        Returns:
            The proposal, the tokens of its nodes, the verdict, and rows with a node whose logits are not finite.
        """
        requests, state = [row.request for row in rows], self.state.of([row.start for row in rows])
        uniforms = None
        if any(params.temperature > 0 for params in plan.params):
            uniforms = torch.stack([r.random.at(range(n := len(r.token_ids), n + plan.block_size)) for r in requests])
        found = program(cache, state, [request.token_ids[-1] for request in requests], uniforms)
        mark(FORWARD)
        bonus = [after[path[-1]] if path else -1 for after, path in zip(found.following, found.paths, strict=True)]
        broken = [row for row, after in enumerate(found.following) if -1 in after]
        proposal = Proposal(torch.tensor(found.tokens), torch.tensor(found.parents))
        return proposal, found.tokens, Verdict(found.paths, bonus), broken

    def _propose(self, rows: Sequence[Row], anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        requests = [row.request for row in rows]
        if self._sampled:
            plan = replace(plan, draws=self._fresh(requests)[:, : plan.block_size - 1])
        proposal = self.drafter.propose(self.state.of([row.start for row in rows]), anchor, plan)
        bounds = [request.drafting for request in requests]
        return cut(proposal, bounds) if any(bounds) else proposal

    def _catch_up(self, timer: Cycle) -> float:
        """Let the drafter observe what is kept. Returns the seconds, which are no part of this cycle's own time."""
        before = timer.total
        self.draft_context.catch_up()
        timer.mark(OBSERVE)
        return timer.total - before

    def _verdict(self, rows: Sequence[Row], proposal: Proposal, output: TargetOutput) -> tuple[Distributions, Verdict]:
        requests = [row.request for row in rows]
        params = [request.params for request in requests]
        uniforms = tests = None
        if any(each.temperature > 0 for each in params):
            # Node i's number decides the output token that follows it.
            each = zip(requests, proposal.depth_lists, strict=True)
            uniforms = torch.stack([r.random.at([len(r.token_ids) + d for d in depths]) for r, depths in each])
        if proposal.q is not None:
            tests = self._fresh(requests)[:, self.drafter.block_size :][:, : proposal.tokens.size(1)]
        distributions = Distributions(
            output.logits,
            params,
            tokens_BN=proposal.tokens,
            parents_BN=proposal.parents,
            prompts=[request.prompt for request in requests],
            outputs=[request.token_ids for request in requests],
            best_BN=output.best,
            rules=[request.grammar for request in requests],
        )
        return distributions, verify(proposal, distributions, uniforms, tests)

    def _fresh(self, requests: Sequence[Request]) -> Tensor:
        """Random numbers `[B, 2 * block_size]` of a cycle, to sample the guesses of a chain and to test its nodes."""
        count = 2 * self.drafter.block_size
        return torch.stack([request.random.fresh(len(request.token_ids), count) for request in requests])

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return send(torch.tensor(values), self.target.device)


def _trace(proposal: Proposal, tokens: list[list[int]], verdict: Verdict, row: int, seconds: float) -> CycleTrace:
    parents = proposal.parent_lists[row]
    count = 1 + max(node for node, parent in enumerate(parents) if node == 0 or parent >= 0)  # padding is last
    return CycleTrace(
        tokens=tuple(tokens[row][:count]),
        parents=tuple(parents[:count]),
        path=tuple(verdict.path[row]),
        seconds=seconds,
    )


def token_logprobs(logits_MV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-softmax of each token under its logits, with the `count` likeliest tokens; of equals the lower ids first."""
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
    """Logprobs of the tokens after these nodes, if the request asks for them."""
    count = request.params.logprobs
    return () if count is None or not nodes else token_logprobs(logits_BNV[row, nodes], tokens, count)


def prompt_logprobs(row: Row, logits_NV: Tensor) -> Sequence[TokenLogprob | None]:
    """Logprobs of the prompt's tokens that follow those just read, if the request asks for them."""
    request, first = row.request, row.read + 1
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    following = request.prompt[first : first + len(logits_NV)]
    known = token_logprobs(logits_NV[: len(following)], following, count)
    return [None, *known] if row.read == 0 else known
