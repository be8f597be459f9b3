"""Prompts that tau is measured on."""

from pathlib import Path

import pytest
import torch

from blockdraft.data.documents import Document
from blockdraft.targets import load_target
from blockdraft.training.batches import Documents
from blockdraft.training.measure import encoded, held_out_prompts


def test_a_prompt_ends_before_the_first_supervised_token() -> None:
    places = torch.arange(10)
    begins = (4, 0, 1, 7)
    documents = Documents([Document(100 * i + places, places >= begin) for i, begin in enumerate(begins)], 10)
    assert held_out_prompts(documents, [1, 0, 3], 2) == [[100], [0, 1, 2, 3]]
    assert held_out_prompts(documents, [2, 3], 5) == [[200], [300, 301, 302, 303, 304, 305, 306]]


def test_prompts_leave_room_for_an_answer(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert encoded([[5] * 250, [6]], target, 6) == [[5] * 250, [6]]
    with pytest.raises(ValueError, match="has 250 tokens and eval_tokens is 7; .* context of 256"):
        encoded([[5] * 250, [6]], target, 7)
