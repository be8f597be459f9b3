"""Which slots of a line are free."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable


class Slots:
    """Hands out ranges of slots, each time the first that is long enough, so that what is in use stays together.

    Attributes:
        total: Slots of the line.
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
        trial = Slots(0)
        for first, held in sorted([*self._free, *given]):
            trial.give(first, held)
        return trial.take(count) is not None
