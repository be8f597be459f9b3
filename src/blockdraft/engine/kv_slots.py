"""KV slots: how many fit into memory, which sequence has which, and which finished sequences are kept."""

from __future__ import annotations

import logging
from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from blockdraft.drafters import Drafter, Observer
from blockdraft.engine.prefix_store import PrefixStore, StoredPrefix, common_length
from blockdraft.engine.request import Request, RunningSequence
from blockdraft.engine.runner import MAX_OWN_NODES, MAX_PENDING_STEPS, OBSERVE_TOKENS, Runner
from blockdraft.errors import describe
from blockdraft.machine import free_bytes
from blockdraft.targets import Target

log = logging.getLogger(__name__)

BLOCK = 16  # tokens; a shorter common prefix is not worth a copy
SHARE = 0.9  # of the free memory
# Of caches and workspace on a machine that other programs use as well: bytes, or a share of the free memory if more.
USUAL_BYTES, USUAL_SHARE = 3 << 29, 0.25
URGENT_SHARE = 0.25  # of the kept tokens, for urgent requests, of which a typist sends many


class Prefix(NamedTuple):
    """A prefix that a sequence holds: the sequence's first KV slot, and the number of tokens."""

    start: int
    length: int


class KVSlots:
    """Allocates KV slots, and keeps finished sequences for later requests with the same prefix.

    A sequence is a range of slots, named by its first one. It never moves.

    Args:
        runner: Owns the caches.
        slots: KV slots of each cache.
        prefix_tokens: Most tokens of finished sequences that are kept.
        prefix_store: Keeps instructions on disk; None keeps none.
    """

    def __init__(self, runner: Runner, slots: int, prefix_tokens: int, prefix_store: PrefixStore | None = None) -> None:
        self._runner, self._prefix_tokens, self._prefix_store = runner, prefix_tokens, prefix_store
        self._can_share = runner.target.can_truncate or runner.target.keeps_checkpoints
        self._free = FreeSlots(slots)
        self._index = PrefixIndex()  # of running and finished sequences
        self._finished: OrderedDict[int, list[int]] = OrderedDict()  # tokens by first slot, least recently used first
        self._loading: dict[RunningSequence, StoredPrefix] = {}
        self._urgent: dict[int, None] = {}  # first slots of those whose requests were urgent, oldest first

    def longest_prefix(self, request: Request) -> Prefix | None:
        """Return the longest prefix of a request's prompt that a sequence holds or is about to read."""
        # A prompt with log probabilities must be scored, not copied.
        if not self._can_share or request.params.prompt_logprobs is not None:
            return None
        prefix = self._index.longest(request.prompt[:-1], self._reusable)
        if prefix is not None and prefix.start in self._finished:
            self._finished.move_to_end(prefix.start)
        return prefix

    def _reusable(self, start: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence can be copied, once it has read them."""
        return self._runner.reusable(start, length) if start in self._finished else length

    def allocate(self, request: Request, prefix: Prefix | None) -> Prefix | None:
        """Open a sequence for a request, evicting finished sequences if that makes room.

        If the finished sequence that holds its prefix would be evicted too, the request goes on in its slots if it can.

        Args:
            prefix: What `longest_prefix` returned for the request.

        Returns:
            The sequence, and how many tokens of the prompt it holds; None if there is no room.
        """
        size, start = request.slots, self._free.take(request.slots)
        if start is None:
            finished = [(first, len(tokens)) for first, tokens in self._finished.items()]
            if not self._free.would_fit(size, finished):
                return None
            if prefix is not None and prefix.start in self._finished:
                others = [kept for kept in finished if kept[0] != prefix.start]
                if not self._free.would_fit(size, others) and self._take_over(prefix, size):
                    self._index.add(prefix.start, request.prompt)
                    return prefix
            while start is None:
                self._evict(next(iter(self._finished)))  # `longest_prefix` has moved the prefix to the end
                start = self._free.take(size)
        self._runner.open(start, size)
        self._index.add(start, request.prompt)
        return Prefix(start, 0)

    def _take_over(self, prefix: Prefix, size: int) -> bool:
        """Cut a finished sequence to a prefix and give it `size` slots. Return False if others run behind it."""
        start, end = prefix.start, prefix.start + len(self._finished[prefix.start])
        behind = [first for first in self._finished if end <= first < start + size]
        if size > end - start:
            if not self._free.would_fit(start + size - end, [(s, len(self._finished[s])) for s in behind], at=end):
                return False
            for first in behind:
                self._evict(first)
            self._free.take(start + size - end, at=end)
        else:
            self._free.give(start + size, end - start - size)
        del self._finished[start]
        self._urgent.pop(start, None)
        self._runner.cut(start, prefix.length, size)
        return True

    def begin_loading(self, sequence: RunningSequence, num_known: int) -> bool:
        """Begin to load a stored prefix of a sequence's prompt, if it saves enough. Return whether it does.

        Args:
            num_known: Tokens of the prompt that are in memory.
        """
        request = sequence.request
        if self._prefix_store is None or request.params.prompt_logprobs is not None:
            return False
        longest = self._prefix_store.longest(request.prompt[:-1])
        if longest is None or longest[0] - num_known < max(1, self._prefix_store.min_tokens // 4):
            return False
        self._loading[sequence] = StoredPrefix(longest[0], self._prefix_store.read(longest[1]))
        if self._runner.committed_length(sequence.start):  # a shorter prefix whose slots it took over
            self._reopen(sequence)
        return True

    def is_loading(self, sequence: RunningSequence) -> bool:
        return sequence in self._loading

    def finish_loading(self, sequence: RunningSequence, wait: bool) -> None:
        """Copy the stored prefix of a sequence that is loading one, once it has been read.

        Args:
            wait: Whether to wait until it has been read.
        """
        stored = self._loading.get(sequence)
        if stored is None or not (wait or stored.tensors.done()):
            return
        del self._loading[sequence]
        tensors = stored.tensors.result()
        if tensors is None:
            return
        try:
            self._runner.load(sequence.start, sequence.request.prompt[: stored.length], tensors)
        except Exception as error:
            log.warning("A stored prefix cannot be loaded: %s", describe(error))
            self._reopen(sequence, zero_slots=True)
        else:
            sequence.request.num_prefilled = sequence.request.stats.remembered = stored.length

    def _reopen(self, sequence: RunningSequence, zero_slots: bool = False) -> None:
        """Let a sequence begin anew."""
        self._runner.close(sequence.start, zero_slots)
        self._runner.open(sequence.start, sequence.capacity)

    def is_finished(self, start: int) -> bool:
        """Return whether this is a finished sequence."""
        return start in self._finished

    def free(self, sequence: RunningSequence) -> None:
        """Keep a sequence whose request has ended, or release its slots."""
        try:
            self._store_prefix(sequence)
            kept = self._shrink(sequence)
        except BaseException:  # its slots must not be lost
            self.release(sequence, zero_slots=True)
            raise
        if kept:
            self._keep(sequence, kept)
        else:
            self.release(sequence, zero_slots=sequence.request.failure is not None)

    def release(self, sequence: RunningSequence, zero_slots: bool) -> None:
        """Release the slots of a sequence. See `Runner.close` for `zero_slots`."""
        self._loading.pop(sequence, None)
        self._index.remove(sequence.start)
        self._runner.close(sequence.start, zero_slots=zero_slots)
        self._free.give(sequence.start, sequence.capacity)

    def _store_prefix(self, sequence: RunningSequence) -> None:
        """Store the instructions in a sequence's prompt on disk, as far as they came before and are not stored.

        Of a prompt whose request was cancelled while it was read, what has been read is stored at once: it took long.
        """
        request, store = sequence.request, self._prefix_store
        if store is None or request.failure is not None or request.params.prompt_logprobs is not None:
            return
        if sequence.in_prefill:
            tokens = [] if request.urgent else request.prompt[: sequence.prefilled]
            length = len(tokens) if store.is_new(tokens) else 0
        else:
            tokens = request.prompt[: request.instruction_tokens]
            length = store.length_to_store(tokens)
        length = self._runner.reusable(sequence.start, length)
        if not store.is_new(tokens[:length]):  # a recurrent state is stored at a checkpoint, which may lie earlier
            return
        try:
            tensors = self._runner.export(sequence.start, length)
        except Exception as error:  # such as too little memory
            log.warning("The prefix of a prompt cannot be stored: %s", describe(error))
        else:
            store.write(tokens[:length], tensors)

    def _shrink(self, sequence: RunningSequence) -> list[int]:
        """Shrink a sequence to the tokens that requests with the same prefix may use, and return these."""
        self._runner.catch_up()  # a drafter that fails here fails the request
        request, start = sequence.request, sequence.start
        # An answer that was cut within an accepted draft ends before the state of recurrent layers.
        whole = (request.prompt + request.token_ids)[: self._runner.committed_length(start)]
        tokens = whole[: self._runner.reusable(start, len(whole))]
        if request.failure is not None or not self._can_share or not 0 < len(tokens) <= self._prefix_tokens:
            return []
        self._runner.shrink(start, len(tokens))
        return tokens

    def _keep(self, sequence: RunningSequence, tokens: list[int]) -> None:
        """Keep a sequence that has been shrunk to these tokens for requests with the same prefix."""
        request, start = sequence.request, sequence.start
        self._free.give(start + len(tokens), sequence.capacity - len(tokens))
        self._index.add(start, tokens)
        for other, known in list(self._finished.items()):
            if common_length(known, tokens) == len(known):
                self._evict(other)
        self._finished[start] = tokens
        if request.urgent:
            self._urgent[start] = None
            while len(self._urgent) > 1 and self._urgent_tokens() > URGENT_SHARE * self._prefix_tokens:
                self._evict(next(iter(self._urgent)))
        while sum(map(len, self._finished.values())) > self._prefix_tokens:
            self._evict(next(iter(self._finished)))

    def _urgent_tokens(self) -> int:
        return sum(len(self._finished[start]) for start in self._urgent)

    def _evict(self, start: int) -> None:
        self._urgent.pop(start, None)
        self._index.remove(start)
        self._runner.close(start)
        self._free.give(start, len(self._finished.pop(start)))


class FreeSlots:
    """Allocates ranges of slots, always the first that is long enough, so that ranges in use stay together."""

    def __init__(self, total: int) -> None:
        self._ranges: list[tuple[int, int]] = [(0, total)] if total else []  # (first slot, count), in order, apart

    def take(self, count: int, at: int | None = None) -> int | None:
        """Allocate `count` slots. Return the first of them, or None if no free range is long enough.

        Args:
            at: First slot that they must have; None takes any.
        """
        for i, (first, size) in enumerate(self._ranges):
            start = first if at is None else at
            before, after = start - first, first + size - start - count
            if before >= 0 and after >= 0:
                self._ranges[i : i + 1] = [part for part in ((first, before), (start + count, after)) if part[1]]
                return start
        return None

    def give(self, first: int, count: int) -> None:
        """Free allocated slots."""
        if count == 0:
            return
        insort(self._ranges, (first, count))
        at = bisect(self._ranges, (first, count)) - 1
        for left in (at, at - 1):  # join with the range behind, then with the range before
            if 0 <= left < len(self._ranges) - 1:
                (start, size), (after, more) = self._ranges[left : left + 2]
                assert start + size <= after, f"slots {after} to {start + size} are free twice"
                if start + size == after:
                    self._ranges[left : left + 2] = [(start, size + more)]

    def would_fit(self, count: int, freed: Iterable[tuple[int, int]], at: int | None = None) -> bool:
        """Return whether `take` would succeed if these ranges, in any order, were free as well."""
        trial = FreeSlots(0)
        for first, size in sorted([*self._ranges, *freed]):
            trial.give(first, size)
        return trial.take(count, at) is not None


class PrefixIndex:
    """Finds the sequence with the longest common prefix, by the hashes of blocks of `BLOCK` tokens.

    The hash of a block covers all blocks before it.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._starts: dict[int, dict[int, None]] = {}  # by hash the sequences that have the block, in order

    def add(self, start: int, tokens: Sequence[int]) -> None:
        """Index a sequence by its tokens, which replace those it had before."""
        self.remove(start)
        self._tokens[start] = list(tokens)
        for key in _hashes(tokens):
            self._starts.setdefault(key, {})[start] = None

    def remove(self, start: int) -> None:
        """Forget a sequence, if it was indexed."""
        for key in set(_hashes(self._tokens.pop(start, ()))):  # two of its blocks may have one hash
            del self._starts[key][start]
            if not self._starts[key]:
                del self._starts[key]

    def longest(self, tokens: Sequence[int], reusable: Callable[[int, int], int] = lambda _, n: n) -> Prefix | None:
        """Return the longest prefix of these tokens that a sequence holds, or None if it is shorter than a block.

        Ties go to the sequence that was indexed first.

        Args:
            reusable: Returns how many of a sequence's first tokens can be used. It takes its start and their number.
        """
        candidates: Iterable[int] = ()
        for key in _hashes(tokens):
            if key not in self._starts:
                break
            candidates = self._starts[key]
        # Different blocks may have one hash, so the tokens are compared.
        lengths = {start: reusable(start, common_length(self._tokens[start], tokens)) for start in candidates}
        start = max(lengths, key=lengths.__getitem__, default=None)
        return Prefix(start, lengths[start]) if start is not None and lengths[start] >= BLOCK else None


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Return a hash for each whole block."""
    hashes, before = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        before = hash((before, tuple(tokens[end - BLOCK : end])))
        hashes.append(before)
    return hashes


@dataclass(frozen=True)
class Memory:
    """Plans the memory of an engine, in bytes.

    Attributes:
        nodes: Most nodes of a sequence.
        automatic: Whether drafting may pause.
        behind: KV slots that a sequence needs behind its tokens, if more than its nodes.
        observer: Keeps hidden states of all sequences, if any are recorded.
    """

    target: Target
    drafter: Drafter
    max_batch_size: int
    nodes: int
    prefill_tokens: int
    automatic: bool
    behind: int = 0
    observer: Observer | None = None

    @property
    def _max_sequence_slots(self) -> int:
        return self.target.row_slots(self.target.max_context + max(self.nodes, self.behind))

    def bytes(self, slots: int) -> int:
        """Return all memory: the caches of target and drafter with so many slots, and the workspace of a step."""
        return self.caches(slots) + self.workspace(slots)

    def caches(self, slots: int) -> int:
        """Return the bytes of the caches of target and drafter."""
        # Some targets keep bytes per sequence besides its slots, such as recurrent states.
        per_sequence = self.target.cache_bytes(self.max_batch_size, 0) - self.target.cache_bytes(1, 0)
        observed = 0 if self.observer is None else self.observer.state_bytes(1, slots)
        return self.target.cache_bytes(1, slots) + per_sequence + self.drafter.state_bytes(1, slots) + observed

    def workspace(self, slots: int) -> int:
        """Return the bytes that a step needs besides the caches.

        These are the largest forward; the logits of all nodes, also of draft tokens that requests provide, in the
        target's dtype and twice in float32; the hidden states, by layer and concatenated, of all nodes, a part of a
        prompt or a pause in drafting, whichever is most; and the workspaces of drafters.
        """
        target, rows, size = self.target, self.max_batch_size, self.target.dtype.itemsize
        longest = min(slots, self._max_sequence_slots)
        forward = max(
            target.forward_bytes(rows, self.nodes, min(longest, slots // rows + 1)),
            target.forward_bytes(1, min(self.prefill_tokens, longest), longest),
        )
        logits = max(rows * self.nodes, MAX_OWN_NODES) * target.vocab_size * (size + 2 * torch.float32.itemsize)
        tokens = max(self.prefill_tokens, rows * self.nodes)
        if self.automatic:
            tokens = max(tokens, rows * min(MAX_PENDING_STEPS, target.max_context))
        observed = () if self.observer is None else self.observer.target_layers
        layers = {*self.drafter.target_layers, *observed}
        hidden_states = 2 * tokens * len(layers) * target.hidden_size * size
        return forward + logits + hidden_states + sum(self._draft_workspace(part, slots) for part in self.drafter.parts)

    def _draft_workspace(self, part: Drafter, slots: int) -> int:
        """Return the bytes that a drafter keeps for its calls of `propose` and `observe`."""
        observed = max(self.prefill_tokens, self.max_batch_size * self.nodes, OBSERVE_TOKENS if self.automatic else 0)
        return part.workspace_bytes(1, observed, max(min(slots, self._max_sequence_slots), observed))

    def of_one(self, slots: int) -> dict[str, int]:
        """Return the memory of one request alone, in bytes.

        This is the weights of target and drafter, their caches with so many slots, and the workspace of a step.
        """
        alone = replace(self, max_batch_size=1)
        weights = self.target.weight_bytes() + self.drafter.weight_bytes()
        return {"weights": weights, "caches": alone.caches(slots), "workspace": alone.workspace(slots)}

    def slots(self, prefix_tokens: int, limit: int | None) -> int:
        """Return the slots for a full batch of the longest sequences and for kept prefixes, or as many as fit.

        Args:
            limit: Most bytes to take; None is `SHARE` of the free memory of the device.
        """
        most = int(SHARE * free_bytes(self.target.device)) if limit is None else limit
        return self._fitting(self._full(prefix_tokens), most)

    def usual_slots(self, prefix_tokens: int, most: int | None) -> int:
        """Return the slots for a machine that other programs use as well.

        These are at most `most`, or without it as many as `slots` wants, and no more than fit into USUAL_BYTES or
        USUAL_SHARE of the free memory. One sequence of the greatest length has room in any case, unless it needs more
        than `SHARE` of the free memory.
        """
        wanted = self._full(prefix_tokens) if most is None else most
        least = self.bytes(min(wanted, self._max_sequence_slots))
        free = free_bytes(self.target.device)
        return self._fitting(wanted, min(int(SHARE * free), max(USUAL_BYTES, int(USUAL_SHARE * free), least)))

    def _full(self, prefix_tokens: int) -> int:
        """Return the slots for a full batch of the longest sequences and for kept prefixes."""
        return self.max_batch_size * self._max_sequence_slots + prefix_tokens

    def _fitting(self, wanted: int, most: int) -> int:
        """Return at most `wanted` slots, which take at most so many bytes."""
        if self.bytes(wanted) <= most:
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if self.bytes(middle) <= most else (fits, middle)
        return fits
