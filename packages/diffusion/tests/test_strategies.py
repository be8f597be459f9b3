"""Unmasking strategies."""

from typing import Any

import pytest
import torch

from blockdraft.errors import UsageError
from blockdraft_diffusion.strategies import STRATEGIES, DraftTokens, read_strategy

DRAFT_CHOICE = DraftTokens(
    confidence=torch.tensor([0.5, 0.95, 0.2, 0.9]),
    entropy=torch.tensor([1.0, 0.1, 2.0, 0.25], dtype=torch.float32),
    order=torch.tensor([0.30, 0.10, 0.95, 0.80], dtype=torch.float64),
)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("first_hitting", [2]),
        ("ancestral=1", [0, 1, 2, 3]),
        ("ancestral=2", [2, 3]),
        ("ancestral=1000", [2]),
        ("static=1", [1]),
        ("static=3", [0, 1, 3]),
        ("static=9", [0, 1, 2, 3]),
        ("threshold=0.9", [1, 3]),
        ("threshold=0.96", [1]),
        ("threshold=0", [0, 1, 2, 3]),
        ("entropy=0", [1]),
        ("entropy=0.1", [1, 3]),
        ("entropy=0.34", [1, 3]),
        ("entropy=0.36", [0, 1, 3]),
        ("entropy=9", [0, 1, 2, 3]),
        ("left_to_right", [0]),
    ],
)
def test_chosen(name: str, chosen: list[int]) -> None:
    assert read_strategy(name).choose(DRAFT_CHOICE).nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize("name", STRATEGIES)
def test_at_least_one_token_is_chosen(name: str) -> None:
    unsure = DraftTokens(*(torch.full((3,), value) for value in (0.0, 9.0, 0.0)))
    assert read_strategy(name).choose(unsure).any()


def test_ancestral_steps_are_equal() -> None:
    """Each step of the ancestral strategy unmasks about the same number of tokens."""
    masked, sizes = torch.rand(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    while len(masked):
        chosen = read_strategy("ancestral=3").choose(DraftTokens(masked, masked, masked))
        sizes.append(int(chosen.sum()))
        masked = masked[~chosen]
    assert sizes == pytest.approx([3000] * 3, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("treshold", "strategy is 'treshold'; did you mean threshold?"),
        ("xyz", "use one of first_hitting, ancestral, static, threshold, entropy, left_to_right"),
        ("left_to_right=2", "left_to_right takes no value"),
        ("threshold=2", "threshold must be at most 1, got '2'"),
        ("threshold=much", "threshold must be a number, got 'much'"),
        ("static=0", "tokens must be at least 1, got '0'"),
        ("static=", "tokens must be a whole number, got ''"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_strategy(text)
    assert message in str(raised.value)


def test_values_have_defaults() -> None:
    strategy: Any = read_strategy("threshold")
    assert strategy.threshold == 0.9
