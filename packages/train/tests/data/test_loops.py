"""Repetitive responses, and where they begin to repeat."""

import random

import pytest

from blockdraft.engine import loops
from blockdraft_train.data.loops import KEPT_TOKENS, before_loop, loop_begin

TEXT = random.Random(0).sample(range(1000), 60)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 8, 9, 30])
@pytest.mark.parametrize("tail", [0, 1, 5])
def test_the_first_period_of_a_loop_is_kept(period: int, tail: int) -> None:
    """Also where the answer is cut in the middle of a period."""
    cycle = list(range(2000, 2000 + period))
    tokens = TEXT + cycle * (3 + 8 // period + 8) + cycle[: min(tail, period - 1)]
    assert loop_begin(tokens) == len(TEXT) + period
    assert before_loop(tokens) == (TEXT + cycle, True)


def test_answers_without_a_loop_are_kept_whole() -> None:
    for tokens in ([], [1], TEXT, TEXT * 3, TEXT + [5] * 10):
        assert loop_begin(tokens) is None and before_loop(tokens) == (tokens, False)


def test_it_is_the_loops_of_the_engine() -> None:
    draw = random.Random(1)
    for _ in range(300):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(60))] * draw.randrange(1, 5)
        assert (loop_begin(tokens) is not None) == loops(tokens)


def test_what_loops_from_the_start_is_not_kept() -> None:
    assert before_loop(TEXT[: KEPT_TOKENS - 1] + [7] * 40) == (TEXT[: KEPT_TOKENS - 1] + [7], True)
    assert before_loop(TEXT[: KEPT_TOKENS - 2] + [7] * 40) == ([], True)
