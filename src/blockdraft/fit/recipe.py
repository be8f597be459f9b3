"""Which drafter, and how it is trained. Where experiments decide, they are those of docs/training.md ("What pays")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from blockdraft.fit.facts import Speeds, TargetFacts
from blockdraft.nn.draft_config import default_taps

Fields: TypeAlias = dict[str, Any]

VARIANTS = ("dflash", "dflash2")
GAIN = {"dflash": 1.0, "dflash2": 1.26}  # accepted tokens against those of DFlash, on equal training
EXPECTED_TAU = 2.3  # of a DFlash drafter after some hundred steps
RATE_POWER = 0.25  # four times the training makes 1.43 times the tau
MOST_LAYERS = 5  # the paper's (arXiv 2602.06036)
SHORT_BLOCK, LONG_BLOCK = 8, 16


def taps(layers: int) -> tuple[int, ...]:
    """Target layers that a drafter reads: up to five as in z-lab's drafters, and all of a target of few."""
    if layers < 4:
        return tuple(range(layers))
    return tuple(sorted({*default_taps(layers, min(5, max(layers - 3, 2)))}))


def reference(variant: str, target: TargetFacts, block_size: int = SHORT_BLOCK) -> Fields:
    """The drafter's shape and how it learns, whatever the time."""
    small, middling = target.hidden_size <= 512, target.hidden_size <= 2048
    fields: Fields = {
        "layers": min(max(round(target.layers / 4), 1), MOST_LAYERS),
        "taps": taps(target.layers),
        "block_size": block_size,
        "objective": {"dpace": 1.0},
        "optimizer": "muon",
        "learning_rate": 3e-3 if small else 1e-3 if middling else 6e-4,
        "muon_learning_rate": 0.02,
        "schedule": "wsd",
        "warmup": 0.03,
    }
    if variant == "dflash2":
        fields["selector_rank"] = min(256, max(16, target.hidden_size // 16))
        fields["conv_group_size"] = math.gcd(16, target.hidden_size)
    return fields


def anchors(length: int, block_size: int) -> int:
    """Blocks of a row that teach each of its tokens about twice."""
    return max(2 * length // block_size, 1)


def expected_speedup(variant: str, speeds: Mapping[str, Speeds]) -> float:
    """Tau over the cost of a cycle, in the block size that is best for it.

    Guesses are taken to be right independently of each other, and what is trained faster to learn more.
    """

    def pace(name: str) -> float:
        return speeds[name].tokens[-1] / speeds[name].seconds[-1]

    learned = (pace(variant) / max(map(pace, speeds))) ** RATE_POWER
    tau = max(EXPECTED_TAU * GAIN[variant] * float(learned), 1.01)
    right = 1 - 1 / tau
    return max((1 - right**size) / (1 - right) / cost for size, cost in speeds[variant].cycles.items())
