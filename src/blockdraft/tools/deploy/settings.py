"""How pairs are examined and started. Free of torch, so that a command line can read the defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blockdraft.settings import Count, settings


@settings
class DoctorSettings:
    """How a pair is examined.

    Attributes:
        max_new_tokens: Tokens of each answer at most.
        anchors: Places of each answer, evenly spread, at which every reading is tried.
    """

    max_new_tokens: Count = 96
    anchors: Count = 48


@settings
class LaunchSettings:
    """How another engine is started.

    Attributes:
        port: Port of this machine at which the engine listens.
        patience: Seconds that it may take until it answers; large models take minutes to load.
    """

    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    patience: Annotated[float, Field(gt=0)] = 1800.0
