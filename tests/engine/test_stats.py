from dataclasses import astuple, fields

import pytest

from blockdraft.engine.stats import Stats, loops, mean_tau, merge

LOOP = [*range(8)] * 4


def test_definitions() -> None:
    stats = Stats(committed=[3, 1, 4], drafted=[3, 3, 3], draft_seconds=1.0, verify_seconds=2.0, total_seconds=4.0)
    assert stats.tau == pytest.approx(8 / 3)
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert 1 + sum(stats.acceptance_by_position) == pytest.approx(stats.tau)
    assert (stats.host_seconds, stats.tokens_per_second) == (1.0, 2.0)


def test_an_answer_of_one_token_has_no_step() -> None:
    assert (Stats().tau, Stats().acceptance_by_position, Stats().tokens_per_second) == (1.0, [], 0.0)


def test_mean_tau_weighs_steps_alike() -> None:
    assert mean_tau([Stats(committed=[4]), Stats(committed=[1, 1, 1])]) == pytest.approx(7 / 4)


def test_merge_weighs_steps_alike_and_adds_up_everything() -> None:
    """Including fields that are added later."""
    one = Stats(**{f.name: [2, 3] if f.type == "list[int]" else 1.0 for f in fields(Stats)})
    assert astuple(merge([one, one])) == tuple(value * 2 for value in astuple(one))
    assert one.committed == [2, 3]
    merged = merge([Stats(committed=[4], drafted=[3]), Stats(committed=[1, 2, 1], drafted=[3, 3, 1])])
    assert (merged.tau, merged.acceptance_by_position) == (2.0, [0.5, 0.25, 0.25])
    assert merge([]) == Stats()


def test_loops_counts_runs_of_eight() -> None:
    assert loops(LOOP)
    assert loops([5] * 11)  # occurrences overlap
    assert not loops([5] * 10)
    assert not loops(LOOP[:-1])
    assert not loops([token for i in range(9) for token in (*range(7), 100 + i)])  # runs of seven
    assert not loops(range(1000)) and not loops([])


def test_loops_need_not_be_adjacent() -> None:
    assert loops([token for i in range(4) for token in (*range(8), 100 + i)])
