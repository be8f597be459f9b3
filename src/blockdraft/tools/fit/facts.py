"""What the survey of a fit finds, and the planner plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.data.settings import DataSettings
from blockdraft.types import Quantize


@dataclass(frozen=True)
class TargetFacts:
    """Properties of the target.

    Attributes:
        context: Maximum sequence length in tokens.
        chats: Whether it has a chat template.
        weight_bytes: Size of the loaded weights.
        running: Backend and kernels, in words.
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
    best_block_size: int | None = None
    inner_size: int = 0


@dataclass(frozen=True)
class Machine:
    """Properties of the machine.

    Attributes:
        device: "cpu", "cuda" or "mps".
        memory, device_memory, disk: Free bytes.
    """

    device: str
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
        slope = max((self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0]), 0.0)
        slope = max(slope, 0.5 * self.seconds[-1] / self.tokens[-1])  # two similar times do not give a slope
        return max(self.seconds[-1] + slope * (tokens - self.tokens[-1]), 0.2 * self.seconds[0])


@dataclass(frozen=True)
class Measured:
    """Measurements of the target on the machine.

    Attributes:
        prompt_tokens, answer_tokens: Mean lengths of a prompt and of a response.
        long_document: Length of a prompt with its response that few exceed.
        looping: Share of greedy responses that are repetitive.
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
    looping: float
    answer_rate: float
    plain_seconds: float
    read_rate: float
    speeds: Mapping[str, Speeds]
    batch_size: int = DataSettings.batch_size
    quantize: Quantize | None = None
