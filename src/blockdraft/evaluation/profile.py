"""Time of each method's cycles by their parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blockdraft.engine import Engine
from blockdraft.evaluation.methods import PLAIN
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.evaluation.settings import Settings
from blockdraft.evaluation.speed import Progress, Run, Trial
from blockdraft.machine import wait_for
from blockdraft.timing import NETWORKS, PARTS, listening
from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class Profile:
    """Profile of one method.

    Attributes:
        cycles: Number of cycles.
        seconds: Mean seconds of a cycle by its parts, in order. On a GPU each part is waited for, which makes cycles
            longer than they are without a profile.
        host: Share of the time outside of all networks, which are the target's forward, and the drafter's pass, head
            and keys and values of its context.
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
    """Decode the timed prompts once more with each method in turn, and add up the time of each part.

    Args:
        engines, sets, params, settings: As in `speed.measure`.
        trials: Trials that `speed.measure` returned.

    Returns:
        Profiles by method; empty if no prompt was timed.
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
