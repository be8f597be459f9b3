"""The rows that a training reads."""

from typing import Any

import pytest
import torch

from blockdraft.diffusion.rows import Rows
from blockdraft.diffusion.text import Tokens
from blockdraft.errors import UsageError


def text(length: int, begin: int = 0, learned: int = 0) -> Tokens:
    """Of these tokens those from `learned` on are to be learned."""
    ids = torch.arange(length) + begin
    return Tokens(ids, ids - begin >= learned)


def test_texts_are_joined_and_cut() -> None:
    """The first token of a row is given, and what is left at the end is left out."""
    found = Rows([text(7, learned=3), text(4, 20, learned=9)], 5, 0.0, 0)
    assert found.all.ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 20, 21, 22]]
    assert found.all.eligible.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]
    assert (found.trained, found.held_out, found.idle) == (2, 0, 0)


def test_rows_without_a_token_to_learn_are_left_out() -> None:
    """Such as the middle of a long question; the first token of a row cannot be learned either."""
    found = Rows([text(11, learned=10), text(9, 20, learned=0)], 5, 0.5, 0)
    assert found.all.ids.tolist() == [[10, 20, 21, 22, 23], [24, 25, 26, 27, 28]] and found.idle == 2
    assert (found.trained, found.held_out) == (1, 1)


def test_held_out_rows_are_the_last_ones() -> None:
    found = Rows([text(50)], 5, 0.25, 0)
    assert (found.trained, found.held_out) == (7, 3)
    assert [row.ids[0].item() for row in found.kept_back()] == [35, 40, 45]
    seen = {int(row[0]) for step in range(7) for row in found.batch(step, 2).ids}
    assert seen == {*range(0, 35, 5)}
    assert found.looked_at(0, 4).ids[:, 0].tolist() == [35, 40, 45, 35]
    assert found.looked_at(1, 4).ids[:, 0].tolist() == [40, 45, 35, 40]
    assert Rows([text(10)], 5, 0.0, 0).looked_at(0, 3).ids[:, 0].tolist() == [0, 5, 0]


def test_all_rows_once_in_each_epoch() -> None:
    """In another order each time, and by another seed; across the end of an epoch in the middle of a step too."""
    orders = []
    for seed in (0, 1):
        rows = Rows([text(50)], 5, 0.0, seed)
        drawn = [int(row[0]) for step in range(5) for row in rows.batch(step, 4).ids]
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(0, 50, 5))
        orders += [drawn[:10], drawn[10:]]
    assert len({*map(tuple, orders)}) == 4


@pytest.mark.parametrize(
    ("texts", "held_out", "told"),
    [
        ([], 0.0, "There are 0 tokens, which make 0 rows of 5 with something to learn, 0 of them held out; give more"),
        ([text(4)], 0.0, "There are 4 tokens, which make 0 rows"),
        ([text(20, learned=20)], 0.0, "There are 20 tokens, which make 0 rows"),
        ([text(20)], 0.9, "which make 4 rows of 5 with something to learn, 4 of them held out"),
    ],
)
def test_nothing_to_learn(texts: Any, held_out: float, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Rows(texts, 5, held_out, 0)
