"""Settings of benchmarks. Does not import torch, so that the command line starts quickly."""

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
    """Settings of a comparison of decoding methods.

    Attributes:
        limit: Maximum number of prompts per file, from its beginning; None takes all.
        batch_size: Prompts decoded together.
        repeats: Number of rounds, in each of which every method decodes every prompt.
        tree_budget: Maximum number of draft tokens per tree, for `tree` without a number.
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
    """Settings of the load on a server.

    Attributes:
        concurrency: Concurrent requests, from 1 to 64; one level after the other.
        requests: Requests per level; None is each prompt once, and at least four times the concurrency.
        allow_prefix_cache: Measure even if a server caches prompt prefixes, so that results depend on earlier requests.
        silence: Seconds without output after which a server is assumed to hang, and the measurement ends.
    """

    concurrency: Annotated[tuple[AtOnce, ...], Strict(False), Field(min_length=1)] = (1, 4, 16)
    requests: Count | None = None
    allow_prefix_cache: bool = False
    silence: Annotated[float, Field(gt=0)] = 600.0


@settings
class SuiteSettings:
    """Settings of a suite.

    Attributes:
        suite_data: Folder with copies of the datasets, each in a folder named as on the hub, such as openai/gsm8k; None
            downloads them from the hub.
        tasks: Comma-separated names of some of its sets; None measures all.
        paper_model: Model whose published figures are shown too; None is the target itself, recognized by its shape.
        limit: Maximum number of prompts per set; None takes as many as the paper, 30 to 164 by set.
        max_new_tokens: Maximum number of tokens per response.
        seed: Prompt i of a set, from 0, is decoded with this seed + i.
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
