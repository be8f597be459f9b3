"""Settings of benchmarks. Imports no torch, so that the command line starts fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from blockdraft.settings import Count, Flag, Natural, settings

SERVER_KEY = "BLOCKDRAFT_SERVER_KEY"  # environment variable with the API key of a server that is asked

Concurrency = Annotated[int, Field(ge=1, le=64)]


@settings
class MeasureSettings:
    """Measurement of decoding methods."""

    limit: Annotated[Count | None, Flag(panel="Data")] = Field(
        None, description="Number of prompts to take from the start of each file; by default all."
    )
    batch_size: Count = Field(1, description="Number of prompts decoded together.")
    repeats: Count = Field(3, description="Number of rounds. In each round, every method decodes every prompt.")
    tree_budget: Annotated[Natural | Literal["auto"], Flag(panel="Drafting")] = Field(
        32, description="Draft tokens per tree for the method `tree` without a number."
    )


@settings
class LoadSettings:
    """Load on a server."""

    concurrency: Annotated[tuple[Concurrency, ...], Strict(False), Field(min_length=1), Flag(metavar="N,...")] = Field(
        (1, 4, 16), description="Requests in flight, from 1 to 64. Several levels are measured one after the other."
    )
    requests: Count | None = Field(
        None, description="Requests per level; by default each prompt once, and at least four times the concurrency."
    )
    allow_prefix_cache: bool = Field(
        False, description="Measure even if the server caches prompt prefixes, so that earlier requests matter."
    )
    silence: Annotated[float, Field(gt=0), Flag(metavar="SECONDS")] = Field(
        600.0, description="Time without output after which a server counts as hung and the measurement ends."
    )
