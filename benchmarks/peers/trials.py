"""The run itself: peers in turns on the same prompts, each answer kept at once, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.peers.registry import REFERENCE
from blockdraft.engine import loops

# Told what is going on, answers so far, and answers in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Task:
    """A prompt: the set it belongs to, its place there, and its token ids."""

    prompt_set: str
    index: int
    prompt: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt_set, self.index


@dataclass(frozen=True)
class Trial:
    """One answer.

    Attributes:
        repeat: The round that it belongs to; None for the reference answers, which are not timed.
        tokens: The answer, its stop token included.
        first: How many of the tokens came with the prompt's forward.
        cycles: Steps after that one.
        prefill_seconds, decode_seconds: Until the first tokens, and from there to the last one.
    """

    peer: str
    prompt_set: str
    index: int
    repeat: int | None
    tokens: tuple[int, ...]
    first: int
    cycles: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt_set, self.index


class Journal:
    """What a run has so far: a line that says what is measured, then a line for each answer.

    Raises:
        ValueError: The file is from a run that measures something else.
    """

    def __init__(self, path: Path, measured: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.failed: dict[str, str] = {}
        header = json.loads(json.dumps(measured))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)
            return
        *complete, rest = path.read_text(encoding="utf-8").split("\n")
        if rest:  # cut off in the middle of a line
            path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
        lines = [json.loads(line) for line in complete]
        if not lines or lines[0] != header:
            changed = [key for key in header if not lines or lines[0].get(key) != header[key]]
            raise ValueError(
                f"{path} holds an unfinished run with other {', '.join(changed)}; finish it with what it began with, "
                "or add --restart to discard it."
            )
        for line in lines[1:]:
            if "failed" in line:
                self.failed[line["peer"]] = line["failed"]
            else:
                self.trials.append(Trial(**line | {"tokens": tuple(line["tokens"])}))

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._append(asdict(trial))

    def fail(self, peer: str, reason: str) -> None:
        self.failed[peer] = reason
        self._append({"peer": peer, "failed": reason})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measure(
    processes: Mapping[str, PeerProcess],
    tasks: Sequence[Task],
    repeats: int,
    request: Mapping[str, Any],
    journal: Journal,
    progress: Progress = lambda stage, done, total: None,
) -> None:
    """Decode all prompts with all peers, and keep the answers in the journal.

    The reference answers every prompt once; prompts whose answer loops are left out from there on, since such answers
    are easy to guess. Each peer warms up on one prompt at full length. Then come the rounds: in each of them the peers
    take turns prompt by prompt, and from prompt to prompt and round to round another one begins.

    Args:
        processes: By name, the reference among them.
        request: What each request holds besides the prompt: max_new_tokens and stops.

    Raises:
        PeerError: The reference fails. Where another peer fails, the journal keeps why, and the others go on.
    """
    had = {(t.peer, t.key, t.repeat) for t in journal.trials}
    done = len(had)

    def decode(peer: str, task: Task, repeat: int | None) -> Trial:
        answer = processes[peer].ask("decode", {**request, "prompt": task.prompt})
        return Trial(peer, *task.key, repeat, **answer | {"tokens": tuple(answer["tokens"])})

    def run(steps: Sequence[tuple[str, str, Task, int | None]], total: int) -> None:
        nonlocal done
        for stage, peer, task, repeat in steps:
            if peer in journal.failed or (peer, task.key, repeat) in had:
                continue
            try:
                journal.add(decode(peer, task, repeat))
            except PeerError as error:
                if peer == REFERENCE:
                    raise
                journal.fail(peer, f"failed: {error}")
            done += 1
            progress(stage, done, total)

    run([("reference", REFERENCE, task, None) for task in tasks], len(tasks) * (1 + repeats * len(processes)))
    looping = {t.key for t in journal.trials if t.repeat is None and loops(t.tokens)}
    sound = [task for task in tasks if task.key not in looping]
    rounds = list(_rounds(list(processes), sound, repeats))
    left = {peer for _, peer, task, repeat in rounds if (peer, task.key, repeat) not in had} - set(journal.failed)
    for i, peer in enumerate(sorted(left)):
        progress(f"warming up {peer}", i, len(left))
        try:
            decode(peer, sound[0], None)
        except PeerError as error:
            if peer == REFERENCE:
                raise
            journal.fail(peer, f"failed: {error}")
    run(rounds, len(tasks) + len(rounds))


def _rounds(peers: Sequence[str], tasks: Sequence[Task], repeats: int) -> Iterator[tuple[str, str, Task, int | None]]:
    for repeat in range(repeats):
        for i, task in enumerate(tasks):
            first = (repeat + i) % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                yield f"round {repeat + 1} of {repeats}", peer, task, repeat
