"""Figures of sums that are made up."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from blockdraft.training.figures import figures_of, loss_of
from blockdraft.training.loss import Sums

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


class Variant:
    taught_slots, counted = 2, ("lucky",)

    def __init__(self, **factors: float) -> None:
        self._factors = factors

    def factors(self) -> dict[str, float]:
        return self._factors


def sums(terms: list[float], right: list[int], taught: list[int], lucky: int, accepted: int, blocks: int) -> Sums:
    counts = [right, taught, [lucky], accepted, blocks]
    return Sums(torch.tensor(terms), *(torch.tensor(one) for one in counts))


def test_the_figures_are_those_of_all_parts_together() -> None:
    variant: Any = Variant(near=1.0, far=0.5)
    parts = [sums([3.0, 8.0], [1, 0], [2, 0], 1, 3, 2), sums([1.0, 0.0], [2, 1], [2, 4], 3, 2, 2)]
    assert figures_of(variant, parts, [2.0, 4.0], Accelerator(cpu=True)) == {
        "loss": 4 / 2 + 0.5 * 8 / 4,
        "loss_near": 2.0,
        "loss_far": 2.0,
        "accuracy": [0.75, 0.25],
        "lucky": 0.5,
        "accepted_length": 1.25,
    }
    assert float(loss_of(variant, torch.tensor([4.0, 8.0]), [2.0, 4.0])) == 3.0


def test_what_there_is_none_of_has_no_figure() -> None:
    variant: Any = Variant(near=1.0)
    found = figures_of(variant, [sums([0.0], [0, 0], [0, 0], 0, 0, 0)], [1e-9], Accelerator(cpu=True))
    assert found == {"loss": 0.0, "accuracy": [None, None], "accepted_length": None}
