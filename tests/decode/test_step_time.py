import random

import pytest

from blockdraft.decode.step_time import UNKNOWN, Costs, assumed_steps, best_count, block_tokens, chain_tokens

COSTS = Costs(
    batch_sizes=(1, 4),
    plain=(10.0, 16.0),
    chain=(((1, 12.0), (3, 14.0)), ((1, 20.0), (3, 32.0))),
    tree=((), ((2, 30.0), (4, 50.0))),
    date=5.0,
)


def test_costs_are_interpolated() -> None:
    assert COSTS.plain_step(1) == 10.0 and COSTS.plain_step(2) == 12.0
    assert COSTS.drafted_steps(1, 3, tree=False) == [12.0, 12.0, 13.0, 14.0]
    assert COSTS.drafted_steps(2, 3, tree=False)[2] == pytest.approx(13.0 + (26.0 - 13.0) / 3)


def test_beyond_the_known_sizes_the_last_slope_goes_on_and_never_falls() -> None:
    assert COSTS.drafted_steps(1, 5, tree=False)[5] == 16.0
    assert COSTS.plain_step(8) == 24.0
    falling = Costs((1,), (10.0,), (((1, 12.0), (2, 11.0)),), ((),))
    assert falling.drafted_steps(3, 4, tree=False) == [12.0, 12.0, 11.0, 11.0, 11.0]


def test_rows_without_times_borrow_from_those_that_have_some() -> None:
    assert (
        COSTS.drafted_steps(1, 4, tree=True) == COSTS.drafted_steps(4, 4, tree=True) == [30.0, 30.0, 30.0, 40.0, 50.0]
    )
    assert COSTS.knows(tree=True) and not Costs((1,), (1.0,), ((),), ((),)).knows(tree=True)


def test_newer_costs_take_the_place_of_older_ones() -> None:
    newer = Costs((2, 4), (11.0, 17.0), ((), ()), (((1, 13.0),), ((1, 19.0),)), 9.0)
    found = COSTS.updated(newer)
    assert (found.batch_sizes, found.plain, found.date) == ((1, 2, 4), (10.0, 11.0, 17.0), 9.0)
    assert found.chain == (COSTS.chain[0], (), COSTS.chain[1])
    assert found.tree == ((), *newer.tree)


def test_steps_of_which_nothing_is_known_are_assumed_to_take_longer_with_each_draft_token() -> None:
    ratios = assumed_steps(4, 3)
    assert 1 < ratios[0] < ratios[1]
    assert ratios[3] - ratios[0] == pytest.approx(4 * (assumed_steps(1, 3)[3] - assumed_steps(1, 3)[0]))
    assert UNKNOWN.plain_step(9) == 1.0 and UNKNOWN.drafted_steps(4, 3, tree=True) == ratios
    plain = Costs((1, 4), (10.0, 16.0), ((), ()), ((), ()))
    assert plain.drafted_steps(4, 3, tree=False) == [16.0 * ratio for ratio in ratios]


def test_a_draft_token_counts_if_all_before_it_are_accepted() -> None:
    assert chain_tokens([]) == [1.0] and chain_tokens([0.5, 0.8]) == pytest.approx([1.0, 1.5, 1.9])
    assert block_tokens(0.0, 8) == block_tokens(0.7, 1) == 1.0 and block_tokens(1.0, 8) == 8.0
    assert block_tokens(0.7, 16) == pytest.approx((1 - 0.7**16) / (1 - 0.7))


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


def test_best_count_of_a_free_of_a_costly_and_of_an_even_draft_token() -> None:
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


def test_calibration_scales_what_is_expected() -> None:
    rows, seconds = [[0.9, 0.5, 0.1], [0.8, 0.7]], [1.0, 1.2, 1.5, 1.9]
    for calibration in (0.3, 0.7, 1.3):
        rates = [(2 + calibration * sum(sum(row[:n]) for row in rows)) / seconds[n] for n in range(4)]
        assert best_count(rows, seconds, calibration) == rates.index(max(rates))
    assert best_count(rows, seconds, 0.1) == 0 < best_count(rows, seconds, 1.0)
