"""The decode loop. There is one: plain decoding is a proposal that holds only the anchor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from blockdraft.drafters import Drafter
from blockdraft.engine.prompts import TextStream, encode
from blockdraft.engine.stats import Stats
from blockdraft.proposal import Plan, Proposal, chain, depths
from blockdraft.sampling import Laws, RandomNumbers
from blockdraft.targets import Cache, Target
from blockdraft.types import Drafting, FinishReason, Prompt, SamplingParams
from blockdraft.verification import Verdict, verify


@dataclass
class Row:
    """One request while it is decoded."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    random: RandomNumbers
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def remaining(self) -> int:
        return self.params.max_new_tokens - len(self.token_ids)

    def extend(self, token_ids: Sequence[int], drafted: Sequence[bool]) -> int:
        """Add committed tokens up to a stop token or the length limit; returns how many were taken."""
        taken = 0
        for token, guessed in zip(token_ids, drafted, strict=True):
            self.token_ids.append(token)
            self.drafted.append(guessed)
            taken += 1
            if token in self.stop_ids:
                self.finish_reason = "stop"
                break
            if self.remaining == 0:
                self.finish_reason = "length"
                break
        return taken


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: Without special tokens; empty where the target has no tokenizer.
        token_ids: The stop token included.
        finish_reason: "stop" at a stop token, "length" at `max_new_tokens`.
        drafted: For each token, whether the drafter had guessed it.
        stats: Counts and times; `tau` is a short cut to the one most asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    drafted: list[bool]
    stats: Stats

    @property
    def tau(self) -> float:
        return self.stats.tau


@dataclass(frozen=True)
class Chunk:
    """What one cycle adds to a streamed answer.

    Attributes:
        text: New text; never half a UTF-8 character, so it may be empty while `token_ids` is not.
        token_ids: New tokens.
        drafted: For each new token, whether the drafter had guessed it (False for the bonus token).
        stats: Counts and times so far; the same object in every chunk of an answer.
        finish_reason: Set on the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    stats: Stats
    finish_reason: FinishReason | None = None


@dataclass
class Batch:
    """Requests that are decoded together, with their caches."""

    rows: list[Row]
    cache: Cache
    state: Any

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def drop_finished(self) -> None:
        """Shrink the caches once a quarter of the rows is finished; each time copies them, so not for every row."""
        going = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if 0 < len(going) <= 0.75 * len(self.rows):
            self.cache.select(going)
            self.state.select(going)
            self.rows = [self.rows[i] for i in going]


class Engine:
    """Decodes with a target and a drafter; the output is the target's own.

    Args:
        target: From `load_target`.
        drafter: From `load_drafter`.
        max_batch_size: Prompts decoded together by `generate`.
        drafting: How far to draft.

    Raises:
        ValueError: `max_batch_size` is below 1, or a block is longer than the drafter's.
    """

    def __init__(
        self, target: Target, drafter: Drafter, max_batch_size: int = 8, drafting: Drafting | None = None
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it must be at least 1.")
        drafting = drafting or Drafting()
        if drafting.block_size is not None and drafting.block_size > drafter.block_size:
            raise ValueError(
                f"block_size is {drafting.block_size}; this drafter was trained for at most {drafter.block_size}."
            )
        self.target = target
        self.drafter = drafter
        self.drafting = drafting
        self.max_batch_size = max_batch_size

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
            raise ValueError("prompts is one text; give a list of prompts.")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give one, or one each.")
        rows = [self._row(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for start in range(0, len(rows), self.max_batch_size):
            group = rows[start : start + self.max_batch_size]
            self._check_memory(group)
        for start in range(0, len(rows), self.max_batch_size):
            for _ in self._decode(rows[start : start + self.max_batch_size]):
                pass
        return [self._completion(row) for row in rows]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt, a chunk a cycle. Errors as in `generate`, before the first chunk.

        Returns:
            An iterator of chunks; their texts and tokens, joined, are those of `generate`.
        """
        row = self._row(prompt, params or SamplingParams())
        self._check_memory([row])
        return self._chunks(row)

    def _chunks(self, row: Row) -> Iterator[Chunk]:
        text, sent = TextStream(self.target.tokenizer), 0
        for _ in self._decode([row]):
            new, drafted = row.token_ids[sent:], row.drafted[sent:]
            sent = len(row.token_ids)
            piece = text.push(new)
            if row.finish_reason is not None:
                piece += text.finish()
            yield Chunk(piece, tuple(new), tuple(drafted), row.stats, row.finish_reason)

    def _decode(self, rows: list[Row]) -> Iterator[None]:
        """Decode these rows to their ends, yielding after the prompts and after each cycle."""
        batch = self._prefill(rows)
        yield
        while not batch.finished:
            batch.drop_finished()
            self.step(batch)
            yield

    def step(self, batch: Batch) -> None:
        """One cycle: propose, score, verify, commit, observe."""
        began = time.perf_counter()
        rows, anchor = batch.rows, self._tensor([row.token_ids[-1] for row in batch.rows])
        going = [row for row in rows if row.finish_reason is None]
        # Guesses past the length limit would be cut; the anchor is there already.
        block_size = min(self._block_size, 1 + max(row.remaining for row in going))
        plan = Plan(block_size, [row.params for row in rows], self.drafting.tree_budget)
        proposal = self.drafter.propose(batch.state, anchor, plan)
        proposed = self._now()
        output = self.target.forward(proposal.tokens, proposal.parents, batch.cache, self.drafter.taps)
        scored = self._now()
        # Node i's draw decides the output token that follows it.
        positions = torch.tensor([[len(row.token_ids)] for row in rows]) + depths(proposal.parents).cpu()
        uniforms = torch.stack([row.random.at(p) for row, p in zip(rows, positions, strict=True)])
        verdict = verify(proposal, self._laws(rows, proposal, output.logits), uniforms)
        path = [nodes if row.finish_reason is None else [] for nodes, row in zip(verdict.path, rows, strict=True)]
        batch.cache.commit(path)
        verified = time.perf_counter()
        self._observe(batch, proposal.tokens, output.features, path)
        observed = self._now()
        self._extend(batch, proposal.tokens, verdict)
        for row in going:
            row.stats.draft_seconds += proposed - began + observed - verified
            row.stats.verify_seconds += scored - proposed
            row.stats.total_seconds += time.perf_counter() - began

    def _prefill(self, rows: list[Row]) -> Batch:
        """The prompts as chains of which everything is committed; their last nodes yield the first tokens."""
        began = time.perf_counter()
        capacity = self._capacity(rows)
        batch = Batch(rows, self.target.new_cache(len(rows), capacity), self.drafter.new_state(len(rows), capacity))
        longest = max(len(row.prompt) for row in rows)
        prompts = chain(self._tensor([row.prompt + [0] * (longest - len(row.prompt)) for row in rows]))
        last = self._tensor([len(row.prompt) - 1 for row in rows])
        output = self.target.forward(prompts.tokens, prompts.parents, batch.cache, self.drafter.taps, logits_at=last)
        uniforms = torch.stack([row.random.at(torch.tensor([0])) for row in rows])
        anchors = chain(prompts.tokens.gather(1, last[:, None]))
        verdict = verify(anchors, self._laws(rows, anchors, output.logits), uniforms)
        path = [list(range(len(row.prompt))) for row in rows]
        batch.cache.commit(path)
        self._observe(batch, prompts.tokens, output.features, path)
        for row, token in zip(rows, verdict.bonus, strict=True):
            row.extend([token], [False])
            row.stats.prefill_seconds = self._now() - began
        return batch

    def _laws(self, rows: list[Row], proposal: Proposal, logits: Tensor) -> Laws:
        params, prompts, outputs = zip(*((row.params, row.prompt, row.token_ids) for row in rows), strict=True)
        return Laws(logits, params, proposal.tokens, proposal.parents, prompts, outputs)

    def _observe(self, batch: Batch, tokens: Tensor, features: Tensor | None, path: list[list[int]]) -> None:
        """Tell the drafter which nodes were committed, rows padded to one length."""
        longest = max(len(nodes) for nodes in path)
        index = self._tensor([nodes + [0] * (longest - len(nodes)) for nodes in path])
        if features is not None:
            features = features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.size(-1)))
        self.drafter.observe(batch.state, tokens.gather(1, index), features, [len(nodes) for nodes in path])

    def _extend(self, batch: Batch, tokens: Tensor, verdict: Verdict) -> None:
        """Add what was accepted, and the bonus, to the answers."""
        for row, ids, path, bonus in zip(batch.rows, tokens.tolist(), verdict.path, verdict.bonus, strict=True):
            if row.finish_reason is not None:
                continue
            accepted = [ids[node] for node in path[1:]]
            taken = row.extend([*accepted, bonus], [True] * len(accepted) + [False])
            row.stats.committed.append(taken)
            row.stats.drafted.append(len(ids) - 1)

    def _row(self, prompt: Prompt, params: SamplingParams) -> Row:
        ids = encode(prompt, self.target)
        limit = self.target.max_context
        if len(ids) >= limit:
            raise ValueError(f"The prompt has {len(ids)} tokens and the target's context {limit}; shorten the prompt.")
        if len(ids) + params.max_new_tokens > limit:
            raise ValueError(
                f"The prompt's {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the target's "
                f"context of {limit}; ask for at most {limit - len(ids)} new tokens."
            )
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.target.eos_token_ids)
        return Row(ids, params, frozenset(stops), RandomNumbers(params.seed))

    @property
    def _block_size(self) -> int:
        return self.drafting.block_size or self.drafter.block_size

    def _capacity(self, rows: list[Row]) -> int:
        nodes = 1 + max(self.drafting.tree_budget, self._block_size - 1)
        return max(len(row.prompt) + row.params.max_new_tokens for row in rows) + nodes

    def _check_memory(self, rows: list[Row]) -> None:
        capacity = self._capacity(rows)
        need = self.target.cache_bytes(len(rows), capacity) + self.drafter.state_bytes(len(rows), capacity)
        on_gpu = self.target.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.target.device)[0] if on_gpu else psutil.virtual_memory().available
        if need > free:
            raise ValueError(
                f"The caches of {len(rows)} requests of up to {capacity} tokens take {need / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free; ask for fewer new tokens or a smaller batch."
            )

    def _completion(self, row: Row) -> Completion:
        text = TextStream(self.target.tokenizer)
        text.push(row.token_ids)
        assert row.finish_reason is not None
        return Completion(text.text, row.token_ids, row.finish_reason, row.drafted, row.stats)

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.target.device)

    def _now(self) -> float:
        """Time once the device has finished what was asked of it."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
