"""Settings of `blockdraft fit` and `blockdraft prompts`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, settings


@settings
class PromptSettings:
    """Choice of the prompts that the target answers.

    Attributes:
        count: Number of prompts.
        held_out: Number of further prompts, kept apart to measure on.
        prompt_tokens: Length, in tokens, of a prompt that is cut from a plain text.
        seed: Seed of the choice of prompts, and of the prompts that the target writes.
        pool: Number of records that are read from all sources together. Prompts are drawn from these.
    """

    count: Count = 2000
    held_out: Natural = 32
    prompt_tokens: Count = 32
    seed: Natural = 0
    pool: Count = 100_000


@settings
class FitSettings:
    """Settings of a fit. A field that is None is chosen by the planner, which gives its reason.

    Attributes:
        hours: Wall time of the whole command, in hours, without interruptions.
        variant: Kind of drafter, such as "dflash2". None compares the kinds by what they accept and cost here.
        answers: Number of answers that the target writes.
        steps: Number of training steps.
        max_new_tokens: Maximum length of an answer, in tokens. None is 512, but at most half of the target's context.
        temperature: Sampling temperature of the answers. None is greedy, or 0.7 if many greedy answers loop.
        seed: Seed of everything random.
    """

    hours: Annotated[float, Field(gt=0)] = 1.0
    variant: str | None = None
    answers: Count | None = None
    steps: Count | None = None
    max_new_tokens: Count | None = None
    temperature: Amount | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        if self.variant is None:
            return
        from blockdraft.training.variant import fit_gains  # imports torch, a slow start

        if self.variant not in fit_gains():
            raise UsageError(f"variant is {self.variant!r}; it must be one of {', '.join(fit_gains())}.")

    def asked(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)
