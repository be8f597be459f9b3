"""tau of a drafter that was just written, by the engine that will use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine, mean_tau
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.training.batches import Documents
from blockdraft.types import Prompt, SamplingParams

BATCH_SIZE = 8  # answers at a time


def held_out_prompts(documents: Documents, held_out: Sequence[int], count: int) -> list[list[int]]:
    """Of each of the first `count` held-out documents what comes before the first supervised token. One that begins
    with a supervised token gives that token."""
    prompts = []
    for index in held_out[:count]:
        document = documents[index]
        prompts.append(document.tokens[: max(int(document.supervised.int().argmax()), 1)].tolist())
    return prompts


def encoded(prompts: Sequence[Prompt], target: Target, tokens: int) -> list[list[int]]:
    """Token ids of the prompts. Raises ValueError where one leaves no room for an answer of `tokens` tokens."""
    found = [encode(prompt, target) for prompt in prompts]
    longest = max(map(len, found), default=0)
    if longest + tokens > target.max_context:
        raise UsageError(
            f"A prompt has {longest} tokens and eval_tokens is {tokens}; together they exceed the target's context of "
            f"{target.max_context}. Shorten either."
        )
    return found


def measured_tau(
    drafter: Path, target: Target, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0
) -> float:
    """Tokens committed per target forward over all prompts, in answers of up to `tokens` tokens. Prompt i is answered
    with the seed i."""
    engine = Engine(target, load_drafter(drafter, target=target), max_batch_size=BATCH_SIZE)
    room = [
        SamplingParams(min(tokens, target.max_context - len(prompt)), temperature, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    completions = engine.generate([list(prompt) for prompt in prompts], room)
    return mean_tau([completion.stats for completion in completions])
