"""Decoding without models: machines whose cycles have known times, texts whose guesses have known chances.

What a controller achieves is counted in expected tokens and true times, and so are the fixed sizes that it is compared
with; what it learns from is drawn at random and noisy. So figures of a few hundred cycles mean something.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blockdraft.engine.controller import Controller
from blockdraft.engine.costs import Costs
from blockdraft.engine.prompts import AnswerText
from blockdraft.engine.request import Request
from blockdraft.proposal import Plan, best_count
from blockdraft.sampling import RandomNumbers
from blockdraft.types import Drafting, SamplingParams

BLOCK_SIZE = 16
MOST = 128  # guesses of a tree that are compared


@dataclass(frozen=True)
class Machine:
    """True times of cycles in milliseconds.

    Attributes:
        draft: Of a draft pass.
        flat: Nodes that take no longer than one.
        node: Of each node beyond these.
        row: Of each row beyond the first.
        noise: Standard deviation of the logarithm of a cycle's time.
        strays: Share of cycles that meet a delay of up to 30 times their time.
    """

    draft: float
    flat: int
    node: float
    row: float = 0.02
    noise: float = 0.05
    strays: float = 0.01

    def seconds(self, rows: int, guesses: int | None) -> float:
        nodes = rows * (1 + (guesses or 0))
        drafted = 0.0 if guesses is None else self.draft * (1 + 0.03 * rows)
        return 1e-3 * (1 + drafted + self.row * (rows - 1) + self.node * max(nodes - self.flat, 0) + 0.01 * nodes)

    def measured(self, seconds: float, rng: random.Random) -> float:
        delay = rng.uniform(5, 30) if rng.random() < self.strays else 1.0
        return seconds * delay * math.exp(rng.gauss(0, self.noise))


PAIR = Machine(draft=0.12, flat=5, node=0.15)  # a small pair, compiled for a CPU
GPU = Machine(draft=0.15, flat=32, node=0.02)
CPU = Machine(draft=0.1, flat=1, node=0.6)  # computes one node after the other: drafting hardly pays
MACHINES = {"pair": PAIR, "gpu": GPU, "cpu": CPU}
ROWS, CHAINS, TREES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 7, 11, 15), (1, 2, 4, 8, 16, 32, 64, 128)


def stored(machine: Machine, scale: Callable[[], float] = lambda: 1.0) -> Costs:
    """What measuring this machine would store, each time of a cycle that drafts multiplied by a number of its own."""

    def points(sizes: Sequence[int], rows: int) -> tuple[tuple[int, float], ...]:
        return tuple((n, scale() * machine.seconds(rows, n)) for n in sizes)

    return Costs(
        rows=ROWS,
        plain=tuple(machine.seconds(rows, None) for rows in ROWS),
        chain=tuple(points(CHAINS, rows) for rows in ROWS),
        tree=tuple(points(TREES, rows) for rows in ROWS),
    )


def shuffled(machine: Machine, seed: int) -> Costs:
    rng = random.Random(seed)
    costs = stored(machine, lambda: rng.choice((0.5, 1.0, 2.0)))
    return Costs(costs.rows, tuple(rng.choice((0.5, 1.0, 2.0)) * p for p in costs.plain), costs.chain, costs.tree)


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


@dataclass
class Text:
    """Guesses that come true with a chance of their own at each position, where all before it did.

    Attributes:
        chances: By position; for a cycle number.
    """

    chances: Callable[[int], Sequence[float]]

    def survival(self, cycle: int) -> list[float]:
        found, product = [], 1.0
        for chance in self.chances(cycle):
            product *= chance
            found.append(product)
        return found


def constant(chance: float, fade: float = 1.0) -> Text:
    chances = [chance * fade**i for i in range(BLOCK_SIZE - 1)]
    return Text(lambda cycle: chances)


def drifting(low: float, high: float, period: int = 400) -> Text:
    easy, hard = [high] * (BLOCK_SIZE - 1), [low] * (BLOCK_SIZE - 1)
    return Text(lambda cycle: easy if cycle // period % 2 == 0 else hard)


TEXTS = {"even": constant(0.8), "fading": constant(0.85, 0.93), "middling": constant(0.5), "hard": constant(0.03)}


class Lookup:
    """A drafter that knows no probabilities."""

    block_size, taps, knows_probabilities = BLOCK_SIZE, (), False


class Knowing(Lookup):
    """One that does."""

    knows_probabilities = True


def request(tokens: int = 10**9) -> Request:
    return Request([1], SamplingParams(tokens), frozenset(), RandomNumbers(0), AnswerText(None))


@dataclass
class Account:
    """Tokens and time of a stretch of cycles, as planned and with each fixed number of guesses."""

    tokens: float = 0.0
    seconds: float = 0.0
    fixed_tokens: dict[int | None, float] = field(default_factory=dict)
    fixed_seconds: dict[int | None, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def fixed(self) -> dict[int | None, float]:
        return {n: self.fixed_tokens[n] / self.fixed_seconds[n] for n in self.fixed_tokens}

    @property
    def against_best(self) -> float:
        return self.rate / max(self.fixed().values())

    @property
    def against_plain(self) -> float:
        return self.rate / self.fixed()[None]


@dataclass
class Decoding:
    """A controller at work on a machine and a text."""

    machine: Machine
    text: Text
    controller: Controller
    seed: int = 0
    rows: Callable[[int], int] = lambda cycle: 1
    slower: Callable[[int, int | None], float] = lambda cycle, guesses: 1.0  # what the machine's times grow by
    cycle: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.requests: list[Request] = [request() for _ in range(64)]
        self.chosen: list[int | None] = []

    def run(self, cycles: int) -> Account:
        account = Account()
        for _ in range(cycles):
            self._cycle(account)
            self.cycle += 1
        return account

    def _cycle(self, account: Account) -> None:
        rows = self.rows(self.cycle)
        requests = self.requests[:rows]
        knows = self.controller._drafter.knows_probabilities
        survivals = []
        for _ in requests:
            survival = self.text.survival(self.cycle)
            if knows:  # some cycles are easier than others, and the drafter knows which
                power = self.rng.choice((0.5, 1.0, 2.0))
                survival = [chance**power for chance in survival]
            survivals.append(survival)
        plan = self.controller.plan(requests)
        guesses: int | None = None
        if plan.block_size > 1:
            guesses = plan.block_size - 1
            if plan.cycle_seconds is not None:
                known = [survival[:guesses] for survival in survivals]
                guesses = best_count(known, plan.cycle_seconds, plan.trust)
        lengths = []
        for survival in survivals:
            level = self.rng.random()
            lengths.append(sum(chance > level for chance in survival[: guesses or 0]))
        true = self.machine.seconds(rows, guesses) * self.slower(self.cycle, guesses)
        expected = [sum(survival[:guesses]) for survival in survivals] if knows and guesses is not None else None
        self.controller.learn(
            requests,
            plan,
            guesses or 0,
            [guesses or 0] * rows,
            lengths,
            expected,
            self.machine.measured(true, self.rng),
        )
        account.tokens += rows + sum(sum(survival[: guesses or 0]) for survival in survivals)
        account.seconds += true
        self.chosen.append(guesses)
        for n in (None, *range(1, BLOCK_SIZE)):
            tokens = rows + sum(sum(survival[: n or 0]) for survival in survivals)
            account.fixed_tokens[n] = account.fixed_tokens.get(n, 0.0) + tokens
            seconds = self.machine.seconds(rows, n) * self.slower(self.cycle, n)
            account.fixed_seconds[n] = account.fixed_seconds.get(n, 0.0) + seconds


def decoding(
    machine: Machine, text: Text, costs: Costs | None, knows: bool = False, seed: int = 0, **options: object
) -> Decoding:
    drafter = Knowing() if knows else Lookup()
    controller = Controller(drafter, Drafting("auto"), lambda: costs)  # type: ignore[arg-type]
    return Decoding(machine, text, controller, seed, **options)  # type: ignore[arg-type]
