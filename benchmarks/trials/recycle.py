"""On trial: guesses from what the target said after rejected guesses, beside those of DFlash; nothing is trained.

A cycle computes the target's laws after guesses that turn out to be wrong, and forgets them. They follow a wrong token,
but what they say of the tokens further on is often right. Three readings of them are tried, each with the rejected
guesses g1, g2, ... (the likeliest path behind the last accepted token) and the token b that came in place of g1:
  swapped    b takes the place of g1 and the rest stays: what follows b is what the target said after g1
  skipped    the drafter left b out: g1 follows b, and then what the target said after g1
  early      the drafter put something before b, which is one of g2, g3, ...: what the target said after that follows
The likeliest tokens of each reading form a tree, which is merged with that of DFlash by the chance of each guess
(`drafters/combined.py`). A chance is the target's own probability there, times how much of it came true lately in the
same text, for the first token of a reading and for the others.

    python -m benchmarks.trials.recycle --prompts gsm8k.jsonl --prompts humaneval.jsonl --drafter A --drafter B

The drafters are of DFlash's kind and differ in their seed of training; by default they are those that the trial
`redraft` has made as its base. Guesses cost a place in the target's forward and no pass; the time of the host is not
counted. It pays if with one of the sets of readings the speed-up is more than 1.03 times that of DFlash alone for each
seed on each of at least two prompt sets (see report.py); the last line says so.

A drafter is told of committed tokens alone, so the trial listens at the target; were this to stay, what `observe` is
told would have to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import in_words
from benchmarks.trials.overheard import MOST, Overheard, Rejected, rejected
from benchmarks.trials.trial import Contender, CountedDFlash, Trial, drafters_of, parser, with_drafters
from blockdraft.drafters.combined import CombinedDrafter
from blockdraft.drafters.dflash import load
from blockdraft.errors import UsageError
from blockdraft.proposal import Plan, Proposal, best_first
from blockdraft.targets import Target

READINGS = ("swapped", "skipped", "early")
START = 0.25, 0.75  # share of what is promised that comes true, to begin with, of the first tokens and of the others
WEIGHT = 5.0  # tokens that it counts for
NEWEST = 0.05  # weight of the newest token in that share


def read(left: Rejected, reading: str, anchor: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each place behind the anchor; empty where the reading has nothing to say."""
    if reading == "swapped" or not left.guesses:
        return left.after
    if reading == "skipped":
        return [[(left.guesses[0], 1.0)], *left.after]
    places = [place for place, token in enumerate(left.guesses) if token == anchor and place > 0]
    return left.after[places[0] :] if places else []


@dataclass
class Memory:
    """What one row knows.

    Attributes:
        left: By the newest cycle.
        committed: Tokens behind the anchor that the newest cycle has committed.
        promised, true: Of the first tokens of a reading and of the others: their probabilities and how many came true,
            in sums that forget.
        foretold: The likeliest tokens that were read for the cycle that comes, with their probabilities.
    """

    left: Rejected = field(default_factory=lambda: Rejected([], []))
    committed: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=lambda: [WEIGHT, WEIGHT])
    true: list[float] = field(default_factory=lambda: [START[0] * WEIGHT, START[1] * WEIGHT])
    foretold: list[tuple[int, float]] = field(default_factory=list)

    def trust(self, depth: int) -> float:
        return min(self.true[depth > 0] / self.promised[depth > 0], 1.0)

    def learn(self, text: Sequence[int]) -> None:
        """Compare what was foretold with what came; behind the first wrong token nothing is learned."""
        for depth, ((token, chance), said) in enumerate(zip(self.foretold, text, strict=False)):
            kind = int(depth > 0)
            self.promised[kind] += chance - NEWEST * self.promised[kind]
            self.true[kind] += (token == said) - NEWEST * self.true[kind]
            if token != said:
                break
        self.foretold = []


class Memories:
    """Those of some rows; as `prompt_lookup.Texts`."""

    def __init__(self, rows: Sequence[int], of_rows: dict[int, Memory]) -> None:
        self.rows, self._of_rows = list(rows), of_rows

    def __iter__(self) -> Any:
        return iter([self._of_rows[row] for row in self.rows])

    def of(self, rows: Sequence[int]) -> Memories:
        return Memories(rows, self._of_rows)

    def open(self, row: int, capacity: int) -> None:
        self._of_rows[row] = Memory()

    def close(self, row: int) -> None:
        del self._of_rows[row]

    def shrink(self, row: int, capacity: int) -> None:
        self._of_rows[row] = Memory()

    def copy(self, source: int, row: int, length: int) -> None:
        pass

    def wipe(self, row: int, whole: bool = False) -> None:
        pass


class RecycleDrafter:
    """Guesses by one reading of what the target said after rejected guesses.

    Args:
        target: The one that the engine decodes with.
        reading: One of `READINGS`.
        block_size: Most tokens of a path, anchor included.
    """

    path: Path | None = None
    taps: tuple[int, ...] = ()
    knows_probabilities = knows_lengths = False

    def __init__(self, target: Overheard, reading: str, block_size: int) -> None:
        self._target, self.reading, self.block_size = target, reading, block_size

    def new_state(self, batch: int, capacity: int) -> Memories:
        rows = [place * capacity for place in range(batch)]
        return Memories(rows, {row: Memory() for row in rows})

    def state_bytes(self, batch: int, capacity: int) -> int:
        return 0

    def weight_bytes(self) -> int:
        return 0

    def observe(self, state: Memories, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        heard = self._target.last
        for memory, row, said, length in zip(state, state.rows, tokens.tolist(), lengths, strict=True):
            if length:
                memory.left, memory.committed = Rejected([], []), said[1:length]
                if heard is not None and row in heard.rows:
                    memory.left = rejected(heard, list(heard.rows).index(row), said[:length])

    def propose(self, state: Memories, anchor: Tensor, plan: Plan) -> Proposal:
        depth, ranks = plan.block_size - 1, min(plan.tree_budget, MOST) or 1
        budget = plan.tree_budget or depth
        tokens = torch.zeros(len(anchor), depth, ranks, dtype=torch.long)
        chances = torch.full(tokens.shape, -inf)
        for row, (memory, token) in enumerate(zip(state, anchor.tolist(), strict=True)):
            memory.learn([*memory.committed, token])
            likeliest = read(memory.left, self.reading, token)[:depth]
            memory.foretold = [likely[0] for likely in likeliest]
            for place, likely in enumerate(likeliest):
                for rank, (guess, chance) in enumerate(likely[:ranks]):
                    tokens[row, place, rank] = guess
                    scaled = memory.trust(place) * chance
                    chances[row, place, rank] = log(scaled) if scaled > 0 else -inf
        return best_first(anchor, chances, tokens.to(anchor.device), budget, [1.0] * (1 + budget))


class Recycle:
    """The trial; arguments as on the command line."""

    def __init__(self, words: list[str] | None = None) -> None:
        options = with_drafters(parser(__doc__, "recycle"))
        options.add_argument(
            "--readings", default="swapped,swapped+skipped,swapped+skipped+early", help="sets that are tried"
        )
        self.given = given = options.parse_args(words)
        self.drafters = drafters_of(given)
        self.sets = [text.split("+") for text in given.readings.split(",")]
        if unknown := sorted({name for one in self.sets for name in one} - set(READINGS)):
            raise UsageError(f"The reading {unknown[0]!r} is unknown; there are {', '.join(READINGS)}.")
        self.trial = Trial(given, {"drafters": list(map(str, self.drafters))})

    def alone(self, seed: int) -> tuple[Target, CountedDFlash]:
        found = load(self.drafters[seed], self.trial.target, CountedDFlash)
        assert isinstance(found, CountedDFlash)
        return self.trial.target, found

    def combined(self, readings: Sequence[str], seed: int) -> tuple[Any, CombinedDrafter]:
        return beside(self.trial.target, self.alone(seed)[1], readings)

    def run(self) -> None:
        contenders = [Contender("base", self.alone, True)]
        contenders += [Contender("+".join(one), partial(self.combined, one)) for one in self.sets]
        self.trial.run(contenders, range(len(self.drafters)))


def beside(target: Target, drafter: CountedDFlash, readings: Sequence[str]) -> tuple[Any, CombinedDrafter]:
    """What an engine decodes with: the target, listened at, and DFlash with these readings beside it."""
    heard = Overheard(target)
    found: Any = CombinedDrafter([drafter, *(RecycleDrafter(heard, one, drafter.block_size) for one in readings)])
    found.counted = drafter.counted
    return heard, found


if __name__ == "__main__":
    with in_words():
        Recycle().run()
