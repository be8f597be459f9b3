"""Records, each a line of a CSV file, and the ways to draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockdraft.decode.proposal import ChainPlan, Plan
from blockdraft.errors import UsageError
from blockdraft.types import Drafting, SamplingParams

PLAIN = "plain"  # the kind and the way of decoding without a drafter
NATIVE, TORCH = "native", "torch"  # as the target runs by itself, and by torch's operations alone


class Way(NamedTuple):
    """A chain or a tree of so many guesses."""

    tree: bool
    draft_tokens: int

    @property
    def name(self) -> str:
        return f"{'tree' if self.tree else 'chain'}:{self.draft_tokens}"

    def drafting(self, block_size: int) -> Drafting:
        """Drafting settings for a drafter of these blocks, anchor included."""
        return (
            Drafting(block_size, self.draft_tokens) if self.tree else Drafting(min(self.draft_tokens + 1, block_size))
        )

    def plan(self, block_size: int, rows: int) -> Plan:
        drafting = self.drafting(block_size)
        return ChainPlan(drafting.block_size, [SamplingParams()] * rows).as_tree(drafting.tree_budget)


def parse(name: str) -> Way:
    """A way, from `chain:N` or `tree:N`. Raises UsageError for anything else."""
    kind, _, number = name.partition(":")
    if kind not in ("chain", "tree") or not number.isdigit() or number == "0":
        raise UsageError(f"Way {name!r} is unknown; a way is chain:N or tree:N with N guesses.")
    return Way(kind == "tree", int(number))


def ways_of(wanted: Sequence[Way], block_size: int, trees: bool) -> list[Way]:
    """Ways that a drafter can do: chains are cut to its blocks, anchor included."""
    cut = [
        way if way.tree else Way(False, min(way.draft_tokens, block_size - 1))
        for way in wanted
        if trees or not way.tree
    ]
    return list(dict.fromkeys(cut))


@dataclass(frozen=True)
class Unit:
    """A piece of work that was done as a whole.

    Attributes:
        stage: train, answers, forwards, cycles or speeds.
        name: Which one of the stage.
    """

    KEY = ("stage", "name")

    stage: str
    name: str
    seconds: float


@dataclass(frozen=True)
class Trained:
    """A drafter of one seed.

    Attributes:
        tokens: Positions that were trained on.
        seconds: Of all its steps, the target's part in them included.
        peak_bytes: Most memory of the process that trained it.
        passed, observed: Weights that are read by a draft pass, and once a cycle for what was committed.
    """

    KEY = ("kind", "seed")

    kind: str
    seed: int
    parameters: int
    steps: int
    tokens: int
    seconds: float
    peak_bytes: int
    passed: int
    observed: int


@dataclass(frozen=True)
class Answers:
    """Answers to a prompt set by one drafter in one way, a prompt at a time.

    Attributes:
        prompts: Those whose plain answer does not loop; the others are left out.
        tokens, cycles: In sum; an answer's first token comes from the prompt's forward.
        accepted: S_1, S_2, ... with spaces between.
        draft_tokens: Mean guesses of a cycle.
        passes: Mean number of draft passes a cycle by the tokens that each takes, such as "1:1.0 10:5.8".
        draft_seconds, seconds: Of a cycle, as a mean.
        same: Share of the answers that are those of plain decoding.
    """

    KEY = ("kind", "seed", "set", "temperature", "way")

    kind: str
    seed: int
    set: str
    temperature: float
    way: str
    prompts: int
    looping: int
    tokens: int
    cycles: int
    accepted: str
    draft_tokens: float
    passes: str
    draft_seconds: float
    seconds: float
    same: float

    @property
    def tau(self) -> float:
        return self.tokens / self.cycles if self.cycles else 1.0

    @property
    def shares(self) -> list[float]:
        return [float(share) for share in self.accepted.split()]

    @property
    def passes_by_tokens(self) -> Mapping[int, float]:
        return {int(tokens): float(count) for tokens, _, count in (each.partition(":") for each in self.passes.split())}


@dataclass(frozen=True)
class Forward:
    """Median time of the target's forward over so many nodes of one row."""

    KEY = ("width", "running", "nodes")

    width: int
    running: str
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Cycle:
    """Cycles of one way behind arbitrary text; all ways take turns, plain decoding among them.

    Attributes:
        width: How many times as wide as they are target and drafter were made.
        running: `NATIVE` or `TORCH`.
        compiled: Whether the drafter ran compiled, 0 or 1.
        seconds, draft_seconds: Of a cycle, as a mean over a few.
        plain_seconds: Of a plain cycle in the same repeat.
        weight_bytes, state_bytes: Memory of the drafter: its weights, and what it keeps of a token of text.
    """

    KEY = ("kind", "width", "running", "batch", "way", "repeat")

    kind: str
    width: int
    running: str
    batch: int
    way: str
    repeat: int
    compiled: int
    seconds: float
    draft_seconds: float
    plain_seconds: float
    weight_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Speed:
    """Real answers of the pair as it is, all methods in turns: tokens a second over those of plain decoding, the
    median of the repeats and their range."""

    KEY = ("kind", "way", "set")

    kind: str
    way: str
    set: str
    tokens_per_second: float
    speedup: float
    lowest: float
    highest: float
    tau: float
