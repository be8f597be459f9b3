"""How a suite is measured. Free of torch, so that a command line can read the defaults."""

from __future__ import annotations

from pathlib import Path

from blockdraft.evaluation.suite.paper import FIGURES
from blockdraft.settings import Count, settings


@settings
class SuiteSettings:
    """What is measured, and what stands beside it.

    Attributes:
        suite_data: Folder with copies of the datasets, each in a folder named as on the hub, such as openai/gsm8k; None
            fetches them from the hub.
        tasks: Names of some of its sets, with commas between them; None measures all.
        paper_model: Model whose published figures stand beside ours; None is the target's own, told by its shape.
        limit: Prompts of each set at most; None takes as many as the paper, 30 to 164 by set.
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
