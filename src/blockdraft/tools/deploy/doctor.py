"""What is wrong where a drafter's guesses are refused.

Prompts are decoded, and at the places where a cycle began the drafter is asked again on the finished text, as training
asks it. Both must accept as much, or decoding is at fault. Then the drafter is read in other ways; if it guesses
clearly more in one of them, that is how it was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.targets import Target, other_target_warning
from blockdraft.tools.deploy.checks import Reading, bench_of
from blockdraft.tools.deploy.settings import DoctorSettings
from blockdraft.types import Drafting, SamplingParams

ROWS = 4  # answers at a time
SURE = 4.0  # standard errors by which a reading must be better
GAIN = 0.1  # share of the right guesses by which it must be better too
LEAST = 0.05  # and right guesses
NOTHING = 0.1  # S_1 below which a drafter guesses nothing of this target
ALIKE = 0.9  # share of the cycles in which decoding and the drafter alone must accept as many guesses

# Told which reading is tried, how many are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tried:
    """Attributes:
    accepted: Right guesses before the first wrong one, as a mean over anchors.
    by_position: S_1, S_2, ... over the same anchors.
    """

    fault: str
    told: str
    accepted: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Attributes:
    cycles: That were compared.
    decoded, own: S_1, S_2, ... over these cycles: as the engine accepted, and as the drafter guesses on the text.
    alike: Share of the cycles in which both accept as many.
    tried: Readings; the first is that of the configuration.
    fault: "decoding", "target", or that of the reading which is right, such as "taps"; None where nothing is wrong.
    finding: The same in a sentence.
    remedy: What to do.
    """

    cycles: int
    decoded: tuple[float, ...]
    own: tuple[float, ...]
    alike: float
    tried: tuple[Tried, ...]
    fault: str | None
    finding: str
    remedy: str


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer.

    Attributes:
        tokens: `[S]` int64, of both.
        first: Where the answer begins.
        cycles: Place of the anchor, guesses that were drafted, and those accepted. The last cycle, which the answer's
            end may have cut, is left out.
    """

    tokens: Tensor
    first: int
    cycles: tuple[tuple[int, int, int], ...]

    def anchors(self, count: int) -> list[int]:
        """Up to so many places of the answer, evenly spread."""
        places = range(self.first, len(self.tokens) - 1)
        return [places[i * len(places) // count] for i in range(count)] if len(places) > count else list(places)


def examine(
    target: Target,
    drafter: str | Path,
    prompts: Sequence[str],
    how: DoctorSettings,
    progress: Progress = lambda stage, done, total: None,
) -> Diagnosis:
    """Examine a pair.

    Args:
        drafter: Folder or GGUF file of a drafter with a network of its own.

    Raises:
        ValueError: The drafter is of another kind, does not fit the target or cannot be read, or the answers hold no
            cycle to look at.
    """
    bench, trained_for = bench_of(drafter, target)
    answers = decode(target, drafter, prompts, how.max_new_tokens)
    count = sum(len(each.cycles) for each in answers)
    if not count:
        raise UsageError("The answers are too short to tell anything; give other prompts.")
    longest = max(len(each.tokens) for each in answers)
    ways = list(bench.readings(longest))
    texts = [(each.tokens, each.anchors(how.anchors)) for each in answers]
    runs = list[Tensor]()
    for number, reading in enumerate(ways):
        progress(reading.told, number, len(ways))
        runs.append(bench.right(reading, texts).cumprod(dim=1))
    progress("compared", len(ways), len(ways))
    tried = tuple(
        Tried(one.fault, one.told, float(run.sum(1).double().mean()), tuple(run.double().mean(0).tolist()))
        for one, run in zip(ways, runs, strict=True)
    )
    pairs = [
        (min(right, drafted), accepted)
        for each in answers
        for right, (_, drafted, accepted) in zip(
            bench.lengths(each.tokens, [place for place, _, _ in each.cycles]), each.cycles, strict=True
        )
    ]
    alike = sum(mine == accepted for mine, accepted in pairs) / count
    told = other_target_warning(Path(drafter), trained_for, target)
    fault, finding, remedy = conclude(ways, runs, [mine for mine, _ in pairs], [got for _, got in pairs], alike, told)
    decoded, guessed = (tuple(_survival([pair[i] for pair in pairs], bench.block_size)) for i in (1, 0))
    return Diagnosis(count, decoded, guessed, alike, tried, fault, finding, remedy)


def conclude(
    ways: Sequence[Reading],
    runs: Sequence[Tensor],
    own: Sequence[int],
    decoded: Sequence[int],
    alike: float,
    other_target: str | None,
) -> tuple[str | None, str, str]:
    """Fault, finding and remedy.

    Args:
        runs: For each reading `[A, K]`, whether the first k guesses were right.
        own, decoded: Guesses accepted in each cycle, by the drafter alone and by the engine.
        other_target: What to say where the drafter was trained for another target.
    """
    usual = runs[0].sum(1).double()
    better = []
    for reading, run in zip(ways[1:], runs[1:], strict=True):
        gains = run.sum(1).double() - usual
        gain, error = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        if gain > max(SURE * error, GAIN * float(usual.mean()), LEAST):
            better.append((gain, reading))
    if better:
        best = max(gain for gain, _ in better)
        gain, reading = next(pair for pair in better if pair[0] >= 0.9 * best)  # of those that are alike the plainest
        now = float(usual.mean())
        finding = f"It guesses {now:.2f} tokens right on average, and {now + gain:.2f} with {reading.told}."
        return reading.fault, finding, reading.remedy
    if alike < ALIKE and sum(decoded) < (1 - GAIN) * sum(own):
        finding = (
            f"Decoding accepted {sum(decoded)} guesses in {len(own)} cycles, and the drafter alone guesses {sum(own)} "
            "right at the same places."
        )
        return "decoding", finding, "That is a fault of this package; please report it with the pair."
    if float(runs[0][:, 0].double().mean()) < NOTHING:
        finding = "It guesses next to nothing in any reading: it was made for another target, or not trained."
        remedy = "Use the target that it was trained for, or train one for this (blockdraft fit)."
        return "target", f"{finding} {other_target}" if other_target else finding, remedy
    return None, "Decoding accepts what the drafter guesses, and no other reading guesses more.", other_target or ""


def decode(target: Target, drafter: str | Path, prompts: Sequence[str], tokens: int) -> list[Answered]:
    """Answer prompts greedily, with chains of all guesses that the drafter has."""
    encoded = [encode(prompt, target) for prompt in prompts]
    with Engine(target, load_drafter(drafter, target=target), ROWS, Drafting()) as engine:
        completions = [each.checked() for each in engine.generate(encoded, SamplingParams(max_new_tokens=tokens))]
    found = []
    for prompt, completion in zip(encoded, completions, strict=True):
        place, cycles = len(prompt), []
        for drafted, committed in zip(completion.stats.drafted, completion.stats.committed, strict=True):
            cycles.append((place, drafted, committed - 1))
            place += committed
        text = torch.tensor([*prompt, *completion.token_ids])
        found.append(Answered(text, len(prompt), tuple(cycles[:-1])))
    return found


def _survival(accepted: Sequence[int], block_size: int) -> list[float]:
    return [sum(count >= i for count in accepted) / len(accepted) for i in range(1, block_size)]
