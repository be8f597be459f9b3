"""Where the time of each method's cycles goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blockdraft.engine import Engine
from blockdraft.evaluation.methods import PLAIN, Settings
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.evaluation.speed import Progress, Run, Trial
from blockdraft.machine import wait_for
from blockdraft.timing import NETWORKS, PARTS, listening
from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class Profile:
    """The cycles of one method.

    Attributes:
        cycles: Their number.
        seconds: Of a cycle, by its parts in order, as a mean. Where there is a GPU each part is waited for, so that
            cycles take longer than when nobody looks.
        host: Share of the time that is in no network: not in the target's forward, and not in the drafter's pass, its
            head and the keys and values of its context.
    """

    cycles: int
    seconds: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def profiles(
    engines: Mapping[str, Engine],
    sets: Sequence[PromptSet],
    params: SamplingParams,
    settings: Settings,
    trials: Sequence[Trial],
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Profile]:
    """Decode the prompts that were timed once more with each method in turn, and listen.

    Args:
        engines, sets, params, settings: As in `speed.measure`.
        trials: What that measured.

    Returns:
        By method; empty where no prompt was timed.
    """
    run = Run(engines, sets, params, settings)
    batches = [(t.prompt_set, t.prompts) for t in trials if t.method == PLAIN and t.repeat == 0]
    done, total = 0, sum(len(prompts) for _, prompts in batches) * len(engines)
    seconds: dict[str, dict[str, float]] = {method: dict.fromkeys(PARTS, 0.0) for method in engines}
    cycles: dict[str, int] = defaultdict(int)
    for prompt_set, prompts in batches:
        for method, engine in engines.items():
            with listening(partial(wait_for, engine.target.device)) as heard:
                cycles[method] += run.trial(method, prompt_set, prompts, None).cycles
            for part, spent in heard.items():
                seconds[method][part] += spent
            done += len(prompts)
            progress("profile", done, total)
    return {
        method: Profile(count, {part: spent / count for part, spent in parts.items()}, host_share(parts))
        for method, parts in seconds.items()
        if (count := cycles[method])
    }


def host_share(seconds: Mapping[str, float]) -> float:
    return sum(spent for part, spent in seconds.items() if part not in NETWORKS) / sum(seconds.values())
