"""What the survey of a fit measures, and what the planner makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.errors import counted
from blockdraft.types import Quantize
from blockdraft_train.data.hidden_states import size
from blockdraft_train.data.settings import DataSettings


@dataclass(frozen=True)
class TargetFacts:
    """Properties of the target.

    Attributes:
        context: Maximum sequence length in tokens.
        chats: Whether it has a chat template.
        weight_bytes: Size of the loaded weights.
        running: Backend and kernels, in words.
        device: "cpu", "cuda" or "mps".
        best_block_size: As in `Target`.
        inner_size: Inner size of the layers' MLP; 0 is unknown.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    chats: bool
    weight_bytes: int
    running: str
    device: str = "cpu"
    best_block_size: int | None = None
    inner_size: int = 0


@dataclass(frozen=True)
class FitMachine:
    """Properties of the machine: cores, and free bytes of main memory, device memory and disk."""

    cpus: int
    memory: int
    device_memory: int
    disk: int


@dataclass(frozen=True)
class Speeds:
    """Speeds of a drafter of one variant, in the shape that `reference` gives it.

    Attributes:
        tokens, seconds: Two sizes of training steps, in tokens, and their durations.
        step_costs: Duration of a drafted decoding step over that of a plain one, by block size.
        parameters: Number of the drafter's parameters.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    step_costs: Mapping[int, float]
    parameters: int

    def step(self, tokens: int) -> float:
        """Return the seconds of a training step: a fixed part and one in proportion to the tokens."""
        slope = (self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0])
        slope = max(slope, 0.5 * self.seconds[-1] / self.tokens[-1])  # two similar times do not give a slope
        return max(self.seconds[-1] + slope * (tokens - self.tokens[-1]), 0.2 * self.seconds[0])


@dataclass(frozen=True)
class TargetMeasurements:
    """Measurements of the target on the machine.

    Attributes:
        prompt_tokens, answer_tokens: Mean lengths of a prompt and of a response.
        long_document: Length of a prompt with its response that few exceed.
        repetitive: Share of greedy responses that are repetitive.
        answer_rate: Tokens/s of responses, `batch_size` at a time, without repetitions.
        plain_seconds: Seconds per token of one response alone, without a drafter.
        read_rate: Tokens/s of hidden states.
        speeds: Speeds by variant.
        batch_size: Number of responses at a time that is fastest.
        quantize: How the target is quantized to write responses faster; None is not at all.
    """

    prompt_tokens: float
    long_document: int
    answer_tokens: float
    repetitive: float
    answer_rate: float
    plain_seconds: float
    read_rate: float
    speeds: Mapping[str, Speeds]
    batch_size: int = DataSettings.batch_size
    quantize: Quantize | None = None


@dataclass(frozen=True)
class FitPlan:
    """Plan of a fit. It fixes all numbers, so that an interrupted fit ends like any other.

    Attributes:
        recipe: Fields of the variant's recipe.
        answers, held_out: Number of prompts that the target answers, and of those that are kept apart.
        hidden_states: Where hidden states are kept: "memory", "disk", or None, which runs the target in each training
            step.
        seconds: Expected duration of each step, in the order of the steps.
        disk, memory: Approximate need in bytes.
        reasons: Reasons for the choices, a sentence each.
        batch_size: Number of responses written at the same time.
        quantize: How the target that writes the responses is quantized; None is not at all.
        stored_target_layers: Layers whose outputs are stored on disk; empty for the target layers of the recipe.
    """

    variant: str
    recipe: dict[str, Any]
    answers: int
    held_out: int
    max_new_tokens: int
    temperature: float
    hidden_states: str | None
    bench_prompts: int
    bench_tokens: int
    seconds: dict[str, float]
    disk: int
    memory: int
    reasons: tuple[str, ...]
    batch_size: int = DataSettings.batch_size
    quantize: Quantize | None = None
    stored_target_layers: tuple[int, ...] = ()


KEPT_STATES = {
    None: "computed anew in every step",
    "memory": "computed once, kept in memory",
    "disk": "computed once, kept on disk",
}


def show(plan: FitPlan, target: TargetFacts, machine: FitMachine, sources: Sequence[str], hours: float) -> list[str]:
    """Return the plan as lines of text."""
    recipe, template = plan.recipe, "with" if target.chats else "without"
    own = "the target writes them itself; name some of your own with --data"
    return [
        f"target: {counted(target.layers, 'layer')}, hidden size {target.hidden_size}, {target.vocab_size} tokens, "
        f"context of {target.context}, {template} chat template, {target.running}",
        f"machine: {target.device}, {machine.cpus} cores, {size(machine.memory)} of memory and {size(machine.disk)} "
        "of disk free",
        f"prompts: {', '.join(sources) or own}",
        f"drafter: {plan.variant}, {counted(recipe.get('layers', 1), 'layer')}, target layers "
        f"{','.join(map(str, recipe['target_layers']))}, blocks of {recipe['block_size']}",
        f"hidden states: {KEPT_STATES[plan.hidden_states]}",
        f"needs: about {size(plan.memory)} of memory, {size(plan.disk)} of disk",
        *(f"why: {reason}" for reason in plan.reasons),
        *(f"step {name}: about {duration(seconds)}" for name, seconds in plan.seconds.items()),
        f"in all: about {duration(sum(plan.seconds.values()))} from here, of {hours:g} h",
    ]


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
