"""What the DFlash paper reports (arXiv 2602.06036): transformers on an H200, a prompt at a time, answers of at most
2048 tokens without thinking. EAGLE-3 (N) has trees of N guesses, DFlash (16) blocks of 16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SOURCE = "arXiv 2602.06036; transformers, H200"
TASKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")


@dataclass(frozen=True)
class Published:
    """Attributes:
    speedup: Over plain decoding.
    tau: Tokens of a cycle.
    """

    speedup: float
    tau: float


def _row(text: str) -> dict[str, Published]:
    """Figures of all `TASKS`, as the paper's table has them."""
    cells = [Published(*map(float, cell.split("/"))) for cell in text.split()]
    return dict(zip(TASKS, cells, strict=True))


# By model and temperature, then by method and task. Of EAGLE-3 at temperature 1 averages alone are known here; they are
# left out.
FIGURES: dict[str, dict[float, dict[str, dict[str, Published]]]] = {
    "Qwen3-4B": {
        0.0: {
            "DFlash (16)": _row("5.15/6.53 6.09/7.84 5.68/7.27 5.21/6.64 4.78/6.09 5.41/7.09 2.85/4.35"),
            "EAGLE-3 (16)": _row("1.99/3.30 1.83/3.08 1.79/3.05 1.84/3.05 1.78/2.95 1.73/2.91 1.74/3.02"),
            "EAGLE-3 (60)": _row("2.27/3.77 2.10/3.52 2.13/3.51 2.12/3.47 2.02/3.38 1.90/3.22 2.04/3.49"),
        },
        1.0: {"DFlash (16)": _row("4.71/6.00 5.09/6.67 3.73/4.92 4.74/6.04 4.42/5.66 4.90/6.50 2.67/4.07")},
    },
    "Qwen3-8B": {
        0.0: {
            "DFlash (16)": _row("5.15/6.54 6.08/7.87 5.62/7.08 5.14/6.50 4.65/5.95 5.51/7.27 2.75/4.24"),
            "EAGLE-3 (16)": _row("1.94/3.23 1.81/3.02 1.79/3.00 1.89/3.17 1.69/2.82 1.57/2.65 1.63/2.83"),
            "EAGLE-3 (60)": _row("2.23/3.71 2.05/3.49 2.05/3.44 2.17/3.65 1.93/3.25 1.81/3.03 1.90/3.26"),
        },
        1.0: {"DFlash (16)": _row("4.67/5.98 4.84/6.40 3.57/4.73 4.32/5.52 4.04/5.21 4.93/6.69 2.47/3.80")},
    },
}
SHAPES = {("qwen3", 2560, 36): "Qwen3-4B", ("qwen3", 4096, 36): "Qwen3-8B"}  # model type, hidden size, layers


def model_of(architecture: Mapping[str, Any]) -> str | None:
    """The model of the paper that has this shape.

    Args:
        architecture: As `Target` has it.
    """
    return SHAPES.get(tuple(architecture.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers")))  # type: ignore[arg-type]
