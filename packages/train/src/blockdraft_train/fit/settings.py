"""Settings of `blockdraft fit` and `blockdraft prompts`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Flag, Natural, SettingsError, settings


@settings
class PromptSettings:
    """Choice of the prompts that the target answers."""

    count: Count = Field(2000, description="Number of prompts.")
    held_out: Natural = Field(32, description="Number of further prompts, kept apart to measure on.")
    prompt_tokens: Count = Field(32, description="Length, in tokens, of a prompt that is cut from plain text.")
    seed: Natural = Field(0, description="Seed of the choice of prompts, and of prompts that the target writes.")
    pool: Count = Field(
        100_000, description="Number of records to read from all sources together. Prompts are drawn from these."
    )


@settings
class FitSettings:
    """Settings of a fit. The planner chooses fields that are None, and gives its reason."""

    hours: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Wall-clock time of the whole command, in hours, without interruptions."
    )
    init: Annotated[str | None, Flag(metavar="DRAFTER")] = Field(
        None,
        description="Drafter to continue, as for `generate --drafter`; bundled is that of the target. It learns from "
        "the conversations in the folder --data, and is written if it drafts others of them better.",
    )
    minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Wall-clock time of the whole command with --init, in minutes; by default 30."
    )
    variant: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Kind of drafter, such as dflash2. By default the kinds are compared on this machine."
    )
    answers: Count | None = Field(
        None, description="Number of responses that the target writes; by default as many as the time allows."
    )
    steps: Count | None = Field(None, description="Number of training steps; by default as many as the time allows.")
    max_new_tokens: Count | None = Field(
        None, description="Maximum length of a response in tokens; by default 512, but at most half of the context."
    )
    temperature: Amount | None = Field(
        None,
        description="Sampling temperature of the responses. By default 0 (greedy), or 0.7 if many greedy responses "
        "are repetitive.",
    )
    seed: Natural = Field(0, description="Seed of everything random.")

    def __post_init__(self) -> None:
        if self.minutes is not None and self.init is None:
            raise UsageError("minutes is for a drafter that is continued; add --init DRAFTER, or give --hours.")
        if self.variant is None:
            return
        from blockdraft_train.variant import fit_gains  # imports torch, a slow start

        if self.variant not in fit_gains():
            raise SettingsError.of("variant", f"one of {', '.join(fit_gains())}", self.variant)
