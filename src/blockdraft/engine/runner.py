"""Executes what the scheduler decides: prefill, and the one decode loop.

`Runner.step` is the whole loop: propose, score, verify, commit, observe. Plain decoding is a proposal that holds the
anchor alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.decode.distributions import PART, Distributions
from blockdraft.decode.merging import put_first
from blockdraft.decode.proposal import Plan, Proposal, chain, cut
from blockdraft.decode.step_time import NODE, NODE_CPU, assumed_steps, best_count
from blockdraft.decode.verification import Verdict, verify
from blockdraft.drafters import Drafter, HiddenStateObserver, select_layers
from blockdraft.engine.request import Request, RunningSequence
from blockdraft.errors import RequestError, describe
from blockdraft.machine import send
from blockdraft.nn.cache import part_of
from blockdraft.targets import Target, TargetOutput
from blockdraft.timing import BOOKKEEPING, COMMIT, DRAFT_CHOICE, DRAFTING, FORWARD, OBSERVE, VERIFICATION, StepTimer
from blockdraft.types import StepTrace, TokenLogprob

MAX_PENDING_STEPS = 512  # plain steps before the drafter observes what they committed
OBSERVE_TOKENS = 256  # tokens of a batch in one such call of `observe`, whose memory grows with them
MAX_OWN_NODES = 64  # nodes of a batch whose requests provide draft tokens themselves, unless its plan has more


class Outcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        requests: The requests of the batch.
        plan: The plan that was carried out.
        num_draft_tokens: Draft tokens per sequence, including padding.
        max_depth: Length of the longest draft path of each sequence.
        accepted: Accepted draft tokens of each sequence.
        expected: Accepted draft tokens that the drafter expected, if it says so.
        drafter: Index of the member that drafted, for a `HybridPlan`.
        seconds: Time of the step, without `catch_up_seconds`.
        catch_up_seconds: Time the drafter spent on tokens left over from earlier steps.
        has_own_drafts: Whether draft tokens came from the requests themselves.
        invalid: Indices of sequences without a next token, because logits were not finite or the grammar allows none.
            Nothing of them was committed.
    """

    requests: Sequence[Request]
    plan: Plan
    num_draft_tokens: int
    max_depth: Sequence[int]
    accepted: Sequence[int]
    expected: Sequence[float] | None = None
    drafter: int = 0
    seconds: float = 0.0
    catch_up_seconds: float = 0.0
    has_own_drafts: bool = False
    invalid: Sequence[int] = ()


class Runner:
    """Runs a target and a drafter on sequences, which are named by their first KV slot in both caches.

    The drafter observes the tokens of plain steps later, all at once before its next draft: a call in each step would
    slow plain decoding down.

    Args:
        slots: KV slots of each cache, those of draft tokens included.
        sampled: As in `Drafting`.
        observer: Keeps the hidden states of all sequences, for a recorder; None keeps none.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        slots: int,
        sampled: bool = False,
        observer: HiddenStateObserver | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self._sampled, self._observer = sampled, observer
        self.cache, self.state = target.new_cache(1, slots), drafter.new_state(1, slots)
        self._stores = [self.cache, self.state]
        self._target_layers = drafter.target_layers
        if observer is not None:
            self._log = observer.new_state(1, slots)
            self._stores.append(self._log)
            self._target_layers = tuple(sorted({*drafter.target_layers, *observer.target_layers}))
        for store in self._stores:
            store.close(0)
        is_compiled = all(part.compile_reason is None for part in drafter.parts)
        self._step_context = target.step_context() if is_compiled else nullcontext()
        self._pending: list[tuple[Tensor, Tensor | None]] = []  # tokens [B, 1] and hidden states [B, 1, m * H] of steps
        self._pending_of: list[RunningSequence] = []

    # Sequences.

    def open(self, start: int, capacity: int) -> None:
        """Begin an empty sequence."""
        for store in self._stores:
            store.open(start, capacity)

    def close(self, start: int, zero_slots: bool = False) -> None:
        """Forget a sequence.

        Args:
            zero_slots: Zero its KV slots, in which numbers may not be finite.
        """
        if [sequence.start for sequence in self._pending_of] == [start]:  # the drafter will not be asked about it
            self._pending, self._pending_of = [], []
        self.catch_up()
        for store in self._stores:
            if zero_slots:
                store.zero_slots(start, whole=True)
            store.close(start)

    def shrink(self, start: int, capacity: int) -> None:
        """Free the KV slots of a sequence beyond the first `capacity`, with their tokens."""
        self.catch_up()
        for store in self._stores:
            store.shrink(start, capacity)

    def cut(self, start: int, length: int, capacity: int) -> None:
        """Keep the first `length` tokens of a sequence, as many as `reusable` says, and give it `capacity` KV slots."""
        self.shrink(start, length)
        for store in self._stores:
            store.grow(start, capacity)

    def copy(self, source: int, start: int, length: int) -> None:
        """Copy the first `length` tokens of a sequence, as many as `reusable` says, to another, which is empty."""
        self.catch_up()
        assert length <= self.committed_length(source)
        for store in self._stores:
            store.copy(source, start, length)

    def reusable(self, start: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence can be copied or exported at most."""
        reusable = length
        for store in (self.cache, self.state, self.cache):  # the first may keep less of what the second does
            reusable = store.reusable(start, reusable)
        return reusable

    def export(self, start: int, length: int) -> dict[str, Tensor]:
        """Return copies of what target and drafter keep for a sequence's first `length` tokens, by name."""
        self.catch_up()
        parts = (("target", self.cache), ("drafter", self.state))
        return {f"{part}.{name}": t for part, store in parts for name, t in store.export(start, length).items()}

    def load(self, start: int, tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Fill an empty sequence with committed tokens, from what `export` returned for a sequence that begins so."""
        self.catch_up()
        for part, store in (("target", self.cache), ("drafter", self.state)):
            store.load(start, tokens, part_of(tensors, f"{part}."))

    def remember(self, request: Request) -> None:
        """Let the drafter keep the output of a finished request for others of its `lookup_scope`."""
        if request.params.lookup_scope is not None:
            self.drafter.remember(self.state, request.params.lookup_scope, request.token_ids)

    def hidden_states(self, start: int) -> Tensor | None:
        """Return the hidden states `[S, m * H]` of a sequence's committed tokens, or None without an observer."""
        self.catch_up()
        return None if self._observer is None else self._log.read(start)

    def restore(self, sequence: RunningSequence) -> None:
        """Undo a failed step: keep only the tokens that the request knows."""
        request, cache = sequence.request, self.cache.of([sequence.start])
        # The last token of the answer is the anchor, which is not in the cache.
        known = sequence.prefilled if sequence.in_prefill else len(request.prompt) + len(request.token_ids) - 1
        cache.truncate([min(known, *cache.lengths)])
        self._zero_slots(sequence.start)

    def _zero_slots(self, start: int) -> None:
        for store in self._stores:
            store.zero_slots(start)

    def committed_length(self, start: int) -> int:
        """Return the number of committed tokens of a sequence."""
        return self.cache.of([start]).lengths[0]

    # Prefill and decode.

    def prefill(self, sequences: Sequence[RunningSequence], counts: Sequence[int]) -> list[int]:
        """Read the next tokens of prompts. The last token of a prompt yields the first token of the answer.

        Args:
            counts: Tokens to read of each prompt. Each sequence needs free KV slots for the largest count.

        Returns:
            Indices of sequences whose prompt is read and that have no first token, as in `Outcome.invalid`.
        """
        cache = self.cache.of([sequence.start for sequence in sequences])
        parts = [s.request.prompt[s.prefilled : s.prefilled + n] for s, n in zip(sequences, counts, strict=True)]
        longest = max(counts)
        # Padding repeats a token of the same prompt: another's values might be NaN, and would stay in the slots.
        tokens = self._tensor([[*part, *part[-1:] * (longest - len(part))] for part in parts])
        last = self._tensor([count - 1 for count in counts])
        scored = any(sequence.request.params.prompt_logprobs is not None for sequence in sequences)
        output = self.target.forward(
            tokens,
            chain(tokens).parents,
            cache,
            target_layers=self._target_layers,
            logits_at=None if scored else last,
        )
        prompt_logits = output.logits
        if scored:
            at = torch.arange(len(sequences)), last.cpu()
            best = None if output.best is None else output.best[at][:, None]
            output = TargetOutput(prompt_logits[at][:, None], output.hidden_states, best)
        ready = [i for i, s in enumerate(sequences) if s.prefilled + counts[i] == len(s.request.prompt)]
        first, invalid = dict[int, int](), list[int]()  # first token of the answer, by index
        if ready:
            logits = output.logits if len(ready) == len(sequences) else output.logits[ready]
            best = None if output.best is None else output.best[ready]
            anchors = chain(tokens.gather(1, last[:, None])[ready])
            requests = [sequences[i].request for i in ready]
            _, verdict = self._verify(requests, anchors, TargetOutput(logits, None, best))
            for i, path, token in zip(ready, verdict.path, verdict.bonus, strict=True):
                if path:
                    first[i] = token
                else:
                    invalid.append(i)
        # Log probabilities before the commit: memory may run out here, and an uncommitted step can be repeated.
        logprobs = {
            i: answer_logprobs(sequences[i].request, output.logits, i, [0], [token]) for i, token in first.items()
        }
        prompt_scores = [prompt_logprobs(s, prompt_logits[i, : counts[i]]) for i, s in enumerate(sequences)]
        paths = [range(0 if i in invalid else count) for i, count in enumerate(counts)]
        cache.commit(paths)
        for i, sequence in enumerate(sequences):
            if i not in invalid:
                sequence.request.prompt_logprobs += prompt_scores[i]
                sequence.request.num_prefilled += counts[i]
        for i, token in first.items():
            sequences[i].request.extend([token], [False], logprobs[i])
        self._observe(sequences, tokens, output.hidden_states, paths)
        return invalid

    def step(self, sequences: Sequence[RunningSequence], plan: Plan, own_drafts: bool = True) -> Outcome:
        """Run one step: propose, score, verify, commit, observe.

        Args:
            sequences: Running sequences whose prompts have been read.
            own_drafts: Whether the requests' own draft tokens come before the drafter's.
        """
        with self._step_context, StepTimer() as timer:
            requests, starts = [sequence.request for sequence in sequences], [sequence.start for sequence in sequences]
            cache = self.cache.of(starts)
            anchor = self._tensor([request.token_ids[-1] for request in requests])
            timer.mark(BOOKKEEPING)
            catch_up_seconds = 0.0
            if self._must_catch_up(sequences, plan):
                before = timer.total
                self.catch_up()
                timer.mark(OBSERVE)
                catch_up_seconds = timer.total - before

            has_own_drafts = own_drafts and any(request.has_own_drafts for request in requests)
            own = self._own_drafts(sequences, plan) if has_own_drafts else [[]] * len(requests)
            proposal = self._propose(requests, starts, anchor, plan, own)
            catch_up_seconds += proposal.catch_up_seconds
            timer.mark(DRAFT_CHOICE)
            output = self.target.forward(proposal.tokens, proposal.parents, cache, target_layers=self._target_layers)
            timer.mark(FORWARD)
            distributions, verdict = self._verify(requests, proposal, output)
            tokens, paths = distributions.tokens, verdict.path
            max_depth = [*map(max, proposal.depth_lists)]
            invalid = [i for i, path in enumerate(paths) if not path]
            new = [[*map(tokens[i].__getitem__, path[1:]), verdict.bonus[i]] for i, path in enumerate(paths)]
            # Before the commit: memory may run out here, and an uncommitted step can be repeated.
            logprobs = [
                answer_logprobs(request, output.logits, i, paths[i], new[i]) for i, request in enumerate(requests)
            ]
            timer.mark(VERIFICATION)
            cache.commit(paths)
            timer.mark(COMMIT)
            for i, request in enumerate(requests):
                if paths[i]:
                    count = request.extend(new[i], [True] * (len(new[i]) - 1) + [False], logprobs[i])
                    request.stats.committed.append(count)
                    request.stats.drafted.append(max_depth[i])
                    if own[i]:
                        request.count_own_draft(len(own[i]), paths[i][: 1 + count])
            timer.mark(BOOKKEEPING)
            if plan.block_size == proposal.tokens.size(1) == 1 and not invalid:
                self._pending.append((proposal.tokens, output.hidden_states))
                self._pending_of = list(sequences)
            else:
                self.catch_up()
                self._observe(sequences, proposal.tokens, output.hidden_states, paths)
            for i in distributions.invalid_rows:  # also of nodes that no path reached: the slots must not keep NaN
                self._zero_slots(starts[i])
            timer.mark(OBSERVE)
        total, draft_seconds, verify_seconds = timer.total, timer.of(DRAFTING), timer.seconds[FORWARD]
        for i, request in enumerate(requests):
            stats = request.stats
            stats.draft_seconds += draft_seconds
            stats.verify_seconds += verify_seconds
            stats.total_seconds += total
            if request.trace and paths[i]:
                request.step = _trace(proposal, tokens, verdict, i, total)
        return Outcome(
            requests=requests,
            plan=plan,
            num_draft_tokens=proposal.tokens.size(1) - 1,
            max_depth=max_depth,
            accepted=[max(len(path) - 1, 0) for path in paths],
            expected=proposal.expected,
            drafter=proposal.part,
            seconds=total - catch_up_seconds,
            catch_up_seconds=catch_up_seconds,
            has_own_drafts=any(own),
            invalid=invalid,
        )

    def _propose(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        anchor: Tensor,
        plan: Plan,
        own: Sequence[list[int]],
    ) -> Proposal:
        if plan.block_size == 1 or all(len(draft_tokens) >= plan.block_size - 1 for draft_tokens in own):
            proposal = chain(anchor.unsqueeze(1))
        else:
            if self._sampled and any(params.temperature > 0 for params in plan.params):
                plan = plan.as_sampled(self._fresh_numbers(requests)[:, : plan.block_size - 1])
            proposal = self.drafter.propose(self.state.of(starts), anchor, plan)
        if any(own):
            proposal = put_first(own, proposal, plan.tree_budget if plan.step_seconds is None else 0)
        if proposal.tokens.size(1) == 1 or not any(limits := [request.drafting for request in requests]):
            return proposal
        return cut(proposal, limits)

    def _own_drafts(self, sequences: Sequence[RunningSequence], plan: Plan) -> list[list[int]]:
        """Return the draft tokens that requests provide themselves, as many as save time and have KV slots.

        All sequences of a forward have as many nodes as the longest. Next to sampled chains, the number of draft tokens
        must not depend on the other sequences.
        """
        rows = len(sequences)
        beside_sampled = self._sampled and plan.block_size > 1 and any(params.temperature > 0 for params in plan.params)
        most = max(plan.block_size - 1, plan.tree_budget)  # for which there are KV slots behind the longest answer
        if not beside_sampled:
            free_slots = min(sequence.request.remaining for sequence in sequences)
            most = max(most, min(MAX_OWN_NODES // rows - 1, free_slots))
        drafts = [sequence.request.own_draft(most) for sequence in sequences]
        if not beside_sampled:
            seconds = plan.step_seconds
            if seconds is None or len(seconds) <= most:
                node = NODE_CPU if self.target.device.type == "cpu" else NODE  # a plain step has one per row
                seconds = assumed_steps(rows, most, 0.0, node / (1 + node * (rows - 1)))
            most = best_count([acceptance_probs for _, acceptance_probs in drafts], seconds)
        return [tokens[:most] for tokens, _ in drafts]

    def _verify(
        self, requests: Sequence[Request], proposal: Proposal, output: TargetOutput
    ) -> tuple[Distributions, Verdict]:
        params = [request.params for request in requests]
        uniforms = tests = None
        if any(p.temperature > 0 for p in params):
            # The number of a node decides the token that follows it.
            depths = zip(requests, proposal.depth_lists, strict=True)
            uniforms = torch.stack([r.random.at([len(r.token_ids) + depth for depth in nodes]) for r, nodes in depths])
        if proposal.q is not None:
            tests = self._fresh_numbers(requests)[:, self.drafter.block_size :][:, : proposal.tokens.size(1)]
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

    def _fresh_numbers(self, requests: Sequence[Request]) -> Tensor:
        """Return `[B, 2 * block_size]` numbers of a step, to sample a chain's draft tokens and to test its nodes."""
        count = 2 * self.drafter.block_size
        return torch.stack([request.random.fresh(len(request.token_ids), count) for request in requests])

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        tensor = torch.tensor(values)
        return tensor if self.target.device.type == "cpu" else send(tensor, self.target.device)

    # What the drafter observes.

    def _must_catch_up(self, sequences: Sequence[RunningSequence], plan: Plan) -> bool:
        if not self._pending:
            return False
        return plan.block_size > 1 or len(self._pending) == MAX_PENDING_STEPS or list(sequences) != self._pending_of

    def catch_up(self) -> None:
        """Let the drafter observe what plain steps have committed. Must precede any change of sequences."""
        if not self._pending:
            return
        tokens, hidden_states = zip(*self._pending, strict=True)
        sequences = self._pending_of
        self._pending, self._pending_of = [], []
        size = max(1, OBSERVE_TOKENS // len(sequences))
        for first in range(0, len(tokens), size):
            alive = [i for i, sequence in enumerate(sequences) if sequence.request.failure is None]
            piece = slice(first, first + size)
            piece_tokens = torch.cat(tokens[piece], dim=1)[alive]
            self._observe(
                [sequences[i] for i in alive],
                tokens=piece_tokens,
                hidden_states=None if hidden_states[0] is None else torch.cat(hidden_states[piece], dim=1)[alive],
                paths=[range(piece_tokens.size(1))] * len(alive),
            )

    def _observe(
        self,
        sequences: Sequence[RunningSequence],
        tokens: Tensor,
        hidden_states: Tensor | None,
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Let drafter and observer observe committed nodes. End the sequences for which the drafter fails.

        Args:
            tokens: `[B, N]` int64, of all nodes.
            hidden_states: Hidden states `[B, N, m * H]`; None for a drafter without target layers.
            paths: The committed nodes of each sequence.
        """
        lengths = [len(path) for path in paths]
        longest = max(lengths, default=0)
        if longest == 0:
            return
        if all(not path or path[-1] == len(path) - 1 for path in paths):  # the first nodes, as in every chain
            tokens = tokens[:, :longest]
            hidden_states = None if hidden_states is None else hidden_states[:, :longest]
        else:
            index = self._tensor([[*path, *[0] * (longest - len(path))] for path in paths])
            tokens = tokens.gather(1, index)
            if hidden_states is not None:
                hidden_states = hidden_states.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden_states.size(-1)))
        if self._observer is not None:
            wanted = select_layers(hidden_states, self._target_layers, self._observer.target_layers)
            self._observer.observe(self._log.of([s.start for s in sequences]), tokens, wanted, lengths)
            hidden_states = select_layers(hidden_states, self._target_layers, self.drafter.target_layers)
        self._let_drafter_observe(sequences, tokens, hidden_states, lengths)

    def _let_drafter_observe(
        self,
        sequences: Sequence[RunningSequence],
        tokens: Tensor,
        hidden_states: Tensor | None,
        lengths: Sequence[int],
    ) -> None:
        try:
            self.drafter.observe(self.state.of([s.start for s in sequences]), tokens, hidden_states, lengths)
        except Exception as error:
            if len(sequences) == 1:
                sequences[0].request.fail(RequestError(f"The drafter failed: {describe(error)}"), error)
                return
            for i, sequence in enumerate(sequences):
                states = None if hidden_states is None else hidden_states[i : i + 1, : lengths[i]]
                if lengths[i]:
                    self._let_drafter_observe([sequence], tokens[i : i + 1, : lengths[i]], states, [lengths[i]])


def _trace(proposal: Proposal, tokens: list[list[int]], verdict: Verdict, index: int, seconds: float) -> StepTrace:
    parents = proposal.parent_lists[index]
    count = 1 + max(node for node, parent in enumerate(parents) if node == 0 or parent >= 0)  # padding is last
    return StepTrace(
        tokens=tuple(tokens[index][:count]),
        parents=tuple(parents[:count]),
        path=tuple(verdict.path[index]),
        seconds=seconds,
    )


def token_logprobs(logits_MV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-softmax of each token under its logits, with the `count` likeliest tokens.

    Ties go to lower ids.
    """
    logprobs = []
    size, count = max(1, PART // logits_MV.size(-1)), min(count, logits_MV.size(-1))
    for first in range(0, len(tokens), size):
        part = tokens[first : first + size]
        log_probs = logits_MV[first : first + size].float().log_softmax(dim=-1)
        own = log_probs.gather(1, torch.tensor(part, device=log_probs.device)[:, None])[:, 0].tolist()
        top = log_probs.topk(count, dim=-1)
        for token, value, ids, values in zip(part, own, top.indices.tolist(), top.values.tolist(), strict=True):
            best = sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))
            logprobs.append(TokenLogprob(token, value, tuple(best)))
    return logprobs


def answer_logprobs(
    request: Request, logits_BNV: Tensor, index: int, nodes: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Return the log probabilities of the tokens that follow these nodes, if the request asks for them."""
    count = request.params.logprobs
    return () if count is None or not nodes else token_logprobs(logits_BNV[index, nodes], tokens, count)


def prompt_logprobs(sequence: RunningSequence, logits_NV: Tensor) -> Sequence[TokenLogprob | None]:
    """Return the log probabilities of the prompt tokens that follow those just read, if the request asks for them."""
    request, first = sequence.request, sequence.prefilled + 1
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    following = request.prompt[first : first + len(logits_NV)]
    logprobs = token_logprobs(logits_NV[: len(following)], following, count)
    return [None, *logprobs] if sequence.prefilled == 0 else logprobs
