"""Tasks of a size, who decodes them, and the record of every answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from benchmarks.harness.command import tell
from benchmarks.harness.process import PeerProcess, Processes
from benchmarks.harness.records import Records
from benchmarks.sizes.pairs import acceptance
from benchmarks.sizes.ways import PLAIN, Way

ANSWERS = "answers"
MAX_DRAFT_TOKENS = 15
GOLDEN = (5**0.5 - 1) / 2  # its multiples are evenly spread modulo 1
FORCED_STEPS = 500  # period of the counts of right draft tokens


@dataclass(frozen=True)
class Task:
    """A prompt.

    Attributes:
        kind: `ANSWERS`, "first" (how long the first token takes) or "context" (speed behind a long prompt).
        accept: Where draft tokens are replaced, how many are right in each step.
    """

    kind: str
    index: int
    prompt: tuple[int, ...]
    new_tokens: int
    accept: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the set that it belongs to."""
        return self.kind if self.kind == ANSWERS else f"{self.kind} {len(self.prompt)}"

    def takes(self, way: Way) -> bool:
        """Return whether a method decodes it. Replaced draft tokens and long contexts need fixed chains."""
        if self.kind == "first":
            return way.method in (PLAIN, "chain:3")
        fixed = way.method == PLAIN or (way.method.startswith("chain:") and way.method != "chain:auto")
        return fixed or (self.kind == ANSWERS and not self.accept)


@dataclass(frozen=True)
class Run:
    """One answer.

    Attributes:
        forced: 1 where draft tokens were replaced.
        peak_bytes: Most memory of the process until then.
        answer: Token ids with spaces between.
    """

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
    steps: int
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int
    answer: str

    @property
    def way(self) -> Way:
        return Way(self.side, self.kind, self.method, self.drafter)

    @property
    def later_tokens(self) -> int:
        return self.new_tokens - 1


def tasks(
    size: str, prompts: Sequence[Sequence[int]], new_tokens: int, first: Sequence[int], contexts: Sequence[int]
) -> list[Task]:
    """Return the tasks of a size: the prompts, and one prompt of each of these lengths, made from them."""
    words = [token for prompt in prompts for token in prompt]

    def sized(length: int) -> tuple[int, ...]:
        return tuple((words * (length // len(words) + 1))[-length:])

    def forced(length: int) -> tuple[int, ...]:
        acceptance_prob = acceptance(size, length + new_tokens)
        return () if acceptance_prob is None else right_draft_tokens(acceptance_prob)

    found = [Task(ANSWERS, i, tuple(each), new_tokens, forced(len(each))) for i, each in enumerate(prompts)]
    found += [Task("first", 0, sized(length), 1) for length in first]
    return found + [Task("context", 0, sized(length), new_tokens, forced(length)) for length in contexts]


def right_draft_tokens(acceptance_prob: float) -> tuple[int, ...]:
    """Return how many draft tokens are right in each step, if each is right with this probability given those before.

    The shares of the counts are near those of chance in any stretch, so that short answers have the right tau, too.
    """
    evenly = ((i + 1) * GOLDEN % 1 for i in range(FORCED_STEPS))
    return tuple(min(int(log(place) / log(acceptance_prob)), MAX_DRAFT_TOKENS) for place in evenly)


def measure(
    size: str,
    parameters: int,
    left: Sequence[tuple[int, Task, Way]],
    start: Callable[[Way], PeerProcess],
    stops: Sequence[int],
    runs: Records[Run],
) -> dict[Way, str]:
    """Do the steps that are left, and keep the answers.

    Args:
        start: Loads the models of `Way.process`.

    Returns:
        Why processes are missing or have failed; the others go on.
    """

    def request(task: Task, way: Way) -> dict[str, Any]:
        asked = {"prompt": task.prompt, "max_new_tokens": task.new_tokens, "stops": [] if task.accept else stops}
        return asked | {"way": way.method, "accept": task.accept}

    def keep(repeat: int, task: Task, way: Way, answer: dict[str, Any]) -> None:
        runs.add(
            Run(
                size=size,
                parameters=parameters,
                **vars(way),
                set=task.name,
                prompt=task.index,
                repeat=repeat,
                forced=int(bool(task.accept)),
                new_tokens=len(answer["tokens"]),
                **{name: answer[name] for name in ("steps", "prefill_seconds", "decode_seconds")},
                peak_bytes=processes.running[way.process].peak_bytes(),
                answer=" ".join(map(str, answer["tokens"])),
            )
        )

    def progress(stage: str, done: int, total: int) -> None:
        if stage != "answers" or done % 20 == 0 or done == total:
            tell(f"size {size}, {stage}: {done} of {total}")

    with Processes(start) as processes:
        processes.decode(left, request, keep, progress, key=lambda way: way.process)
    return processes.missing
