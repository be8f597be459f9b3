"""How far to draft in the next cycle, so that drafting pays and never costs.

The decision looks at committed tokens, at the drafter's probabilities and at measured times, never at a guess drawn at
random that it would then drop: a token that is dropped because of what it is would shift the law of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from blockdraft.drafters import Drafter
from blockdraft.engine.costs import Costs
from blockdraft.engine.pace import Pace
from blockdraft.engine.request import Request
from blockdraft.proposal import Plan
from blockdraft.types import Drafting

MOST_GUESSES = 256  # of a tree whose budget is chosen each cycle
YIELD_NOISE = 0.5
YIELD_DRIFT = 2e-4
COMMON_MEMORY = 0.01  # the same for what all requests share
FIRST_GUESS = 0.6  # share of guesses taken to be accepted before any has been tried
EASY = 0.8  # the same where a pause is tried to be ended
MARGIN = 1.01  # gain below which drafting is not worth its risk
SPARE_DEPTH = 1.5  # slots of a draft pass over the depth that paid lately
PRIOR = 10.0  # guesses that the mean of all positions counts for at each position
NEAR = 0.85
EXPLORE = 0.004  # share of the time that may be lost in trials
CREDIT = 10.0  # cycles that may be lost in trials to begin with
PATIENCE = 16  # cycles until trials are thought of again where there was none worth while


class Controller:
    """Plans the cycles of one engine.

    A fixed block size or tree budget is used as it is. With "auto" each cycle is planned from the times of the cycles
    before, and from how many of their guesses were accepted:

    - Drafting pauses while the tokens that it yields in a cycle, over the time of that cycle, are fewer than plain
      decoding yields.
    - A drafter that knows probabilities gets the time of a cycle by its number of guesses, and returns as many as
      maximise the expected tokens over time (CaDDTree, arXiv 2606.01813). For one that does not, the length of its
      chains is set in the same way from the share of guesses that were accepted so far. How far its probabilities can
      be trusted is learned, and so is how long a block is of use: a shorter one makes a cheaper draft pass.
    - Now and then there is a trial: a cycle that would be the best one if sizes that are not well known took the least
      that they may. What trials lose is counted, and the next one waits until the loss is a small share of the time.

    Args:
        costs: Called once, when a decision first needs it; None where nothing was stored.
    """

    def __init__(self, drafter: Drafter, drafting: Drafting, costs: Callable[[], Costs | None]) -> None:
        self._drafter = drafter
        self._drafting = drafting
        self._block_size = drafter.block_size
        if isinstance(drafting.block_size, int):
            self._block_size = drafting.block_size
        self._costs = costs
        self._pace = Pace(self._prior, self.most_guesses)
        self._tau: float | None = None  # of all requests; what a new one begins with
        self._taus: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._guesses = 0.0  # running mean of the guesses a row
        self._depth = float(self._block_size)  # running mean of the guesses on the longest path
        self._came_true = self._expected = PRIOR  # accepted guesses, and what the drafter expected of them
        self._accepted = [0.0] * self._block_size  # by position: guesses accepted, and guesses that could have been
        self._reached = [0.0] * self._block_size
        self._paused = False
        self._doubt = YIELD_NOISE
        self._trial = ""
        self._rate = 0.0  # tokens a second that the best plan promises
        self._debts = {"again": 0.0, "new": 0.0}  # seconds lost in trials that are not yet made up for
        self._next = 0  # cycle before which no trial is thought of

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
        if block_size == 1:
            return Plan(1, params)
        curve = self._choose(requests)
        if curve is None:
            return Plan(1, params)
        if self._drafter.knows_probabilities:
            trust = self._came_true / self._expected
            if self._paused:
                trust = max(trust, 1.0)
            if not self._drafting.drawn:
                block_size = min(block_size, 2 + round(SPARE_DEPTH * self._depth))
            return Plan(block_size, params, budget, curve, trust, draft_window=window)
        length = _best(self._tokens(), curve)
        return Plan(min(block_size, 1 + length), params, budget, draft_window=window)

    def _choose(self, requests: Sequence[Request]) -> Sequence[float] | None:
        """Seconds of the next cycle by guesses a row, if it is to draft."""
        rows, now = len(requests), self._pace.now
        times = self._pace.of(rows)
        plain, curve = times.expected()
        knows = self._drafter.knows_probabilities
        tokens = self._tokens()
        usual = min(round(self._guesses), len(curve) - 1) if knows else _best(tokens, curve)
        share = sum(self._taus.get(request, self._tau or 1.0) for request in requests)
        drafting, pausing = share * tokens[usual] / curve[usual], rows / plain
        self._paused = self._tau is not None and drafting < MARGIN * pausing
        self._rate = max(drafting, pausing)
        self._trial = ""
        if self._tau is None:
            return curve
        if self._debts["new"] > 0 or now < self._next:
            if self._paused and drafting > NEAR * pausing and self._debts["again"] <= 0:
                self._trial = "again"
            return None if self._paused and not self._trial else curve
        least_plain, least = times.least(now)
        affordable = [n for n in range(len(curve)) if curve[n] < 3 * max(plain, curve[usual])]
        least = least[:affordable[-1]+1]
        self._trial = "new"
        if self._paused:
            if knows:
                return least
            n = _best(tokens, least)
            if share * tokens[n] / least[n] > pausing:
                return _only(n)
            return _only(_best(self._tokens(EASY), curve[:affordable[-1]+1]))
        if rows / least_plain > 1.01 * drafting:
            return None
        if not knows:
            n = _best(tokens, least)
            if n == usual:
                self._trial = ""
                self._next = now + PATIENCE
        return least

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
            self._pace.learn(rows, guesses if drafts else None, seconds)
        plain, curve = self._pace.of(rows).expected()
        cost = curve[min(guesses, len(curve) - 1)] if drafts else plain
        if self._tau is None:
            self._debts["new"] = -CREDIT * plain
        for kind, debt in self._debts.items():
            if debt > 0 and kind != self._trial:
                self._debts[kind] -= EXPLORE * cost
        if not drafts:
            self._doubt += YIELD_DRIFT
            if self._trial:
                self._charge(cost, rows)
            return
        for position in range(max(deepest)):
            reached = [length for depth, length in zip(deepest, lengths, strict=True) if position < min(length + 1, depth)]
            for length in reached:
                self._reached[position] = (1 - COMMON_MEMORY) * self._reached[position] + 1
                self._accepted[position] = (1 - COMMON_MEMORY) * self._accepted[position] + (position < length)
        if expected is not None:
            for hope, length in zip(expected, lengths, strict=True):
                kept = 1 - COMMON_MEMORY * min(hope, 1.0)
                self._expected = kept * self._expected + hope
                self._came_true = kept * self._came_true + length
        self._doubt += YIELD_DRIFT
        weight = self._doubt / (self._doubt + YIELD_NOISE)
        self._doubt *= 1 - weight
        knows = self._drafter.knows_probabilities
        promise = self._tokens()[min(guesses, len(curve)-1)]
        if not (self._trial and knows and not self._paused):
            self._guesses += weight * (guesses - self._guesses)
            self._depth += weight * (max(deepest) - self._depth)
            for request, depth, length in zip(requests, deepest, lengths, strict=True):
                before = self._taus.get(request, self._tau)
                ratio = (1 + length) / promise
                self._taus[request] = ratio if before is None else before + weight * (ratio - before)
                self._tau = ratio if self._tau is None else self._tau + COMMON_MEMORY * (ratio - self._tau)
        if self._trial:
            tokens = sum(self._taus[request] for request in requests) * promise
            if knows and not self._paused and expected is not None:
                tokens = rows + sum(expected) * self._came_true / self._expected
            self._charge(cost, tokens)

    def _charge(self, cost: float, tokens: float) -> None:
        self._debts[self._trial] += max(cost - tokens / self._rate, 0.05 * cost)
        self._next = self._pace.now + 2

    def _tokens(self, least: float = 0.0) -> list[float]:
        """Tokens that a chain yields by its guesses, from what was accepted at each position.

        Positions that were seldom reached borrow from the others.
        """
        if self._drafter.knows_probabilities:
            return [1.0] * (self.most_guesses + 1)
        mean = (sum(self._accepted) + PRIOR * FIRST_GUESS) / (sum(self._reached) + PRIOR)
        found, survival = [1.0], 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            survival *= max((accepted + PRIOR * mean) / (reached + PRIOR), least)
            found.append(found[-1] + survival)
        return found

    def _prior(self, rows: int) -> tuple[float, Sequence[float], float]:
        costs = self._costs()
        if costs is None:
            return 1.0, [1.2 + 0.05 * rows * n for n in range(self.most_guesses + 1)], 1.0
        return costs.plain_cycle(rows), costs.cycle(rows, self.most_guesses, self._drafting.tree_budget != 0), 0.5


def _best(tokens: Sequence[float], curve: Sequence[float]) -> int:
    """Guesses, at least one, that yield the most tokens over time."""
    return max(range(1, min(len(tokens), len(curve))), key=lambda n: tokens[n] / curve[n])


def _only(n: int) -> list[float]:
    return [1.0] * (n + 1)
