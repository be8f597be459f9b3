"""When to try another size than the best known: what trials lose stays a small share of the time."""

from __future__ import annotations

EXPLORE = 0.004  # share of the time that may be lost in trials of a kind
CREDIT = 10.0  # plain cycles that may be lost in trials to begin with
LEAST_CHARGE, WASTED_CHARGE = 0.01, 0.1  # of a trial's time: it counts as lost at least; where there were no guesses
MOST_LOST = 5.0  # plain cycles that are made up for before there may be another trial
BETWEEN, PATIENCE = 2, 16  # cycles between two trials of new sizes; the same where none was worth while
AGAIN, NEW = "again", "new"  # kinds of trial: drafting as it was, sizes of which little is known


class Trials:
    """Trials of one engine: which the planned cycle is, and what those before have lost.

    Attributes:
        planned: Kind of trial that the planned cycle is; None where it is none.
    """

    def __init__(self) -> None:
        self.planned: str | None = None
        self._lost = {AGAIN: 0.0, NEW: 0.0}  # seconds that are not yet made up for
        self._next = 0  # cycle before which there is no trial of new sizes

    def new_is_due(self, now: int) -> bool:
        """Whether sizes of which little is known may be tried in cycle `now`."""
        return self._lost[NEW] <= 0 and now >= self._next

    def again_is_due(self) -> bool:
        """Whether drafting may be tried as it was."""
        return self._lost[AGAIN] <= 0

    def put_off(self, now: int) -> None:
        """None of the new sizes is worth a trial in cycle `now`."""
        self._next = now + PATIENCE

    def cycles_until_new(self, now: int, plain: float) -> float:
        """Cycles of `plain` seconds before new sizes may be tried."""
        return self._lost[NEW] / (EXPLORE * plain) if self._lost[NEW] > 0 else self._next - now

    def begin(self, plain: float) -> None:
        """Give credit, where cycles that do not draft take `plain` seconds."""
        self._lost[NEW] = -CREDIT * plain

    def make_up(self, seconds: float) -> None:
        """Take in that cycles of so many seconds have run, for kinds of trial that they were not."""
        for kind, lost in self._lost.items():
            if lost > 0 and kind != self.planned:
                self._lost[kind] -= EXPLORE * seconds

    def charge(self, cost: float, value: float, plain: float, wasted: bool, now: int) -> None:
        """Count what the planned trial has lost.

        Args:
            cost: Seconds that it took.
            value: Seconds that its tokens would have taken otherwise.
            plain: Seconds of a cycle that does not draft.
            wasted: Whether it was to draft and there were no guesses.
            now: Number of the cycle.
        """
        assert self.planned is not None
        least = WASTED_CHARGE if wasted else LEAST_CHARGE
        lost = self._lost[self.planned] + max(cost - value, least * cost)
        self._lost[self.planned] = min(lost, MOST_LOST * plain)
        self._next = now + BETWEEN
