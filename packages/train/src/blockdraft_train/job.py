"""Training jobs: everything that a run is started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from blockdraft.targets import Target
from blockdraft.types import Prompt
from blockdraft_tools.export import ExportFormat
from blockdraft_train.data.documents import TokenData
from blockdraft_train.progress import Progress
from blockdraft_train.recipe import Recipe


@dataclass(frozen=True)
class TrainingJob:
    """A training run, new or to be resumed.

    Attributes:
        variant: Name of the variant.
        target: Target, on the accelerator's device.
        data: Documents to train on and to measure on.
        out: Folder of the drafter; the run's own folder lies beside it, see `run_folder`.
        recipe: Recipe of the variant's recipe class.
        accelerator: From `make_accelerator`.
        prompts: Prompts to measure tau on; None takes the beginnings of held-out documents.
        progress: Callbacks of the main process.
        written: Format of the drafter in `out`; None is the first one of its kind.
        more: Steps to add beyond the end of a run.
        other_responses: Accept responses that another model wrote.
    """

    variant: str
    target: Target
    data: TokenData
    out: Path
    recipe: Recipe
    accelerator: Accelerator
    prompts: Sequence[Prompt] | None = None
    progress: Progress = field(default_factory=Progress)
    written: ExportFormat | None = None
    more: int = 0
    other_responses: bool = False
