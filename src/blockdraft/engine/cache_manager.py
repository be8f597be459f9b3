"""Which slots of the caches belong to which row, of running requests and of finished ones that are remembered."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blockdraft.engine.request import Request, Row
from blockdraft.engine.runner import Runner

BLOCK = 16  # tokens; a shorter common beginning is not worth a copy


class Prefix(NamedTuple):
    """A beginning that a row holds: the row's first slot, and the number of tokens."""

    start: int
    length: int


class CacheManager:
    """Allocates slots for rows, and keeps rows of finished requests for later ones with the same beginning.

    Rows are named by their first slot.

    Args:
        runner: Its caches are managed.
        slots: Slots of these.
        prefix_tokens: Most tokens of finished requests that are kept.
    """

    def __init__(self, runner: Runner, slots: int, prefix_tokens: int) -> None:
        self._runner = runner
        self._can_share = runner.target.can_truncate
        self._slots = FreeSlots(slots)
        self._index = PrefixIndex()  # of running and remembered rows
        self._remembered = Remembered(prefix_tokens)
        self._kept: dict[int, int] = {}  # number of slots of each remembered row

    def longest_prefix(self, request: Request) -> Prefix | None:
        """The longest beginning of a request's prompt that a row holds or is about to read."""
        # Prompts with logprobs must be scored, not copied.
        shares = self._can_share and request.params.prompt_logprobs is None
        known = self._index.longest(request.prompt[:-1]) if shares else None
        if known is not None:
            self._remembered.use(known.start)  # so that it is evicted last
        return known

    def allocate(self, request: Request) -> int | None:
        """Open a row for a request, evicting remembered rows where that makes room.

        Returns:
            The row's first slot; None where there is no room.
        """
        size = request.slots
        start = self._slots.take(size)
        if start is None and self._slots.would_fit(size, self._kept.items()):
            while start is None:
                self._evict(self._remembered.forget())
                start = self._slots.take(size)
        if start is not None:
            self._runner.open(start, size)
            self._index.add(start, request.prompt)
        return start

    def remembers(self, row: int) -> bool:
        """Whether this is the row of a finished request."""
        return row in self._kept

    def free(self, row: Row) -> None:
        """Remember the row of a request that has ended, or release its slots."""
        if not self._remember(row):
            self.release(row, zero_slots=row.request.failure is not None)

    def release(self, row: Row, zero_slots: bool) -> None:
        """Release the slots of a row; for `zero_slots` see `Runner.close`."""
        self._index.remove(row.start)
        self._runner.close(row.start, zero_slots=zero_slots)
        self._slots.give(row.start, row.capacity)

    def _remember(self, row: Row) -> bool:
        """Keep a row for requests that begin like it. Returns whether that was possible."""
        self._runner.draft_context.catch_up()  # an error of the drafter here fails the request
        request, held = row.request, self._runner.held(row.start)
        text = (request.prompt + request.token_ids)[:held]
        if request.failure is not None or not self._can_share or not 0 < len(text) <= self._remembered.most:
            return False
        self._runner.shrink(row.start, len(text))
        self._slots.give(row.start + len(text), row.capacity - len(text))
        self._kept[row.start] = len(text)
        self._index.add(row.start, text)
        for other in self._remembered.add(row.start, text):
            self._evict(other)
        return True

    def _evict(self, row: int) -> None:
        self._index.remove(row)
        self._runner.close(row)
        self._slots.give(row, self._kept.pop(row))


class FreeSlots:
    """Allocates ranges of slots, always the first that is long enough, so that ranges in use stay together.

    Attributes:
        total: Number of slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[tuple[int, int]] = [(0, total)] if total else []  # ranges (first slot, count), in order, apart

    def take(self, count: int) -> int | None:
        """Allocate `count` slots. Returns the first of them; None where no free range is so long."""
        for i, (first, held) in enumerate(self._free):
            if held >= count:
                self._free[i : i + 1] = [(first + count, held - count)] if held > count else []
                return first
        return None

    def give(self, first: int, count: int) -> None:
        """Free allocated slots."""
        if count == 0:
            return
        insort(self._free, (first, count))
        at = bisect(self._free, (first, count)) - 1
        for left in (at, at - 1):  # join with the range behind, then with the range before
            if 0 <= left < len(self._free) - 1:
                (start, held), (after, more) = self._free[left : left + 2]
                assert start + held <= after, f"slots {after} to {start + held} are free twice"
                if start + held == after:
                    self._free[left : left + 2] = [(start, held + more)]

    def would_fit(self, count: int, given: Iterable[tuple[int, int]]) -> bool:
        """Whether `take` would succeed if these ranges were free as well."""
        trial = FreeSlots(0)
        for first, held in sorted([*self._free, *given]):
            trial.give(first, held)
        return trial.take(count) is not None


class PrefixIndex:
    """Finds the row with the longest common beginning, by the hashes of its blocks of `BLOCK` tokens. The hash of a
    block covers all blocks before it."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._rows: dict[int, dict[int, None]] = {}  # for each hash the rows that have the block, in order

    def add(self, row: int, text: Sequence[int]) -> None:
        """Index a row by its tokens, in the place of those it had before."""
        self.remove(row)
        self._texts[row] = list(text)
        for key in _hashes(text):
            self._rows.setdefault(key, {})[row] = None

    def remove(self, row: int) -> None:
        """Forget a row, if it was indexed."""
        for key in set(_hashes(self._texts.pop(row, ()))):  # two of its blocks may have one hash
            del self._rows[key][row]
            if not self._rows[key]:
                del self._rows[key]

    def longest(self, text: Sequence[int]) -> Prefix | None:
        """The longest beginning of these tokens that a row holds; of equally long ones that of the row indexed first.
        None where it is shorter than a block."""
        found = None
        for key in _hashes(text):
            if key not in self._rows:
                break
            found = key
        if found is None:
            return None
        lengths = {row: common_length(self._texts[row], text) for row in self._rows[found]}
        row = max(lengths, key=lengths.__getitem__)
        # Different blocks may have one hash, so the tokens themselves are compared.
        return Prefix(row, lengths[row]) if lengths[row] >= BLOCK else None


class Remembered:
    """Rows of finished requests, the least recently used first.

    Args:
        most: Most tokens of all of them together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts: OrderedDict[int, list[int]] = OrderedDict()

    def add(self, row: int, text: list[int]) -> list[int]:
        """Remember a row of at most `most` tokens.

        Returns:
            The rows to evict: those whose tokens are a beginning of it, then the least recently used.
        """
        gone = [known for known, held in self.texts.items() if common_length(held, text) == len(held)]
        for known in gone:
            del self.texts[known]
        self.texts[row] = text
        while sum(map(len, self.texts.values())) > self.most:
            gone.append(self.forget())
        return gone

    def use(self, row: int) -> None:
        """Mark a row as the most recently used, if it is remembered."""
        if row in self.texts:
            self.texts.move_to_end(row)

    def forget(self) -> int:
        """Forget the least recently used row, and return it."""
        row, _ = self.texts.popitem(last=False)
        return row


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _hashes(text: Sequence[int]) -> list[int]:
    """A hash for each whole block."""
    hashes, before = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        before = hash((before, tuple(text[end - BLOCK : end])))
        hashes.append(before)
    return hashes
