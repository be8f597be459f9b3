"""What comes out of the answers: speeds, ratios, and whether the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.registry import PLAIN, REFERENCE
from benchmarks.peers.trials import Task, Trial

# Of a context (token ids) and two tokens: by how much the target's logit of the one exceeds that of the other.
Margin = Callable[[Sequence[int], int, int], float]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference.

    Attributes:
        place: Of the first token that differs, from 1 on.
        expected, found: The tokens there; None where an answer has ended.
        margin: The target's logit of `expected` over that of `found`, in float32 from the same weights; None where one
            of them is missing.
    """

    peer: str
    prompt_set: str
    index: int
    place: int
    expected: int | None
    found: int | None
    margin: float | None


@dataclass(frozen=True)
class Figures:
    """What one peer did on one set of prompts.

    Attributes:
        prompts: Prompts timed.
        tokens_per_second: Tokens after those that came with the prompt, over the time from there to the last; the
            median of the repeats.
        tokens_per_second_by_repeat: Of each repeat.
        over_reference, over_plain: Ratios of tokens per second to transformers' `generate` and to our plain decoding in
            the same repeat; the median of the repeats. None where that one is missing.
        tau: Tokens per cycle.
        seconds_per_answer: Mean of prefill and decoding together; the median of the repeats.
        same: Share of the prompts of which every answer equals the reference's.
    """

    prompts: int
    tokens_per_second: float
    tokens_per_second_by_repeat: tuple[float, ...]
    over_reference: float | None
    over_plain: float | None
    tau: float
    seconds_per_answer: float
    same: float


def figures(trials: Sequence[Trial]) -> dict[str, Figures]:
    """The figures of each peer with a complete repeat, over these trials: those of one set of prompts."""
    reference = {t.key: t.tokens for t in trials if t.repeat is None}
    timed = [t for t in trials if t.repeat is not None]
    most = len({t.key for t in timed})
    repeats: dict[str, dict[int, list[Trial]]] = {}
    for trial in timed:
        repeats.setdefault(trial.peer, {}).setdefault(trial.repeat or 0, []).append(trial)
    complete = {
        peer: {number: each for number, each in own.items() if len(each) == most} for peer, own in repeats.items()
    }
    rates = {
        peer: {number: rate for number, each in own.items() if (rate := _rate(each)) is not None}
        for peer, own in complete.items()
    }
    found = {}
    for peer, own in complete.items():
        if not rates[peer]:
            continue
        answers = [t for each in own.values() for t in each]
        different = {t.key for t in answers if t.tokens != reference[t.key]}
        seconds = [sum(t.prefill_seconds + t.decode_seconds for t in each) / most for each in own.values()]
        found[peer] = Figures(
            prompts=most,
            tokens_per_second=median(rates[peer].values()),
            tokens_per_second_by_repeat=tuple(rates[peer].values()),
            over_reference=_ratio(rates[peer], rates.get(REFERENCE, {})),
            over_plain=_ratio(rates[peer], rates.get(PLAIN, {})),
            tau=sum(len(t.tokens) - t.first for t in answers) / sum(t.cycles for t in answers),
            seconds_per_answer=median(seconds),
            same=1 - len(different) / most,
        )
    return found


def _rate(trials: Sequence[Trial]) -> float | None:
    """Tokens per second; None where no answer goes beyond its first tokens."""
    seconds = sum(t.decode_seconds for t in trials)
    return sum(len(t.tokens) - t.first for t in trials) / seconds if seconds else None


def _ratio(rates: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    """A machine that is slower for a while slows both, so that repeats are compared one by one."""
    shared = [rates[number] / others[number] for number in rates if number in others]
    return median(shared) if shared else None


def differences(trials: Sequence[Trial], tasks: Sequence[Task], margin: Margin) -> list[Difference]:
    """The first difference of each peer on each prompt where it has one."""
    prompts = {task.key: task.prompt for task in tasks}
    reference = {t.key: t.tokens for t in trials if t.repeat is None}
    found: dict[tuple[str, tuple[str, int]], Difference] = {}
    for trial in trials:
        expected, own = reference[trial.key], trial.tokens
        if own == expected or (trial.peer, trial.key) in found:
            continue
        pairs = enumerate(zip(expected, own, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(own)))
        one = expected[place] if place < len(expected) else None
        other = own[place] if place < len(own) else None
        by = None
        if one is not None and other is not None:
            by = margin([*prompts[trial.key], *expected[:place]], one, other)
        found[trial.peer, trial.key] = Difference(trial.peer, *trial.key, place + 1, one, other, by)
    return list(found.values())
