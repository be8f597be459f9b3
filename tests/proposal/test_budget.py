import random

import pytest
import torch

from blockdraft.proposal import best_count, next_pays


def test_best_count_is_the_best_of_all_counts_whatever_the_times() -> None:
    generator = random.Random(0)
    chosen = set()
    for _ in range(300):
        rows = [
            sorted((generator.random() for _ in range(generator.randrange(9))), reverse=True)
            for _ in range(generator.randint(1, 3))
        ]
        seconds = [generator.uniform(1, 3) for _ in range(generator.randint(1, 12))]  # neither rising nor convex
        counts = range(min(len(seconds), 1 + max(len(row) for row in rows)))
        rates = [sum(1 + sum(row[:n]) for row in rows) / seconds[n] for n in counts]
        count = best_count(rows, seconds)
        assert rates[count] == pytest.approx(max(rates))
        chosen.add(count)
    assert {0, 1, 4, 7} <= chosen


def test_best_count_of_a_free_of_a_costly_and_of_an_even_guess() -> None:
    assert best_count([[0.9, 0.5, 0.1]], [1.0, 1.0, 1.0, 1.0]) == 3
    assert best_count([[0.9, 0.5, 0.1]], [1.0, 2.0, 3.0, 4.0]) == 0
    assert best_count([[0.9, 0.5, 0.1]], [1.0, 1.1, 1.5, 3.0]) == 1
    assert best_count([[0.5, 0.0]], [1.0, 1.5, 1.5]) == 0  # no faster, so not worth the work
    assert best_count([[]], [1.0, 2.0]) == 0


def test_rows_share_a_count() -> None:
    sure, unsure, seconds = [0.9, 0.8, 0.7], [0.1, 0.0, 0.0], [1.0, 1.3, 1.6, 1.9]
    assert best_count([sure], seconds) == 3
    assert best_count([unsure], seconds) == 0
    assert best_count([sure, sure, sure, unsure], seconds) == 3
    assert best_count([sure, unsure, unsure, unsure], seconds) == 0


def test_trust_scales_what_is_expected() -> None:
    rows, seconds = [[0.9, 0.5, 0.1], [0.8, 0.7]], [1.0, 1.2, 1.5, 1.9]
    for trust in (0.3, 0.7, 1.3):
        rates = [(2 + trust * sum(sum(row[:n]) for row in rows)) / seconds[n] for n in range(4)]
        assert best_count(rows, seconds, trust) == rates.index(max(rates))
    assert best_count(rows, seconds, 0.1) == 0 < best_count(rows, seconds, 1.0)


def test_another_guess_is_taken_to_be_as_likely_as_the_last() -> None:
    expected, survival = torch.tensor([0.5, 0.0]), torch.tensor([0.5, 0.0])  # the second row gets no guesses
    # Of one guess a row 2.5 tokens, of two 3.
    assert next_pays(expected, survival, 1, [1.0, 1.0, 1.19])
    assert not next_pays(expected, survival, 1, [1.0, 1.0, 1.2])
    assert not next_pays(expected, survival, 1, [1.0, 1.0, 1.19], trust=0.5)
