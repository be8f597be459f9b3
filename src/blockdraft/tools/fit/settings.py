"""What `blockdraft fit` and `blockdraft prompts` are told."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, settings


@settings
class PromptSettings:
    """Which prompts the target answers.

    Attributes:
        count: Prompts to make.
        held_out: Prompts that are kept apart, to measure on.
        prompt_tokens: Tokens of a beginning that is cut from a plain text.
        seed: Of the choice of prompts, and of those that the target writes.
        pool: Rows that are read of all sources together; prompts are drawn from these.
    """

    count: Count = 2000
    held_out: Natural = 32
    prompt_tokens: Count = 32
    seed: Natural = 0
    pool: Count = 100_000


@settings
class FitSettings:
    """What shapes a fit besides target and machine. What is None is chosen, and said why.

    Attributes:
        hours: Wall time of the whole command, what interruptions take not counted.
        variant: Kind of drafter, such as "dflash2"; None weighs what each kind accepts and costs here.
        answers: Answers that the target writes.
        steps: Training steps.
        max_new_tokens: Tokens after which an answer is cut; None is 512, and at most half of the target's context.
        temperature: Of the answers; None is greedy, or 0.7 where greedy answers run in circles.
        seed: Of everything random.
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
        from blockdraft.training.variant import fit_gains  # imports torch, which the command line's start does without

        if self.variant not in fit_gains():
            raise UsageError(f"variant is {self.variant!r}; it must be one of {', '.join(fit_gains())}.")

    def asked(self) -> dict[str, Any]:
        """The settings as JSON can spell them."""
        return asdict(self)
