"""Settings of `doctor` and `launch`. They do not import torch, so that the command line starts fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from blockdraft.settings import Count, settings


@settings
class DoctorSettings:
    """Settings of `blockdraft doctor`."""

    max_new_tokens: Count = Field(96, description="Maximum length of an answer in tokens.")
    anchors: Count = Field(48, description="Positions per answer, evenly spread, at which each check asks the drafter.")


@settings
class LaunchSettings:
    """Settings of `blockdraft launch`.

    Attributes:
        port: Port of this machine at which the engine listens.
        patience: Seconds until the engine must answer; large models take minutes to load.
        environment: Folder of the virtual environment that holds the engine; by default the path is searched.
        log: File for what the engine prints; by default a new one among the temporary files.
    """

    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    patience: Annotated[float, Field(gt=0)] = 1800.0
    environment: Path | None = None
    log: Path | None = None
