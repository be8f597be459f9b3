"""Decoding without models: machines whose steps have known times, texts whose draft tokens have known acceptance
probabilities.

What a controller achieves is counted in expected tokens and true times, and so are the fixed sizes that it is compared
with; what it learns from is sampled at random and noisy. So figures of a few hundred steps mean something.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

from blockdraft.decode.step_time import Costs, best_count
from blockdraft.drafters import Drafter
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.request import Request
from blockdraft.engine.runner import Outcome
from blockdraft.types import Drafting, SamplingParams

BLOCK_SIZE = 16
MAX = 128  # draft tokens of a tree that are compared
TREE = Drafting(tree_budget="auto")
NOW = 1e9  # seconds since 1970


@dataclass(frozen=True)
class Machine:
    """True times of steps in milliseconds.

    Attributes:
        draft: Of a draft pass.
        flat: Nodes that take no longer than one.
        node: Of each node beyond these.
        row: Of each row beyond the first.
        noise: Standard deviation of the logarithm of a step's time.
        strays: Share of steps that meet a delay of up to 30 times their time.
        plain: Seconds of a plain step of one node, the unit of the times above.
    """

    draft: float
    flat: int
    node: float
    row: float = 0.02
    noise: float = 0.05
    strays: float = 0.01
    plain: float = 1e-3

    def seconds(self, rows: int, draft_tokens: int | None) -> float:
        nodes = rows * (1 + (draft_tokens or 0))
        drafted = 0.0 if draft_tokens is None else self.draft * (1 + 0.03 * rows)
        return self.plain * (1 + drafted + self.row * (rows - 1) + self.node * max(nodes - self.flat, 0) + 0.01 * nodes)

    def measured(self, seconds: float, rng: random.Random) -> float:
        delay = rng.uniform(5, 30) if rng.random() < self.strays else 1.0
        return seconds * delay * math.exp(rng.gauss(0, self.noise))


PAIR = Machine(draft=0.12, flat=5, node=0.15)  # a small pair, compiled for a CPU
GPU = Machine(draft=0.15, flat=32, node=0.02)
CPU = Machine(draft=0.1, flat=1, node=0.6)  # computes one node after the other: drafting hardly pays
MACHINES = {"pair": PAIR, "gpu": GPU, "cpu": CPU}
ROWS, CHAINS, TREES = (1, 2, 4, 8, 16), (*range(1, 9), 11, 15), (*range(1, 9), 12, 16, 24, 32, 64, 128)


def stored(machine: Machine, scale: Callable[[], float] = lambda: 1.0) -> Costs:
    """What measuring this machine would store, each time of a step that drafts multiplied by a number of its own."""

    def points(sizes: Sequence[int], rows: int) -> tuple[tuple[int, float], ...]:
        return tuple((n, scale() * machine.seconds(rows, n)) for n in sizes)

    return Costs(
        batch_sizes=ROWS,
        plain=tuple(machine.seconds(rows, None) for rows in ROWS),
        chain=tuple(points(CHAINS, rows) for rows in ROWS),
        tree=tuple(points(TREES, rows) for rows in ROWS),
        date=NOW,
    )


def shuffled(machine: Machine, seed: int) -> Costs:
    rng = random.Random(seed)
    costs = stored(machine, lambda: rng.choice((0.5, 1.0, 2.0)))
    return Costs(
        costs.batch_sizes, tuple(rng.choice((0.5, 1.0, 2.0)) * p for p in costs.plain), costs.chain, costs.tree, NOW
    )


def start(kind: str, machine: Machine, seed: int) -> Costs | None:
    """Stored costs of a kind."""
    if kind == "absent":
        return None
    if kind == "shuffled":
        return shuffled(machine, seed)
    if kind == "another":
        return stored({PAIR: CPU, GPU: PAIR, CPU: GPU}.get(machine, GPU))
    factor = {"right": 1.0, "halved": 0.5, "doubled": 2.0}[kind]
    return stored(machine, lambda: factor)


KINDS = ("right", "halved", "doubled", "shuffled", "another", "absent")


@dataclass(frozen=True)
class DraftTokens:
    """What a drafter can draft in one step of one row, best first.

    Attributes:
        path_probs: The chance of each draft token that it is accepted, together with those before it on its path.
        depths: How deep each lies.
    """

    path_probs: tuple[float, ...]
    depths: tuple[int, ...]

    @cached_property
    def accepted(self) -> tuple[float, ...]:
        """The expected number of accepted drafts among the first none, 1, 2, ... of them."""
        return (0.0, *accumulate(self.path_probs))

    def survival(self, count: int) -> list[float]:
        """Of the first draft tokens: the chance that the walk gets to a depth of 1, 2, ..."""
        found = [0.0] * max(self.depths[:count], default=0)
        for acceptance_prob, depth in zip(self.path_probs[:count], self.depths[:count], strict=True):
            found[depth - 1] += acceptance_prob
        return found


@cache
def chain(acceptance_probs: tuple[float, ...]) -> DraftTokens:
    return DraftTokens(tuple(accumulate(acceptance_probs, mul)), tuple(range(1, len(acceptance_probs) + 1)))


@cache
def tree(acceptance_probs: tuple[float, ...]) -> DraftTokens:
    """At each depth the best draft token is as likely as a chain's; the others share half of the rest, and so on."""
    found: list[tuple[float, int]] = []
    heap = [(-acceptance_probs[0], 1, 0, acceptance_probs[0], 1.0)]
    while len(found) < MAX:
        negative, depth, rank, acceptance_prob, before = heappop(heap)
        found.append((-negative, depth))
        other = (1 - acceptance_prob) / 2
        heappush(heap, (-before * other / 2**rank, depth, rank + 1, acceptance_prob, before))
        if depth < len(acceptance_probs):
            following = acceptance_probs[depth]
            heappush(heap, (negative * following, depth + 1, 0, following, -negative))
    return DraftTokens(tuple(p for p, _ in found), tuple(d for _, d in found))


Text = Callable[
    [int], tuple[float, ...]
]  # by step, the chance of a draft token at each depth if all before it were right


def constant(acceptance_prob: float, fade: float = 1.0) -> Text:
    acceptance_probs = tuple(acceptance_prob * fade**i for i in range(BLOCK_SIZE - 1))
    return lambda step: acceptance_probs


def changing(first: float, then: float, period: int) -> Text:
    texts = constant(first), constant(then)
    return lambda step: texts[step // period % 2](step)


TEXTS = {"even": constant(0.8), "fading": constant(0.85, 0.93), "middling": constant(0.5), "hard": constant(0.03)}


class Lookup(Drafter):
    """A drafter without probabilities."""

    block_size, target_layers, chooses_tree_size, chooses_length = BLOCK_SIZE, (), False, False


class Knowing(Lookup):
    """A drafter with probabilities."""

    chooses_tree_size = chooses_length = True


class Costless(Knowing):
    """A drafter with probabilities and without a network."""

    runs_network = False


DRAFTERS = {"lookup": (Lookup(), Drafting("auto")), "chain": (Knowing(), Drafting("auto")), "tree": (Knowing(), TREE)}
COSTLESS = {"costless": (Costless(), Drafting("auto"))}  # for a machine without a draft pass


def request(tokens: int = 10**9) -> Request:
    return Request(prompt=[1], params=SamplingParams(tokens))


@dataclass
class Account:
    """Tokens and time of a stretch of steps, as planned and with each fixed number of draft tokens."""

    tokens: float = 0.0
    seconds: float = 0.0
    fixed: dict[int | None, list[float]] = field(default_factory=dict)

    @property
    def against_best(self) -> float:
        return self.tokens / self.seconds / max(tokens / seconds for tokens, seconds in self.fixed.values())

    @property
    def against_plain(self) -> float:
        tokens, seconds = self.fixed[None]
        return self.tokens / self.seconds / (tokens / seconds)


class Decoding:
    """A controller at work on a machine and a text.

    Args:
        kind: One of `DRAFTERS` or `COSTLESS`.
        rows: By step.
        slower: By step and draft tokens, what the machine's times are multiplied by.
        answer: Steps after which all requests are new ones; None lets them go on for ever.
    """

    def __init__(
        self,
        kind: str,
        machine: Machine,
        text: Text,
        costs: Costs | None,
        seed: int = 0,
        rows: Callable[[int], int] = lambda step: 1,
        slower: Callable[[int, int | None], float] = lambda step, draft_tokens: 1.0,
        answer: int | None = None,
    ) -> None:
        self.drafter, self.drafting = (DRAFTERS | COSTLESS)[kind]
        self.machine, self.text, self.rows, self.slower = machine, text, rows, slower
        self.controller = Controller(
            self.drafter,  # type: ignore[arg-type]
            self.drafting,
            lambda drafter: costs,
            now=lambda: self.clock,
        )
        self.clock = NOW
        self.rng = random.Random(seed)
        self.answer, self.requests = answer, [request() for _ in range(64)]
        self.chosen: list[int | None] = []

    def run(self, steps: int) -> Account:
        account = Account()
        for _ in range(steps):
            self._step(account)
        return account

    def run_seconds(self, seconds: float) -> Account:
        account, end = Account(), self.clock + seconds
        while self.clock < end:
            self._step(account)
        return account

    def seconds(self, rows: int, draft_tokens: int | None) -> float:
        return self.machine.seconds(rows, draft_tokens) * self.slower(len(self.chosen), draft_tokens)

    def _step(self, account: Account) -> None:
        rows = self.rows(len(self.chosen))
        if self.answer and len(self.chosen) % self.answer == 0:
            self.requests = [request() for _ in range(64)]
        requests = self.requests[:rows]
        plan = self.controller.plan(requests)
        texts = [self._offered() for _ in requests]
        draft_tokens = None if plan.block_size == 1 else plan.block_size - 1
        if draft_tokens is not None and plan.step_seconds is not None:
            known = [self._draft_tokens(acceptance_probs[:draft_tokens]).path_probs for acceptance_probs in texts]
            draft_tokens = best_count([list(each) for each in known], plan.step_seconds, plan.calibration)
        limit = plan.block_size - 1
        survivals = [
            self._draft_tokens(acceptance_probs[:limit]).survival(draft_tokens or 0) if draft_tokens else []
            for acceptance_probs in texts
        ]
        levels = [self.rng.random() for _ in requests]
        lengths = [sum(p > level for p in survival) for survival, level in zip(survivals, levels, strict=True)]
        deepest = [len(survival) for survival in survivals]
        seconds = self.seconds(rows, draft_tokens)
        expected = None
        if self.drafter.chooses_tree_size and draft_tokens is not None:
            expected = [sum(survival) for survival in survivals]
        measured = self.machine.measured(seconds, self.rng)
        self.clock += measured
        self.controller.learn(Outcome(requests, plan, draft_tokens or 0, deepest, lengths, expected, seconds=measured))
        account.tokens += rows + sum(map(sum, survivals))
        account.seconds += seconds
        offered = [
            (self._draft_tokens(acceptance_probs).accepted, count) for acceptance_probs, count in Counter(texts).items()
        ]
        for size in (None, *(TREES if self.drafting.tree_budget else CHAINS)):
            whole = account.fixed.setdefault(size, [0.0, 0.0])
            whole[0] += rows + sum(count * accepted[size or 0] for accepted, count in offered)
            whole[1] += self.seconds(rows, size)
        self.chosen.append(draft_tokens)

    def _offered(self) -> tuple[float, ...]:
        """Acceptance in a step. Some steps are easier than others, and a drafter may know which."""
        acceptance_probs = self.text(len(self.chosen))
        if self.drafter.chooses_tree_size:
            power = self.rng.choice((0.5, 1.0, 2.0))
            return tuple(acceptance_prob**power for acceptance_prob in acceptance_probs)
        return acceptance_probs

    def _draft_tokens(self, acceptance_probs: tuple[float, ...]) -> DraftTokens:
        return tree(acceptance_probs) if self.drafting.tree_budget else chain(acceptance_probs)
