"""Interleaved measurement of decoding methods on the same prompts, and the time of their steps by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import TypeVar

from blockdraft.drafters import Drafter, check_place, default_drafter, entries, load_drafter
from blockdraft.engine import Completion, Engine, loops, merge
from blockdraft.errors import UsageError
from blockdraft.machine import wait_for
from blockdraft.prompt_sets import PromptSet
from blockdraft.targets import Target
from blockdraft.timing import NETWORKS, PARTS, listening
from blockdraft.types import SamplingParams
from blockdraft_bench.methods import CHAIN, PLAIN, SAMPLED, TREE, Method
from blockdraft_bench.settings import MeasureSettings

WARM_UP_TOKENS = 8

# Called with the stage, the responses decoded so far, and their total.
Progress = Callable[[str, int, int], None]
Key = TypeVar("Key")
Tokens = Sequence[int]


@dataclass(frozen=True)
class Trial:
    """One batch, decoded once by one method.

    Attributes:
        prompt_set: Name of the set.
        prompts: Indices of the batch's prompts in their set.
        repeat: Round in which it was timed; None for a batch decoded only for its tokens.
        seconds: Wall time of `Engine.generate`.
    """

    method: str
    prompt_set: str
    prompts: tuple[int, ...]
    repeat: int | None
    completions: tuple[Completion, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of the steps; each response's first token comes from the prefill instead."""
        return sum(sum(c.stats.committed) for c in self.completions)

    @property
    def decode_seconds(self) -> float:
        """Wall time without prefill."""
        return self.seconds - sum(c.stats.read_seconds for c in self.completions)

    @property
    def steps(self) -> int:
        """Steps of the batch, which are those of its longest response."""
        return max(len(c.stats.committed) for c in self.completions)


@dataclass(frozen=True)
class Figures:
    """Figures of one method.

    No method is timed on prompts whose plain response is repetitive, since such responses are easy to draft. These
    prompts count only in `prompts`, `identical` and `repetitive`.

    Attributes:
        prompts: Number of prompts.
        timed_prompts: Number of prompts whose plain response is not repetitive. If there is none, or no response has
            more than its first token, the figures of speed and acceptance are None.
        tokens_per_second: Tokens after each response's first, of all sequences of a batch, over the wall time of
            decoding without prefill. Median of the repeats.
        tokens_per_second_by_repeat: Value of each repeat.
        speedup: Tokens per second over those of plain decoding in the same repeat, so that a slow moment of the machine
            affects both. Median of the repeats.
        speedup_by_repeat: Value of each repeat.
        tau: Tokens committed per step and sequence, bonus included, over all steps of timed responses.
        acceptance_by_position: S_1, S_2, ... over the same steps.
        step_cost: R, wall time of decoding per step over that of plain decoding in the same repeat. Median of the
            repeats. With batch size 1, speedup = tau / R.
        identical: Share of prompts for which every response equals the plain one, with the same seed when sampling;
            None for sampled draft tokens in that case. For plain decoding it measures repeatability.
        repetitive: Share of prompts for which some response is repetitive, as defined by `engine.loops`.
    """

    prompts: int
    timed_prompts: int
    tokens_per_second: float | None
    tokens_per_second_by_repeat: tuple[float, ...]
    speedup: float | None
    speedup_by_repeat: tuple[float, ...]
    tau: float | None
    acceptance_by_position: tuple[float, ...]
    step_cost: float | None
    identical: float | None
    repetitive: float


@dataclass(frozen=True)
class Profile:
    """Profile of one method.

    Attributes:
        steps: Number of steps.
        seconds: Mean seconds of a step by part, in order. On a GPU each part is synchronized, so steps take longer than
            without a profile.
        host: Share of the time outside of all networks: the target's forward pass, and the drafter's pass, head and
            context.
    """

    steps: int
    seconds: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextmanager
def _naming(method: Method) -> Iterator[None]:
    """Add the method's name to errors."""
    try:
        yield
    except ValueError as error:
        unknown = method.drafter is not None and not Path(method.drafter).exists()
        hint = f" Besides drafters, the methods are {CHAIN}, {SAMPLED} and {TREE}." if unknown else ""
        raise UsageError(f"Method {method.name!r}: {error}{hint}") from error


def check_methods(methods: Sequence[Method]) -> None:
    """Raise a UsageError for an unknown method or a missing drafter, without loading a target."""
    for method in methods:
        if method.drafter is not None:
            with _naming(method):
                check_place(method.drafter)


def load_methods(
    methods: Sequence[Method], target: Target, batch_size: int, draft_vocab: str | None = None
) -> dict[str, Engine]:
    """Return the engines of the methods by name. Methods with the same drafter share it.

    Args:
        draft_vocab: As in `load_drafter`, for drafters with a network.

    Raises:
        UsageError: A method is unknown, a drafter does not load, a setting exceeds what its drafter can do, or no
            drafter has a network whose draft vocabulary could be cut.
    """
    drafters: dict[str | None, Drafter] = {}
    engines = {}
    without_network = {name for name, entry in entries().items() if entry.by_name and entry.network is None}
    for method in methods:
        with _naming(method):
            if method.drafter not in drafters:
                vocab = None if method.drafter in without_network else draft_vocab
                drafter = method.drafter or default_drafter(target.path, alone=True)
                drafters[method.drafter] = load_drafter(drafter, target=target, draft_vocab=vocab)
            engines[method.name] = Engine(target, drafters[method.drafter], batch_size, method.drafting)
    if draft_vocab is not None and drafters.keys() <= without_network:
        raise UsageError("draft_vocab is given, and no method has a drafter with a network; name one, or leave it out.")
    return engines


def measure(
    engines: Mapping[str, Engine],
    sets: Sequence[PromptSet],
    params: SamplingParams,
    settings: MeasureSettings,
    progress: Progress = lambda stage, done, total: None,
) -> list[Trial]:
    """Decode all prompts with all methods.

    Plain decoding first decodes every prompt once, untimed. These responses are the reference, and show which prompts
    have repetitive responses. Each method decodes those prompts once, untimed. After a short warm-up come the rounds.
    In each of them all methods decode each batch of the other prompts, interleaved; each round starts with another
    method.

    Args:
        engines: Engines by method, `none` among them, with `max_batch_size` of the settings.
        params: Sampling parameters of all methods and repeats; prompt i of a set uses `params.seed` + i, which must be
            set unless decoding is greedy.

    Raises:
        UsageError: The target cannot decode a prompt, which is checked before anything is decoded; or there is too
            little memory.
    """
    assert params.temperature == 0 or params.seed is not None
    run = MethodRun(engines, sets, params, settings)
    run.check()
    count = sum(len(prompt_set.prompts) for prompt_set in sets)
    done, total = 0, count * (1 + len(engines) * settings.repeats)
    everything = {prompt_set.name: list(range(len(prompt_set.prompts))) for prompt_set in sets}
    trials: list[Trial] = []

    def decode(stage: str, method: str, prompt_set: str, prompts: tuple[int, ...], repeat: int | None) -> None:
        nonlocal done
        trials.append(run.trial(method, prompt_set, prompts, repeat))
        done += len(prompts)
        progress(stage, done, total)

    progress("reference", 0, total)
    for prompt_set, prompts in run.batches(everything):
        decode("reference", PLAIN, prompt_set, prompts, None)
    answers = {(t.prompt_set, i): c for t in trials for i, c in zip(t.prompts, t.completions, strict=True)}
    repetitive: dict[str, list[int]] = {prompt_set.name: [] for prompt_set in sets}
    sound: dict[str, list[int]] = {prompt_set.name: [] for prompt_set in sets}
    for (name, i), completion in answers.items():
        (repetitive if loops(completion.token_ids) else sound)[name].append(i)

    names = list(engines)
    timed = sum(map(len, sound.values()))
    total = count + (count - timed) * (len(names) - 1) + timed * len(names) * settings.repeats
    for prompt_set, prompts in run.batches(repetitive):
        for method in names:
            if method != PLAIN:
                decode("repetitive outputs", method, prompt_set, prompts, None)
    run.warm_up()
    for repeat in range(settings.repeats):
        first = repeat % len(names)
        for prompt_set, prompts in run.batches(sound):
            for method in names[first:] + names[:first]:
                decode(f"round {repeat + 1} of {settings.repeats}", method, prompt_set, prompts, repeat)
    return trials


class MethodRun:
    """Decodes batches of prompts; arguments as in `measure`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        sets: Sequence[PromptSet],
        params: SamplingParams,
        settings: MeasureSettings,
    ) -> None:
        self.engines = engines
        self.prompts = {prompt_set.name: prompt_set.prompts for prompt_set in sets}
        self.params = params
        self.batch_size = settings.batch_size

    def check(self) -> None:
        for name, prompts in self.prompts.items():
            for i, prompt in enumerate(prompts):
                try:
                    self.engines[PLAIN].stream(prompt, self._params(i))  # checks the prompt, and decodes when read
                except ValueError as error:
                    raise UsageError(f"Prompt {i + 1} of {name}: {error}") from error

    def warm_up(self) -> None:
        short = replace(self.params, max_new_tokens=min(WARM_UP_TOKENS, self.params.max_new_tokens))
        first = next(iter(self.prompts.values()))[: self.batch_size]
        for engine in self.engines.values():
            engine.generate(first, short)

    def batches(self, chosen: Mapping[str, list[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield batches of one set each, as name of the set and indices of prompts."""
        for name, indices in chosen.items():
            for start in range(0, len(indices), self.batch_size):
                yield name, tuple(indices[start : start + self.batch_size])

    def trial(self, method: str, prompt_set: str, prompts: tuple[int, ...], repeat: int | None) -> Trial:
        texts = [self.prompts[prompt_set][i] for i in prompts]
        params = [self._params(i) for i in prompts]
        began = time.perf_counter()
        completions = [completion.checked() for completion in self.engines[method].generate(texts, params)]
        seconds = time.perf_counter() - began
        return Trial(method, prompt_set, prompts, repeat, tuple(completions), seconds)

    def _params(self, i: int) -> SamplingParams:
        return self.params if self.params.seed is None else replace(self.params, seed=self.params.seed + i)


def profiles(
    engines: Mapping[str, Engine],
    sets: Sequence[PromptSet],
    params: SamplingParams,
    settings: MeasureSettings,
    trials: Sequence[Trial],
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Profile]:
    """Decode the timed prompts once more with each method, interleaved, and sum the time of each part.

    Args:
        engines, sets, params, settings: As in `measure`.
        trials: Trials that `measure` returned.

    Returns:
        Profiles by method; empty if no prompt was timed.
    """
    run = MethodRun(engines, sets, params, settings)
    batches = [(t.prompt_set, t.prompts) for t in trials if t.method == PLAIN and t.repeat == 0]
    done, total = 0, sum(len(prompts) for _, prompts in batches) * len(engines)
    seconds: dict[str, dict[str, float]] = {method: dict.fromkeys(PARTS, 0.0) for method in engines}
    steps: dict[str, int] = defaultdict(int)
    for prompt_set, prompts in batches:
        for method, engine in engines.items():
            with listening(partial(wait_for, engine.target.device)) as heard:
                steps[method] += run.trial(method, prompt_set, prompts, None).steps
            for part, spent in heard.items():
                seconds[method][part] += spent
            done += len(prompts)
            progress("profile", done, total)
    return {
        method: Profile(count, {part: spent / count for part, spent in parts.items()}, host_share(parts))
        for method, parts in seconds.items()
        if (count := steps[method])
    }


def host_share(seconds: Mapping[str, float]) -> float:
    """Return the share of a step's time outside of all networks."""
    return sum(spent for part, spent in seconds.items() if part not in NETWORKS) / sum(seconds.values())


def figures(trials: Sequence[Trial], incomparable: Collection[str] = ()) -> dict[str, Figures]:
    """Compute the figures of each method from trials of all sets or one. `none` must be among the methods.

    Args:
        incomparable: Methods whose tokens need not equal those of plain decoding, but only follow their distribution.
    """
    by_method: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_method[trial.method].append(trial)
    plain = by_method[PLAIN]
    reference = {key: tokens[0] for key, tokens in _answers([t for t in plain if t.repeat is None]).items()}
    plain_repeats = _repeats(plain) if any(t.tokens for t in plain if t.repeat is not None) else []
    plain_rates, plain_steps = _tokens_per_second(plain_repeats), _step_seconds(plain_repeats)
    by_name = {}
    for method, own in by_method.items():
        answers, repeats = _answers(own), _repeats(own) if plain_repeats else []
        rates, steps = _tokens_per_second(repeats), _step_seconds(repeats)
        speedups = tuple(map(truediv, rates, plain_rates))
        stats = merge(c.stats for repeat in repeats for t in repeat for c in t.completions)
        by_name[method] = Figures(
            prompts=len(answers),
            timed_prompts=len({(t.prompt_set, i) for t in own if t.repeat is not None for i in t.prompts}),
            tokens_per_second=_median(rates),
            tokens_per_second_by_repeat=rates,
            speedup=_median(speedups),
            speedup_by_repeat=speedups,
            tau=stats.tau if repeats else None,
            acceptance_by_position=tuple(stats.acceptance_by_position),
            step_cost=_median(list(map(truediv, steps, plain_steps))),
            identical=None if method in incomparable else identical_share(answers, reference),
            repetitive=repetitive_share(answers),
        )
    return by_name


def identical_share(answers: Mapping[Key, Sequence[Tokens]], reference: Mapping[Key, Tokens]) -> float:
    """Return the share of prompts for which every response equals the reference, token by token."""
    same = [all(list(tokens) == list(reference[key]) for tokens in responses) for key, responses in answers.items()]
    return sum(same) / len(same)


def repetitive_share(answers: Mapping[Key, Sequence[Tokens]]) -> float:
    """Return the share of prompts for which a response is repetitive."""
    return sum(any(map(loops, responses)) for responses in answers.values()) / len(answers)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _answers(trials: Sequence[Trial]) -> dict[tuple[str, int], list[list[int]]]:
    """Return the token ids of all responses to each prompt, by set and index."""
    answers = defaultdict(list)
    for trial in trials:
        for i, completion in zip(trial.prompts, trial.completions, strict=True):
            answers[trial.prompt_set, i].append(completion.token_ids)
    return answers


def _repeats(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return the timed trials of each repeat."""
    repeats: dict[int, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.repeat is not None:
            repeats[trial.repeat].append(trial)
    return [repeats[repeat] for repeat in sorted(repeats)]


def _tokens_per_second(repeats: list[list[Trial]]) -> tuple[float, ...]:
    return tuple(sum(t.tokens for t in repeat) / sum(t.decode_seconds for t in repeat) for repeat in repeats)


def _step_seconds(repeats: list[list[Trial]]) -> tuple[float, ...]:
    """Return the seconds per step of each repeat, or nothing if a method took no step, as with wrong outputs."""
    totals = [(sum(t.decode_seconds for t in repeat), sum(t.steps for t in repeat)) for repeat in repeats]
    return tuple(seconds / steps for seconds, steps in totals) if all(steps for _, steps in totals) else ()
