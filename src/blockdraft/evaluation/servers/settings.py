"""How servers are measured. Free of torch, so that a command line can read the defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from blockdraft.settings import Count, settings

AtOnce = Annotated[int, Field(ge=1, le=64)]


@settings
class LoadSettings:
    """Which load a server is put under.

    Attributes:
        concurrency: Requests under way at a time, from 1 to 64, one level after the other.
        requests: Requests of a level; None is each prompt once, and at least four times as many as are under way.
        allow_prefix_cache: Measure although a server keeps the beginnings of earlier prompts and does not read them
            again. Figures then depend on what was asked before.
        silence: Seconds without a word of an answer after which a server is taken to hang, and the measurement ends.
    """

    concurrency: Annotated[tuple[AtOnce, ...], Strict(False), Field(min_length=1)] = (1, 4, 16)
    requests: Count | None = None
    allow_prefix_cache: bool = False
    silence: Annotated[float, Field(gt=0)] = 600.0
