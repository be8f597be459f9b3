"""Peers interleaved on the same prompts, each answer kept at once, and figures from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

from benchmarks.harness import interleaving
from benchmarks.harness.process import PeerError, Processes, Progress
from benchmarks.harness.records import Records
from benchmarks.peers.registry import PLAIN, REFERENCE

from blockdraft.engine import loops

MANY = "decode_many"  # a request with several prompts
UNTIMED = -1  # instead of a repeat: reference answers, whose tokens are the right ones

# Given a context (token ids) and two tokens: the target's logit of the first less that of the second.
Margin = Callable[[Sequence[int], int, int], float]


@dataclass(frozen=True)
class Task:
    """A prompt: its set, its place there, and its token ids."""

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
        repeat: Round that it belongs to, or `UNTIMED`.
        answer: Token ids with spaces between, the stop token included.
        first: Number of tokens that came with the prompt's forward.
        steps: Steps after that one.
        prefill_seconds, decode_seconds: Until the first tokens, and from there to the last one.
    """

    KEY = ("peer", "prompt_set", "index", "repeat")

    peer: str
    prompt_set: str
    index: int
    repeat: int
    answer: str
    first: int
    steps: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt_set, self.index

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.answer.split()]

    @property
    def later_tokens(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Process:
    """What a peer's process took: until it could answer, and of memory when it had answered all prompts, one by one."""

    KEY = ("peer",)

    peer: str
    start_seconds: float
    peak_bytes: int


def measure(
    processes: Processes,
    peers: Sequence[str],
    tasks: Sequence[Task],
    repeats: int,
    request: Mapping[str, Any],
    trials: Records[Trial],
    progress: Progress = lambda stage, done, total: None,
    reference: str = REFERENCE,
) -> None:
    """Decode all prompts with all peers, and keep the answers.

    The reference answers every prompt once. Prompts with a repetitive output are left out from there on, since such
    outputs are easy to predict. The peers are then interleaved prompt by prompt; another one begins in each repeat.

    Args:
        processes: By name of the peer, the reference among them.
        request: Fields of each request besides the prompt: max_new_tokens and stops.

    Raises:
        PeerError: The reference fails.
    """

    def keep(repeat: int, task: Task, peer: str, answer: dict[str, Any]) -> None:
        values = {name: value for name, value in answer.items() if name != "tokens"}
        trials.add(Trial(peer, *task.key, repeat, " ".join(map(str, answer["tokens"])), **values))

    def decode(steps: Sequence[tuple[int, Task, str]]) -> None:
        left = [step for step in steps if (step[2], *step[1].key, step[0]) not in trials.had]
        processes.decode(left, lambda task, _: {**request, "prompt": task.prompt}, keep, progress)
        if reference in processes.missing:
            raise PeerError(processes.missing[reference])

    decode([(UNTIMED, task, reference) for task in tasks])
    repetitive = {trial.key for trial in trials.all if trial.repeat == UNTIMED and loops(trial.tokens)}
    decode(list(interleaving.interleaved([task for task in tasks if task.key not in repetitive], peers, repeats)))


@dataclass(frozen=True)
class Burst:
    """Answers to several prompts that one peer was asked at once.

    Attributes:
        tokens: Of all answers.
        seconds: Until the last of them, reading the prompts included.
    """

    KEY = ("peer", "repeat")

    peer: str
    repeat: int
    tokens: int
    seconds: float


def measure_at_once(
    processes: Processes,
    peers: Sequence[str],
    tasks: Sequence[Task],
    count: int,
    repeats: int,
    request: Mapping[str, Any],
    bursts: Records[Burst],
) -> None:
    """Ask each peer that can several prompts at once, interleaved. The first burst of each warms it up."""
    prompts = [task.prompt for task, _ in zip(cycle(tasks), range(count))]
    for repeat in range(UNTIMED, repeats):
        for peer in peers:
            if (peer, repeat) in bursts.had or MANY not in processes.running[peer].answers:
                continue
            if answer := processes.ask(peer, MANY, {**request, "prompts": prompts}):
                bursts.add(Burst(peer, repeat, answer["tokens"], answer["seconds"]))


def rates_at_once(bursts: Sequence[Burst]) -> dict[str, float]:
    """Return the tokens per second of each peer, the median of the repeats."""
    timed = interleaving.groups([burst for burst in bursts if burst.repeat != UNTIMED], lambda burst: burst.peer)
    return {peer: median(burst.tokens / burst.seconds for burst in own) for peer, own in timed.items()}


@dataclass(frozen=True)
class Figures:
    """Figures of one peer on one set of prompts.

    Attributes:
        prompts: Prompts timed.
        tokens_per_second: Tokens after those that came with the prompt, over the time from there to the last; the
            median of the repeats.
        tokens_per_second_by_repeat: Of each repeat.
        over_reference, over_plain: Ratios of tokens per second to the reference and to our plain decoding in the same
            repeat; the median of the repeats. None where that one is missing.
        tau: Tokens per step.
        first_token_seconds: From the question to the first tokens; the median of all answers.
        seconds_per_answer: Mean of prefill and decoding together; the median of the repeats.
        same: Share of the prompts of which every answer equals the reference's.
    """

    prompts: int
    tokens_per_second: float
    tokens_per_second_by_repeat: tuple[float, ...]
    over_reference: float | None
    over_plain: float | None
    tau: float
    first_token_seconds: float
    seconds_per_answer: float
    same: float


def figures(trials: Sequence[Trial], reference: str = REFERENCE) -> dict[str, Figures]:
    """Return the figures of each peer with a complete repeat, for one set of prompts."""
    right = {trial.key: trial.tokens for trial in trials if trial.repeat == UNTIMED}
    timed = [trial for trial in trials if trial.repeat != UNTIMED]
    prompts = len({trial.key for trial in timed})
    by_peer = interleaving.groups(timed, lambda trial: trial.peer)
    rates = {peer: interleaving.rates(own, prompts) for peer, own in by_peer.items()}
    found = {}
    for peer, own in rates.items():
        if not own:
            continue
        answers = [trial for trial in by_peer[peer] if trial.repeat in own]
        repeats = interleaving.groups(answers, lambda trial: trial.repeat).values()
        different = {trial.key for trial in answers if trial.tokens != right[trial.key]}
        found[peer] = Figures(
            prompts=prompts,
            tokens_per_second=median(own.values()),
            tokens_per_second_by_repeat=tuple(own.values()),
            over_reference=interleaving.median(interleaving.ratios(own, rates.get(reference, {}))),
            over_plain=interleaving.median(interleaving.ratios(own, rates.get(PLAIN, {}))),
            tau=interleaving.tau(answers),
            first_token_seconds=median(answer.prefill_seconds for answer in answers),
            seconds_per_answer=median(sum(t.prefill_seconds + t.decode_seconds for t in r) / prompts for r in repeats),
            same=1 - len(different) / prompts,
        )
    return found


@dataclass(frozen=True)
class Difference:
    """First place where an answer differs from the reference.

    Attributes:
        place: Of the first token that differs, from 1 on.
        expected, found: The tokens there; None where an answer has ended.
        margin: The target's logit of `expected` over that of `found`, in float32 from the same weights; None where one
            of them, or the means to tell, is missing.
    """

    peer: str
    prompt_set: str
    index: int
    place: int
    expected: int | None
    found: int | None
    margin: float | None


def differences(trials: Sequence[Trial], tasks: Sequence[Task], margin: Margin | None) -> list[Difference]:
    """Return the first difference of each peer on each prompt that has one."""
    prompts = {task.key: task.prompt for task in tasks}
    reference = {trial.key: trial.tokens for trial in trials if trial.repeat == UNTIMED}
    found: dict[tuple[str, tuple[str, int]], Difference] = {}
    for trial in trials:
        expected, own = reference[trial.key], trial.tokens
        if own == expected or (trial.peer, trial.key) in found:
            continue
        pairs = enumerate(zip(expected, own, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(own)))
        one, other = (tokens[place] if place < len(tokens) else None for tokens in (expected, own))
        known = margin is not None and one is not None and other is not None
        by = margin([*prompts[trial.key], *expected[:place]], one, other) if known else None
        found[trial.peer, trial.key] = Difference(trial.peer, *trial.key, place + 1, one, other, by)
    return list(found.values())
