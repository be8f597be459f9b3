"""Measuring: what is decoded, in turns, and every answer kept at once as a line of a CSV file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.harness.records import Records
from benchmarks.sizes.pairs import acceptance
from benchmarks.sizes.ways import PLAIN, Way

ANSWERS = "answers"
MOST_GUESSES = 15
GOLDEN = (5**0.5 - 1) / 2  # its multiples lie evenly between whole numbers
FORCED_CYCLES = 500  # after so many the counts of right guesses begin anew


@dataclass(frozen=True)
class Task:
    """A prompt.

    Attributes:
        kind: `ANSWERS`, "first" (how long the first token takes) or "context" (speed behind a long prompt).
        accept: Where guesses are replaced, how many are right in each cycle.
    """

    kind: str
    index: int
    prompt: tuple[int, ...]
    new_tokens: int
    accept: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Of the set that it belongs to."""
        return self.kind if self.kind == ANSWERS else f"{self.kind} {len(self.prompt)}"

    def takes(self, way: Way) -> bool:
        """Whether a way decodes it: replaced guesses form chains of a fixed length, and so do those behind contexts."""
        if self.kind == "first":
            return way.method in (PLAIN, "chain:3")
        fixed = way.method == PLAIN or (way.method.startswith("chain:") and way.method != "chain:auto")
        return fixed or (self.kind == ANSWERS and not self.accept)


@dataclass(frozen=True)
class Run:
    """One answer. `forced` is 1 where guesses were replaced; `peak_bytes` is of the process until then."""

    KEY = ("size", "side", "kind", "method", "drafter", "set", "prompt", "repeat")

    size: str
    parameters: int
    side: str
    kind: str
    method: str
    drafter: str
    set: str
    prompt: int
    repeat: int
    forced: int
    new_tokens: int
    cycles: int
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int
    answer: str  # token ids

    @property
    def way(self) -> Way:
        return Way(self.side, self.kind, self.method, self.drafter)


class Runs(Records[Run]):
    """All answers so far, in a CSV file."""

    def __init__(self, path: Path) -> None:
        super().__init__(Run, path)


def tasks(
    size: str, prompts: Sequence[Sequence[int]], new_tokens: int, first: Sequence[int], contexts: Sequence[int]
) -> list[Task]:
    """What is decoded at a size: the prompts, and one of each of these lengths, made of them all."""
    words = [token for prompt in prompts for token in prompt]

    def sized(length: int) -> tuple[int, ...]:
        return tuple((words * (length // len(words) + 1))[-length:])

    def forced(length: int) -> tuple[int, ...]:
        chance = acceptance(size, length + new_tokens)
        return () if chance is None else right_guesses(chance)

    found = [Task(ANSWERS, i, tuple(each), new_tokens, forced(len(each))) for i, each in enumerate(prompts)]
    found += [Task("first", 0, sized(length), 1) for length in first]
    return found + [Task("context", 0, sized(length), new_tokens, forced(length)) for length in contexts]


def right_guesses(chance: float) -> tuple[int, ...]:
    """How many guesses are right in each cycle, if each is so with this chance as long as those before it are.

    The shares of the counts are near those of chance in any stretch, so that short answers have the right tau, too.
    """
    evenly = ((i + 1) * GOLDEN % 1 for i in range(FORCED_CYCLES))
    return tuple(min(int(log(place) / log(chance)), MOST_GUESSES) for place in evenly)


def steps(found: Sequence[Task], ways: Sequence[Way], repeats: int) -> Iterable[tuple[Task, Way, int]]:
    """In turns: in each repeat, and with each prompt, another way begins."""
    for repeat in range(repeats):
        for i, task in enumerate(found):
            own = [way for way in ways if task.takes(way)]
            begin = (repeat + i) % len(own) if own else 0
            for way in (*own[begin:], *own[:begin]):
                yield task, way, repeat


def measure(
    size: str,
    parameters: int,
    left: Sequence[tuple[Task, Way, int]],
    start: Callable[[Way], PeerProcess],
    stops: Sequence[int],
    runs: Runs,
) -> dict[Way, str]:
    """Decode what is left, and keep the answers.

    Args:
        start: Loads the models of `Way.process`.

    Returns:
        Why a process could not be had, or failed, where one did; the others go on.
    """
    missing: dict[Way, str] = {}
    running: dict[Way, PeerProcess] = {}

    def ask(task: Task, way: Way) -> dict[str, object]:
        request = {"prompt": task.prompt, "max_new_tokens": task.new_tokens, "stops": [] if task.accept else stops}
        return running[way.process].ask("decode", request | {"way": way.method, "accept": task.accept})

    try:
        for way in dict.fromkeys(way for _, way, _ in left):
            try:
                if way.process not in running and way.process not in missing:
                    print(f"size {size}: loading {way.side} {way.kind} {way.process.name}", file=sys.stderr, flush=True)
                    running[way.process] = start(way.process)
                if way.process in running:  # a first answer warms up
                    ask(next(task for task, other, _ in left if other == way), way)
            except PeerError as error:
                missing[way.process] = str(error)
        for done, (task, way, repeat) in enumerate(left):
            if way.process in missing:
                continue
            try:
                answer = ask(task, way)
            except PeerError as error:
                missing[way.process] = str(error)
                continue
            runs.add(_run(size, parameters, task, way, repeat, answer, running[way.process].peak_bytes()))
            if (done + 1) % 20 == 0 or done + 1 == len(left):
                print(f"size {size}: {done + 1} of {len(left)} answers", file=sys.stderr, flush=True)
    finally:
        for process in running.values():
            process.close()
    return missing


def _run(size: str, parameters: int, task: Task, way: Way, repeat: int, answer: Mapping[str, object], peak: int) -> Run:
    tokens = answer["tokens"]
    assert isinstance(tokens, list)
    numbers = {name: answer[name] for name in ("cycles", "prefill_seconds", "decode_seconds")}
    return Run(
        size,
        parameters,
        way.side,
        way.kind,
        way.method,
        way.drafter,
        task.name,
        task.index,
        repeat,
        int(bool(task.accept)),
        len(tokens),
        peak_bytes=peak,
        answer=" ".join(map(str, tokens)),
        **numbers,  # type: ignore[arg-type]
    )
