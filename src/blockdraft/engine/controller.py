"""How far to draft in the next cycle, so that drafting pays and never costs.

The decision looks at committed tokens, at the drafter's probabilities and at measured costs, never at a guess drawn at
random that it would then drop: a token that is dropped because of what it is would shift the law of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from weakref import WeakKeyDictionary

from blockdraft.drafters import Drafter
from blockdraft.engine.costs import Costs
from blockdraft.engine.pace import Pace
from blockdraft.engine.request import Request
from blockdraft.proposal import Plan
from blockdraft.types import Drafting

MOST_GUESSES = 256  # of a tree whose budget is chosen each cycle
MEMORY = 0.07  # weight of a request's newest cycle in its running mean
TRIAL_MEMORY = 0.5  # the same for a cycle that drafted after a pause: what was known before may be outdated
COMMON_MEMORY = 0.02  # the same for what all requests share
FIRST_GUESS = 0.6  # share of guesses taken to be accepted before any has been tried
MARGIN = 1.02  # gain below which drafting is not worth its risk
SPARE_DEPTH = 1.5  # slots of a draft pass over the depth that paid lately
PRIOR = 10.0  # guesses that the mean of all positions counts for at each position
FIRST_WAIT, LONGEST_WAIT = 4, 512  # cycles without drafting before it is tried again
RECHECK = 8  # cycles of a pause after which it is asked again whether to draft: asking takes time too


class Controller:
    """Plans the cycles of one engine.

    A fixed block size or tree budget is used as it is. With "auto" each cycle is planned from the costs:

    - Drafting pauses while the tokens that it yields in a cycle, over the time of that cycle, are fewer than plain
      decoding yields. Then it is tried again after a while, and after ever longer whiles if it still does not pay.
    - A drafter that knows probabilities gets the time of a cycle by its number of guesses, and returns as many as
      maximise the expected tokens over time (CaDDTree, arXiv 2606.01813). For one that does not, the length of its
      chains is set in the same way from the share of guesses that were accepted so far. How far its probabilities can
      be trusted is learned, and so is how long a block is of use: a shorter one makes a cheaper draft pass.

    Args:
        costs: Called once, when a decision first needs it.
    """

    def __init__(self, drafter: Drafter, drafting: Drafting, costs: Callable[[], Costs]) -> None:
        self._drafter = drafter
        self._drafting = drafting
        self._block_size = drafter.block_size
        if isinstance(drafting.block_size, int):
            self._block_size = drafting.block_size
        self._costs = cache(costs)
        self._curves: dict[int, list[float]] = {}  # by rows
        self._plain: dict[int, float] = {}
        self._tau: float | None = None  # of all requests; what a new one begins with
        self._taus: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._guesses = 0.0  # running mean of the guesses a row
        self._depth = float(self._block_size)  # running mean of the guesses on the longest path
        self._came_true = self._expected = PRIOR  # accepted guesses, and what the drafter expected of them
        self._accepted = [0.0] * self._block_size  # by position: guesses accepted, and guesses that could have been
        self._reached = [0.0] * self._block_size
        self._pace = Pace(self.most_guesses)
        self._idle = 0
        self._wait = FIRST_WAIT

    @property
    def automatic(self) -> bool:
        return self._block_size > 1 and "auto" in (self._drafting.block_size, self._drafting.tree_budget)

    @property
    def most_guesses(self) -> int:
        """Most guesses of a row that a plan may ask for."""
        if self._block_size == 1:
            return 0
        budget = self._drafting.tree_budget
        if budget == "auto":
            return max(self._block_size - 1, MOST_GUESSES)
        return budget or self._block_size - 1

    def plan(self, requests: Sequence[Request]) -> Plan:
        """The plan of the next cycle of these requests."""
        block_size = self._block_size
        if not self._drafting.drawn:  # how a drawn chain is judged must not depend on the other rows
            # Guesses past the length limit would be cut; the anchor is there already.
            # A tree is no deeper than it has guesses, and a shorter block makes a cheaper draft pass.
            block_size = min(block_size, 1 + self.most_guesses, 1 + max(request.remaining for request in requests))
        params = [request.params for request in requests]
        window = self._drafting.draft_window
        budget = 0 if self._drafting.tree_budget == 0 else self.most_guesses
        if not self.automatic:
            return Plan(block_size, params, budget, draft_window=window)
        if block_size == 1 or not self._pays(requests):
            self._idle += 1
            return Plan(1, params)
        curve = self._curve(len(requests))
        if self._drafter.knows_probabilities:
            if not self._drafting.drawn:
                block_size = min(block_size, 2 + round(SPARE_DEPTH * self._depth))
            return Plan(block_size, params, budget, curve, self._came_true / self._expected, draft_window=window)
        return Plan(min(block_size, 1 + self._best_length(curve)), params, budget, draft_window=window)

    def learn(
        self,
        requests: Sequence[Request],
        plan: Plan,
        guesses: int,
        deepest: Sequence[int],
        lengths: Sequence[int],
        expected: Sequence[float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take in what a cycle yielded.

        Args:
            requests: Those of the cycle.
            plan: As it was carried out.
            guesses: Guesses a row, those that fill up shorter rows included.
            deepest: For each request the guesses on its longest path.
            lengths: For each request the guesses that were accepted.
            expected: For each request the guesses that the drafter expected to be accepted, where it says so.
            seconds: Time that the cycle took, where it is known.
        """
        if not self.automatic:
            return
        rows, drafts = len(requests), plan.block_size > 1
        if seconds is not None:
            usual = self._measured(rows)[guesses] if drafts else self._plain_cycle(rows)
            self._pace.learn(guesses if drafts else None, seconds, usual)
        if not drafts:
            return
        trial = self._idle > 0
        self._guesses += MEMORY * (guesses - self._guesses)
        self._depth += MEMORY * (max(deepest) - self._depth)
        if expected is not None:
            for hope, length in zip(expected, lengths, strict=True):
                self._expected = (1 - COMMON_MEMORY) * self._expected + hope
                self._came_true = (1 - COMMON_MEMORY) * self._came_true + length
        for request, depth, length in zip(requests, deepest, lengths, strict=True):
            before = self._taus.get(request, self._tau)
            weight = TRIAL_MEMORY if trial else MEMORY
            after = 1 + length if before is None else before + weight * (1 + length - before)
            self._taus[request] = after
            self._tau = after if self._tau is None else self._tau + COMMON_MEMORY * (1 + length - self._tau)
            for position in range(min(length + 1, depth)):
                self._reached[position] = (1 - COMMON_MEMORY) * self._reached[position] + 1
                self._accepted[position] = (1 - COMMON_MEMORY) * self._accepted[position] + (position < length)
        if trial:
            self._idle = 0
            self._wait = self._wait // 2 if self._worth(requests) else 2 * self._wait
            self._wait = min(max(self._wait, FIRST_WAIT), LONGEST_WAIT)

    def _pays(self, requests: Sequence[Request]) -> bool:
        if self._tau is None or self._idle >= self._wait:
            return True
        return self._idle % RECHECK == 0 and self._worth(requests)

    def _worth(self, requests: Sequence[Request]) -> bool:
        """Whether these requests get more tokens a second with drafting than without."""
        rows = len(requests)
        tokens = sum(self._taus.get(request, self._tau or 1.0) for request in requests)
        plain = self._pace.plain * self._plain_cycle(rows)
        return tokens * plain > MARGIN * rows * self._pace.at(round(self._guesses), self._measured(rows))

    def _curve(self, rows: int) -> list[float]:
        """Seconds of a cycle that drafts, by guesses a row, as far as is known by now."""
        return self._pace.cycle(self._measured(rows))

    def _measured(self, rows: int) -> list[float]:
        """The same as it was measured beforehand."""
        if rows not in self._curves:
            self._curves[rows] = self._costs().cycle(rows, self.most_guesses, self._drafting.tree_budget != 0)
        return self._curves[rows]

    def _plain_cycle(self, rows: int) -> float:
        """Seconds of one that does not, as measured beforehand."""
        if rows not in self._plain:
            self._plain[rows] = self._costs().plain_cycle(rows)
        return self._plain[rows]

    def _best_length(self, curve: Sequence[float]) -> int:
        """Guesses of a chain that maximise the expected tokens over time, from what was accepted at each position.

        Positions that were seldom reached borrow from the others.
        """
        best, best_rate, survival, expected = 1, 0.0, 1.0, 1.0
        mean = (sum(self._accepted) + PRIOR * FIRST_GUESS) / (sum(self._reached) + PRIOR)
        for length in range(1, min(self._block_size, len(curve))):
            survival *= (self._accepted[length - 1] + PRIOR * mean) / (self._reached[length - 1] + PRIOR)
            expected += survival
            if expected / curve[length] > best_rate:
                best, best_rate = length, expected / curve[length]
        return best
