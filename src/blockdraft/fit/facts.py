"""What a plan goes by: target, machine, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TargetFacts:
    """Attributes:
    context: Tokens of a row at most.
    chats: Whether it has a chat template.
    weight_bytes: As it is loaded.
    running: How it is run, in words.
    best_block_size: See `Target`.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    chats: bool
    weight_bytes: int
    running: str
    best_block_size: int | None = None


@dataclass(frozen=True)
class Machine:
    """Attributes:
    device: "cpu", "cuda" or "mps".
    memory, device_memory, disk: Bytes that are free.
    """

    device: str
    cpus: int
    memory: int
    device_memory: int
    disk: int


@dataclass(frozen=True)
class Speeds:
    """Of one variant, in the shape that `reference` gives it.

    Attributes:
        tokens, seconds: Two sizes of training steps and what they take.
        cycles: What a cycle takes, in plain ones, by block size.
        parameters: Of the drafter.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    cycles: Mapping[int, float]
    parameters: int

    def step(self, tokens: int) -> float:
        """Seconds of a training step of so many tokens: a fixed part and one that grows."""
        slope = max((self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0]), 0.0)
        slope = max(slope, 0.5 * self.seconds[-1] / self.tokens[-1])  # two times that are alike say little
        return max(self.seconds[-1] + slope * (tokens - self.tokens[-1]), 0.2 * self.seconds[0])


@dataclass(frozen=True)
class Measured:
    """Attributes:
    prompt_tokens, answer_tokens: Of a prompt and an answer on average.
    long_document: Tokens of a prompt with its answer that few have more than.
    looping: Share of greedy answers that run in circles.
    answer_rate: Tokens/s that the target writes, many answers at a time.
    plain_seconds: Of a token of one answer alone.
    read_rate: Tokens/s of which the target makes features.
    speeds: By variant.
    """

    prompt_tokens: float
    long_document: int
    answer_tokens: float
    looping: float
    answer_rate: float
    plain_seconds: float
    read_rate: float
    speeds: Mapping[str, Speeds]
