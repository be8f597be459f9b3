"""Which slots of the runner's stores are whose: of rows that run, and of rows that are remembered."""

from __future__ import annotations

from blockdraft.engine.prefixes import PrefixIndex, Remembered
from blockdraft.engine.request import Request
from blockdraft.engine.row import Row
from blockdraft.engine.runner import Runner
from blockdraft.engine.slots import Slots


class Places:
    """Hands out slots for rows, and keeps what ended requests leave behind for others that begin alike.

    Args:
        runner: In whose stores they lie.
        slots: Tokens of these.
        prefix_tokens: Tokens of ended requests that are remembered.
    """

    def __init__(self, runner: Runner, slots: int, prefix_tokens: int) -> None:
        self._runner = runner
        self._can_share = runner.target.can_truncate
        self._slots = Slots(slots)
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
        self._runner.observer.catch_up()  # a drafter that fails over it has the request fail
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
