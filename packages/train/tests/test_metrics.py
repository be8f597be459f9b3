"""Metrics of made-up sums, and prompts to measure tau on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from blockdraft.targets import load_target
from blockdraft_train.batches import Documents
from blockdraft_train.data.documents import Document
from blockdraft_train.loss import Sums
from blockdraft_train.metrics import encode_prompts, held_out_prompts, step_metrics, total_loss

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


class Variant:
    taught_slots, counted = 2, ("lucky",)

    def __init__(self, **factors: float) -> None:
        self._factors = factors

    def factors(self) -> dict[str, float]:
        return self._factors


def sums(terms: list[float], right: list[int], taught: list[int], lucky: int, accepted: int, blocks: int) -> Sums:
    counts = [right, taught, [lucky], accepted, blocks]
    return Sums(torch.tensor(terms), *(torch.tensor(count) for count in counts))


def test_the_figures_are_those_of_all_parts_together() -> None:
    variant: Any = Variant(near=1.0, far=0.5)
    parts = [sums([3.0, 8.0], [1, 0], [2, 0], 1, 3, 2), sums([1.0, 0.0], [2, 1], [2, 4], 3, 2, 2)]
    assert step_metrics(variant, parts, [2.0, 4.0], Accelerator(cpu=True)) == {
        "loss": 4 / 2 + 0.5 * 8 / 4,
        "loss_near": 2.0,
        "loss_far": 2.0,
        "accuracy": [0.75, 0.25],
        "lucky": 0.5,
        "accepted_length": 1.25,
    }
    assert float(total_loss(variant, torch.tensor([4.0, 8.0]), [2.0, 4.0])) == 3.0


def test_what_there_is_none_of_has_no_figure() -> None:
    variant: Any = Variant(near=1.0)
    metrics = step_metrics(variant, [sums([0.0], [0, 0], [0, 0], 0, 0, 0)], [1e-9], Accelerator(cpu=True))
    assert metrics == {"loss": 0.0, "accuracy": [None, None], "accepted_length": None}


def test_a_prompt_ends_before_the_first_supervised_token() -> None:
    places = torch.arange(10)
    begins = (4, 0, 1, 7)
    documents = Documents([Document(100 * i + places, places >= begin) for i, begin in enumerate(begins)], 10)
    assert held_out_prompts(documents, [1, 0, 3], 2) == [[100], [0, 1, 2, 3]]
    assert held_out_prompts(documents, [2, 3], 5) == [[200], [300, 301, 302, 303, 304, 305, 306]]


def test_prompts_leave_room_for_an_answer(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert encode_prompts([[5] * 250, [6]], target, 6) == [[5] * 250, [6]]
    with pytest.raises(ValueError, match="has 250 tokens and eval_tokens is 7; .* context of 256"):
        encode_prompts([[5] * 250, [6]], target, 7)
