"""Settings of benchmarks. Imports no torch, so that the command line can read the defaults quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, Strict

from blockdraft.errors import UsageError
from blockdraft.evaluation.suite.paper import FIGURES
from blockdraft.settings import Count, settings

AtOnce = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True)
class Settings:
    """Measurement of decoding methods.

    Attributes:
        limit: Most prompts of each file, from its beginning; None takes all.
        batch_size: Prompts decoded together.
        repeats: Number of rounds, in each of which every method decodes every prompt.
        tree_budget: Most guesses of a draft tree, the anchor not counted, for `tree` without a number.
    """

    limit: int | None = None
    batch_size: int = 1
    repeats: int = 3
    tree_budget: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}; it must be at least 1.")
        if self.repeats < 1:
            raise UsageError(f"repeats is {self.repeats}; it must be at least 1.")


@settings
class LoadSettings:
    """Load on a server.

    Attributes:
        concurrency: Requests at a time, from 1 to 64; one level after the other.
        requests: Requests of a level; None is each prompt once, and at least four times the concurrency.
        allow_prefix_cache: Measure although a server caches the beginnings of earlier prompts, so that results depend
            on earlier requests.
        silence: Seconds without any output after which a server is taken to hang, and the measurement ends.
    """

    concurrency: Annotated[tuple[AtOnce, ...], Strict(False), Field(min_length=1)] = (1, 4, 16)
    requests: Count | None = None
    allow_prefix_cache: bool = False
    silence: Annotated[float, Field(gt=0)] = 600.0


@settings
class SuiteSettings:
    """Measurement of a suite.

    Attributes:
        suite_data: Folder with copies of the datasets, each in a folder named as on the hub, such as openai/gsm8k; None
            fetches them from the hub.
        tasks: Names of some of its sets, with commas between them; None measures all.
        paper_model: Model whose published figures are shown too; None is the target itself, recognized by its shape.
        limit: Most prompts of each set; None takes as many as the paper, 30 to 164 by set.
        max_new_tokens: Number of tokens after which an answer is cut.
        seed: Prompt i of a set, from 0 on, is decoded with this number + i.
    """

    suite_data: Path | None = None
    tasks: str | None = None
    paper_model: str | None = None
    limit: Count | None = None
    max_new_tokens: Count = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.paper_model is not None and self.paper_model not in FIGURES:
            raise ValueError(f"paper_model is {self.paper_model!r}; it must be {' or '.join(FIGURES)}.")
