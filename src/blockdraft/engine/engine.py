"""The decode loop. There is one: plain decoding is a proposal that holds only the anchor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from blockdraft.drafters import Drafter
from blockdraft.engine.batch import Batch, padded
from blockdraft.engine.controller import Controller
from blockdraft.engine.costs import load, path
from blockdraft.engine.prefixes import Prefix, PrefixStore
from blockdraft.engine.prompts import AnswerText, encode
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.scheduler import Scheduler
from blockdraft.errors import UsageError
from blockdraft.machine import send
from blockdraft.proposal import Plan, Proposal, chain
from blockdraft.sampling import Laws, RandomNumbers
from blockdraft.targets import Target, TargetOutput
from blockdraft.timing import BOOKKEEPING, COMMIT, FORWARD, GUESSES, OBSERVE, VERIFICATION, mark, unheard
from blockdraft.types import Drafting, Prompt, SamplingParams
from blockdraft.verification import Verdict, verify

MOST_UNOBSERVED = 512  # cycles whose features are kept before the drafter is told of them


class Engine:
    """Decodes with a target and a drafter; the output is the target's own.

    Args:
        target: From `load_target`.
        drafter: From `load_drafter`.
        max_batch_size: Most requests that are decoded together.
        drafting: How far to draft.
        memory_limit: Most bytes that running requests may take, see `memory_bytes`; None is what is free now. A request
            that does not fit beside the running ones waits.
        prefix_tokens: Tokens of finished requests that are remembered; a request that begins with them does not read
            them again. 0 remembers none.

    Raises:
        ValueError: `max_batch_size` is below 1, or a block is longer than the drafter's.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_batch_size: int = 8,
        drafting: Drafting | None = None,
        memory_limit: int | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size is {max_batch_size}; it must be at least 1.")
        drafting = drafting or Drafting()
        if isinstance(drafting.block_size, int) and drafting.block_size > drafter.block_size:
            raise UsageError(
                f"block_size is {drafting.block_size}; this drafter's blocks hold at most {drafter.block_size}."
            )
        self.target = target
        self.drafter = drafter
        self.drafting = drafting
        self.controller = Controller(drafter, drafting, lambda: load(path(target, drafter)))
        self.max_batch_size = max_batch_size
        self.memory_limit = memory_limit
        self.prefixes = PrefixStore(prefix_tokens)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer several prompts.

        Args:
            prompts: Texts, chats or lists of token ids.
            params: One for all, or one a prompt.

        Raises:
            ValueError: A prompt is empty or too long for the context, or the memory does not suffice. All prompts are
                checked before the first is decoded.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts is one text; give a list of prompts.")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give one, or one each.")
        scheduler = Scheduler(self)
        requests = [scheduler.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        while not scheduler.idle:
            scheduler.step()
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt, a chunk a cycle. Errors as in `generate`, before the first chunk.

        Returns:
            An iterator of chunks; their texts and tokens, joined, are those of `generate`.
        """
        scheduler = Scheduler(self)
        request = scheduler.submit(prompt, params or SamplingParams())
        return self._chunks(scheduler, request)

    def _chunks(self, scheduler: Scheduler, request: Request) -> Iterator[Chunk]:
        sent = 0
        while not scheduler.idle:
            scheduler.step()
            new, drafted = tuple(request.token_ids[sent:]), tuple(request.drafted[sent:])
            sent = len(request.token_ids)
            yield Chunk(request.text.take(), new, drafted, request.stats, request.finish_reason, request.error)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request, ready for a `Scheduler`. Errors as in `generate`."""
        ids = encode(prompt, self.target)
        limit = self.target.max_context
        if len(ids) >= limit:
            raise UsageError(f"The prompt has {len(ids)} tokens and the target's context {limit}; shorten the prompt.")
        if len(ids) + params.max_new_tokens > limit:
            raise UsageError(
                f"The prompt's {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the target's "
                f"context of {limit}; ask for at most {limit - len(ids)} new tokens."
            )
        if params.stop and self.target.tokenizer is None:
            raise UsageError("The target has no tokenizer, so it cannot stop at a text; use stop_token_ids.")
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.target.eos_token_ids)
        text = AnswerText(self.target.tokenizer, params.stop)
        return Request(ids, params, frozenset(stops), RandomNumbers(params.seed), text)

    def step(self, batch: Batch, plan: Plan | None = None) -> int:
        """One cycle: propose, score, verify, commit, observe. No request of the batch may have finished.

        Args:
            plan: How far to draft; None leaves it to the controller, which learns from the outcome.

        Returns:
            Guesses a row, those that fill up shorter rows included.
        """
        began = time.perf_counter()
        late = 0.0  # time for what earlier cycles left to do, which says nothing of this one
        requests, learns = batch.requests, plan is None
        plan = plan or self.controller.plan(requests)
        if self.drafting.drawn:
            plan = replace(plan, draws=self._fresh(requests)[:, : plan.block_size - 1])
        anchor = self._tensor([request.token_ids[-1] for request in requests])
        mark(BOOKKEEPING)
        if plan.block_size == 1:
            proposal = chain(anchor[:, None])
        else:
            if batch.unobserved:
                late = self.catch_up(batch)
                mark(OBSERVE)
            proposal = self.drafter.propose(batch.state, anchor, plan)
        mark(GUESSES)
        proposed = time.perf_counter()
        output = self.target.forward(proposal.tokens, proposal.parents, batch.cache, self.drafter.taps)
        mark(FORWARD)
        scored = time.perf_counter()
        laws, verdict = self._verdict(requests, proposal, output)
        mark(VERIFICATION)
        batch.cache.commit(verdict.path)
        mark(COMMIT)
        verified = time.perf_counter()
        if plan.block_size > 1:
            self._observe(batch, proposal.tokens, output.features, verdict.path)
        else:
            batch.unobserved.append((proposal.tokens, output.features))
            if len(batch.unobserved) == MOST_UNOBSERVED:
                late = self.catch_up(batch)
        mark(OBSERVE)
        observed = time.perf_counter()
        deepest = [max(row) for row in proposal.depth_lists]
        for row, request in enumerate(requests):
            if request.finished:  # by an error
                continue
            accepted = [laws.tokens[row][node] for node in verdict.path[row][1:]]
            taken = request.extend([*accepted, verdict.bonus[row]], [True] * len(accepted) + [False])
            request.stats.committed.append(taken)
            request.stats.drafted.append(deepest[row])
        guesses = proposal.tokens.size(1) - 1
        if learns:
            lengths = [max(len(nodes) - 1, 0) for nodes in verdict.path]
            seconds = time.perf_counter() - began - late
            self.controller.learn(requests, plan, guesses, deepest, lengths, proposal.expected, seconds)
        ended = time.perf_counter()
        for request in requests:
            request.stats.draft_seconds += proposed - began + observed - verified
            request.stats.verify_seconds += scored - proposed
            request.stats.total_seconds += ended - began
        mark(BOOKKEEPING)
        return guesses

    def timed_cycles(self, rows: int, context: int, guesses: int, tree: bool, count: int) -> list[tuple[int, float]]:
        """Cycles for measuring, see `costs.Cycles`, of rows of arbitrary tokens."""
        # Asked as the controller asks: with times by which just so many guesses pay, or for a chain of this length.
        seconds = [1.0] * (guesses + 1) if guesses and self.drafter.knows_probabilities else None
        block_size = self.drafter.block_size if seconds and tree else min(self.drafter.block_size, guesses + 1)
        plan = Plan(block_size, [SamplingParams()] * rows, guesses if tree else 0, seconds)
        prompt = [(7 * i + 3) % self.target.vocab_size for i in range(context)]
        room = min(count * self.drafter.block_size + guesses, self.target.max_context - context)
        batch = self.prefill([self.request(prompt, SamplingParams(room, ignore_eos=True)) for _ in range(rows)])
        found = []
        for _ in range(count):
            began = self.now()
            made = self.step(batch, plan)
            found.append((made, self.now() - began))
        return found

    @unheard()
    def prefill(self, requests: list[Request]) -> Batch:
        """Read the prompts, as chains of which everything is committed; their last nodes yield the first tokens."""
        began = time.perf_counter()
        capacity = self.capacity(requests)
        batch = Batch([], self.target.new_cache(0, capacity), self.drafter.new_state(0, capacity))
        for request in requests:
            known = self.prefixes.longest(request.prompt)
            cache = known.cache if known else self.target.new_cache(1, 0)
            batch.join(Batch([request], cache, known.state if known else self.drafter.new_state(1, 0)), capacity)
        rest = [request.prompt[done:] for request, done in zip(requests, batch.cache.lengths, strict=True)]
        prompts = chain(padded(rest, self.target.device))
        last = self._tensor([len(ids) - 1 for ids in rest])
        output = self.target.forward(prompts.tokens, prompts.parents, batch.cache, self.drafter.taps, logits_at=last)
        anchors = chain(prompts.tokens.gather(1, last[:, None]))
        _, verdict = self._verdict(requests, anchors, output)
        path = [list(range(len(ids))) for ids in rest]
        batch.cache.commit(path)
        self._observe(batch, prompts.tokens, output.features, path)
        for request, token in zip(requests, verdict.bonus, strict=True):
            if not request.finished:
                request.extend([token], [False])
            request.stats.prefill_seconds = self.now() - began
        return batch

    def catch_up(self, batch: Batch) -> float:
        """Tell the drafter of the cycles that did not draft. Due before rows come or go.

        Returns:
            Seconds that it took.
        """
        if not batch.unobserved:
            return 0.0
        began = self.now()
        tokens, features = zip(*batch.unobserved, strict=True)
        together = None if features[0] is None else torch.cat(features, dim=1)
        self.drafter.observe(batch.state, torch.cat(tokens, dim=1), together, [len(tokens)] * len(batch.requests))
        batch.unobserved.clear()
        return self.now() - began

    def remember(self, batch: Batch) -> None:
        """Keep what the finished requests of a batch leave behind, for requests that begin with it."""
        if self.prefixes.max_tokens == 0 or not any(request.finished for request in batch.requests):
            return
        self.catch_up(batch)
        for row, request in enumerate(batch.requests):
            tokens = request.prompt + request.token_ids[:-1]
            if request.finished and request.error is None and len(tokens) <= batch.cache.lengths[row]:
                kept = batch.cache.prefix(row, len(tokens)), batch.state.prefix(row, len(tokens))
                self.prefixes.add(Prefix(tokens, *kept))

    def capacity(self, requests: list[Request]) -> int:
        """Slots that each row of these requests' caches needs."""
        nodes = 1 + self.controller.most_guesses
        return max(len(request.prompt) + request.params.max_new_tokens for request in requests) + nodes

    def memory_bytes(self, requests: list[Request]) -> int:
        """Memory that these requests take together: both caches, what is remembered of prefixes, and the largest
        temporary tensors: the features of the prompts or of cycles without drafts, or the logits of the nodes, with
        copies in float32."""
        target, rows = self.target, len(requests)
        caches = (rows, self.capacity(requests)), (1, self.prefixes.max_tokens)
        kept = sum(target.cache_bytes(*size) + self.drafter.state_bytes(*size) for size in caches)
        nodes, size = rows * (1 + self.controller.most_guesses), target.dtype.itemsize
        logits = nodes * target.vocab_size * (size + 2 * torch.float32.itemsize)
        longest = max(len(request.prompt) for request in requests)
        if self.controller.automatic:
            longest = max(longest, min(MOST_UNOBSERVED, max(request.params.max_new_tokens for request in requests)))
        # Once by layer and once side by side.
        features = 2 * rows * longest * len(self.drafter.taps) * target.hidden_size * size
        return kept + max(logits, features)

    def free_bytes(self) -> int:
        """Memory for all requests that run together."""
        if self.memory_limit is not None:
            return self.memory_limit
        device = self.target.device
        if device.type != "cuda":
            return int(psutil.virtual_memory().available)
        # What torch keeps of memory that was freed is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept

    def _verdict(self, requests: list[Request], proposal: Proposal, output: TargetOutput) -> tuple[Laws, Verdict]:
        """Verify, and end the requests for which the target computed no numbers."""
        uniforms = None
        if any(request.params.temperature > 0 for request in requests):
            # Node i's draw decides the output token that follows it.
            each = zip(requests, proposal.depth_lists, strict=True)
            uniforms = torch.stack([r.random.at([len(r.token_ids) + d for d in depths]) for r, depths in each])
        params, prompts, outputs = zip(*((r.params, r.prompt, r.token_ids) for r in requests), strict=True)
        laws = Laws(output.logits, params, proposal.tokens, proposal.parents, prompts, outputs, output.best)
        tests = None
        if proposal.q is not None:
            tests = self._fresh(requests)[:, self.drafter.block_size :][:, : proposal.tokens.size(1)]
        for row in laws.invalid_rows:
            at = len(requests[row].token_ids)
            requests[row].finish("error", f"The target's logits after token {at} of the answer are not finite numbers.")
        return laws, verify(proposal, laws, uniforms, tests)

    def _fresh(self, requests: list[Request]) -> Tensor:
        """Numbers `[B, 2 * block_size]` of this cycle: to draw the guesses of a chain, then to test its nodes."""
        count = 2 * self.drafter.block_size
        return torch.stack([request.random.fresh(len(request.token_ids), count) for request in requests])

    def _observe(self, batch: Batch, tokens: Tensor, features: Tensor | None, path: list[list[int]]) -> None:
        """Tell the drafter which nodes were committed, rows padded to one length."""
        lengths = [len(nodes) for nodes in path]
        if all(not nodes or nodes[-1] == len(nodes) - 1 for nodes in path):  # the first nodes, as always in chains
            tokens, features = tokens[:, : max(lengths)], features if features is None else features[:, : max(lengths)]
        else:
            index = padded(path, self.target.device)
            tokens = tokens.gather(1, index)
            if features is not None:
                features = features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.size(-1)))
        self.drafter.observe(batch.state, tokens, features, lengths)

    def _tensor(self, values: list[Any]) -> Tensor:
        return send(torch.tensor(values), self.target.device)

    def now(self) -> float:
        """Time once the device has finished what was asked of it."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
