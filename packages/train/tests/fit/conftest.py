"""Plans for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import pytest

from blockdraft_train.fit.facts import FitPlan, TargetFacts
from blockdraft_train.fit.plan import reference


@pytest.fixture
def make_plan() -> Callable[..., FitPlan]:
    """A plan of a few answers and steps."""

    def made(**changes: Any) -> FitPlan:
        recipe = reference(changes.get("variant", "dflash"), TargetFacts(3, 32, 300, 256, True, 10**6, "native"))
        recipe |= {"length": 64, "batch": 2, "anchors": 4, "steps": 6, "held_out": 2, "seed": 5, "save_every": 2}
        order = ("prompts", "data", "train", "calibrate", "bench")
        values = {
            "variant": "dflash",
            "recipe": recipe,
            "answers": 24,
            "held_out": 4,
            "max_new_tokens": 16,
            "temperature": 0.7,
            "hidden_states": "memory",
            "bench_prompts": 2,
            "bench_tokens": 8,
            "seconds": {name: 10.0 * i for i, name in enumerate(order, 1)},
            "disk": 0,
            "memory": 0,
            "reasons": ("because",),
            "batch_size": 16,
        }
        return FitPlan(**{**values, **changes})

    return made
