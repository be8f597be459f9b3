"""Which slots of the runner's stores are whose: of rows that run, and of rows that are remembered."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from blockdraft.engine.request import Request, Row
from blockdraft.engine.runner import Runner


class CacheManager:
    """Hands out slots for rows, and keeps what ended requests leave behind for others that begin alike.

    Args:
        runner: In whose stores they lie.
        slots: Tokens of these.
        prefix_tokens: Tokens of ended requests that are remembered.
    """

    def __init__(self, runner: Runner, slots: int, prefix_tokens: int) -> None:
        self._runner = runner
        self._can_share = runner.target.can_truncate
        self._slots = FreeSlots(slots)
        self._index = PrefixIndex()  # of rows of both kinds
        self._remembered = Remembered(prefix_tokens)
        self._kept: dict[int, int] = {}  # slots of remembered rows

    def longest(self, request: Request) -> tuple[int, int] | None:
        """The row that holds, or is about to read, the longest beginning of a request's prompt, and its tokens."""
        shares = self._can_share and request.params.prompt_logprobs is None
        known = self._index.longest(request.prompt[:-1]) if shares else None
        if known is not None:
            self._remembered.use(known[0])  # so that it goes last
        return known

    def take(self, request: Request) -> int | None:
        """Open a row for a request, and return its first slot; None where there is no room. Remembered rows make room
        where that helps."""
        size = request.slots
        start = self._slots.take(size)
        if start is None and self._slots.would_fit(size, self._kept.items()):
            while start is None:
                self._forget(self._remembered.forget())
                start = self._slots.take(size)
        if start is not None:
            self._runner.open(start, size)
            self._index.add(start, request.prompt)
        return start

    def remembers(self, row: int) -> bool:
        """Whether the row with this first slot is one of an ended request."""
        return row in self._kept

    def leave(self, row: Row) -> None:
        """End the row of a request that has ended: remember it, or give its slots back."""
        if not self._remember(row):
            self.give(row, wipe=row.request.failure is not None)

    def give(self, row: Row, wipe: bool) -> None:
        """Give the slots of a row back; for `wipe` see `Runner.close`."""
        self._index.remove(row.start)
        self._runner.close(row.start, wipe=wipe)
        self._slots.give(row.start, row.capacity)

    def _remember(self, row: Row) -> bool:
        """Keep what a request leaves behind, for requests that begin with it; whether that was possible."""
        self._runner.draft_context.catch_up()  # a drafter that fails over it has the request fail
        request, held = row.request, self._runner.held(row.start)
        text = (request.prompt + request.token_ids)[:held]
        if request.failure is not None or not self._can_share or not 0 < len(text) <= self._remembered.most:
            return False
        self._runner.shrink(row.start, len(text))
        self._slots.give(row.start + len(text), row.capacity - len(text))
        self._kept[row.start] = len(text)
        self._index.add(row.start, text)
        for other in self._remembered.add(row.start, text):
            self._forget(other)
        return True

    def _forget(self, row: int) -> None:
        self._index.remove(row)
        self._runner.close(row)
        self._slots.give(row, self._kept.pop(row))


class FreeSlots:
    """Hands out ranges of slots, each time the first that is long enough, so that what is in use stays together.

    Attributes:
        total: FreeSlots of the line.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[tuple[int, int]] = [(0, total)] if total else []  # first slot and count, in order, apart

    def take(self, count: int) -> int | None:
        """The first slot of `count` that were free, or None where so many do not lie together."""
        for at, (first, held) in enumerate(self._free):
            if held >= count:
                self._free[at : at + 1] = [(first + count, held - count)] if held > count else []
                return first
        return None

    def give(self, first: int, count: int) -> None:
        """Free slots that had been taken."""
        if count == 0:
            return
        insort(self._free, (first, count))
        at = bisect(self._free, (first, count)) - 1
        for left in (at, at - 1):  # join it with the range behind it, then with the one before
            if 0 <= left < len(self._free) - 1:
                (start, held), (after, more) = self._free[left : left + 2]
                assert start + held <= after, f"slots {after} to {start + held} are free twice"
                if start + held == after:
                    self._free[left : left + 2] = [(start, held + more)]

    def would_fit(self, count: int, given: Iterable[tuple[int, int]]) -> bool:
        """Whether `take` would find so many, were these ranges free as well."""
        trial = FreeSlots(0)
        for first, held in sorted([*self._free, *given]):
            trial.give(first, held)
        return trial.take(count) is not None


BLOCK = 16  # tokens; a shorter beginning is not worth a copy


class PrefixIndex:
    """The texts of rows by the hashes of their blocks of tokens, each hashed with all blocks before it."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._rows: dict[int, dict[int, None]] = {}  # by hash, those whose text has this block, in order

    def add(self, row: int, text: Sequence[int]) -> None:
        """Know the text of a row, which replaces what was known of it."""
        self.remove(row)
        self._texts[row] = list(text)
        for key in _hashes(text):
            self._rows.setdefault(key, {})[row] = None

    def remove(self, row: int) -> None:
        """Know the row no longer, if it was known."""
        for key in set(_hashes(self._texts.pop(row, ()))):  # two blocks of it may share one
            del self._rows[key][row]
            if not self._rows[key]:
                del self._rows[key]

    def longest(self, text: Sequence[int]) -> tuple[int, int] | None:
        """The row whose text has most tokens in common with this one from the beginning on, and how many these are.

        None where they do not make a block. Of equally good rows the one that has been known longest.
        """
        found = None
        for count, key in enumerate(_hashes(text), start=1):
            if key not in self._rows:
                break
            found = count, key
        if found is None:
            return None
        count, key = found
        held = {row: common(self._texts[row], text) for row in self._rows[key]}
        row = max(held, key=held.__getitem__)
        # Different blocks may have one hash; then what is in common is less than a hash says, and still true.
        return (row, held[row]) if held[row] >= BLOCK else None


class Remembered:
    """Rows of requests that have ended, the least recently used first.

    Args:
        most: Tokens of all of them together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts: OrderedDict[int, list[int]] = OrderedDict()

    def add(self, row: int, text: list[int]) -> list[int]:
        """Remember a row, which `most` suffices for. Returns the rows that have to go: those that it holds as a whole,
        and then the least recently used."""
        gone = [known for known, held in self.texts.items() if common(held, text) == len(held)]
        for known in gone:
            del self.texts[known]
        self.texts[row] = text
        while sum(map(len, self.texts.values())) > self.most:
            gone.append(self.forget())
        return gone

    def use(self, row: int) -> None:
        """It was of use just now."""
        if row in self.texts:
            self.texts.move_to_end(row)

    def forget(self) -> int:
        """The least recently used row, which is remembered no longer."""
        row, _ = self.texts.popitem(last=False)
        return row


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _hashes(text: Sequence[int]) -> list[int]:
    """One for each whole block."""
    hashes, before = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        before = hash((before, tuple(text[end - BLOCK : end])))
        hashes.append(before)
    return hashes
