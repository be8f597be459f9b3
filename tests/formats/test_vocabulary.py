"""Maps of draft vocabularies."""

import pytest
import torch

from blockdraft.errors import UsageError
from blockdraft.formats.vocabulary import draft_tokens, in_order


def test_offsets_of_any_number_type() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        assert draft_tokens(torch.tensor([2, -1, -1], dtype=dtype), 3).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0.5, 1.0]), "d2t must be whole numbers, got"),
        (torch.tensor([0.0, torch.nan]), "d2t must be whole numbers"),
        (torch.tensor([], dtype=torch.int64), "of one dimension, and not empty"),
        (torch.tensor(1), "of one dimension, and not empty"),
        (torch.tensor([0, 9]), "offsets to tokens below 4"),
        (torch.tensor([0, -1]), "offsets to different tokens"),
    ],
)
def test_offsets_that_lead_nowhere(offsets: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        draft_tokens(offsets, 4)


def test_rows_follow_their_tokens() -> None:
    kept, head = in_order(torch.tensor([5, 1, 3]), torch.tensor([[50.0], [10.0], [30.0]]))
    assert kept.tolist() == [1, 3, 5] and head.flatten().tolist() == [10, 30, 50]
