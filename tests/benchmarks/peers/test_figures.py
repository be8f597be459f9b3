from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import trial

from benchmarks.peers.figures import Difference, differences, figures
from benchmarks.peers.registry import PLAIN, REFERENCE
from benchmarks.peers.trials import Task, Trial

ANSWERS = [trial(REFERENCE, i, None) for i in range(2)]


def rounds(peer: str, *seconds: float) -> list[Trial]:
    """A round of two prompts for each of these times."""
    return [trial(peer, i, repeat, seconds=each / 2) for repeat, each in enumerate(seconds) for i in range(2)]


def test_speeds_are_medians_of_the_repeats() -> None:
    found = figures([*ANSWERS, *rounds(REFERENCE, 8, 4, 2)])[REFERENCE]
    assert found.tokens_per_second_by_repeat == (1, 2, 4)  # 2 * 4 tokens after the first
    assert found.tokens_per_second == 2
    assert found.over_reference == 1 and found.over_plain is None
    assert found.seconds_per_answer == 0.5 + 2
    assert found.prompts == 2 and found.same == 1 and found.tau == 1


def test_ratios_compare_the_same_repeat() -> None:
    trials = [*ANSWERS, *rounds(REFERENCE, 8, 80, 8), *rounds(PLAIN, 4, 40, 4), *rounds("a", 2, 10, 40)]
    found = figures(trials)
    assert found["a"].over_reference == pytest.approx(4)
    assert found["a"].over_plain == pytest.approx(2)  # of 2, 4 and 0.1
    assert found[PLAIN].over_reference == pytest.approx(2)


def test_tokens_that_came_with_the_prompt_do_not_count() -> None:
    trials = [replace(t, first=3, cycles=1) for t in rounds("a", 2)]
    found = figures([*ANSWERS, *trials])["a"]
    assert found.tokens_per_second == 2 and found.tau == 2


def test_a_repeat_counts_once_it_is_complete() -> None:
    trials = [*ANSWERS, *rounds(REFERENCE, 8, 8), *rounds("a", 8, 4)[:3], *rounds("b", 8)[:1]]
    found = figures(trials)
    assert found["a"].tokens_per_second_by_repeat == (1,)
    assert "b" not in found


def test_answers_of_one_token_have_no_speed() -> None:
    short = [replace(t, tokens=(1,), cycles=0, decode_seconds=0.0) for t in [*ANSWERS, *rounds("a", 1)]]
    assert figures(short) == {}


def test_a_prompt_differs_if_one_answer_does() -> None:
    trials = rounds("a", 1, 1)
    trials[2] = replace(trials[2], tokens=(1, 2, 3, 4))
    assert figures([*ANSWERS, *trials])["a"].same == 0.5


def test_where_answers_differ() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def margin(context: Sequence[int], one: int, other: int) -> float:
        asked.append((list(context), one, other))
        return 0.125

    tasks = [Task("set", i, (10 + i, 20)) for i in range(2)]
    found = differences(
        [
            *ANSWERS,
            trial("a", 0, 0),
            trial("a", 1, 0, (1, 2, 9, 4, 5)),
            trial("a", 1, 1, (1, 8, 9, 4, 5)),  # the first difference is told
            trial("b", 0, 0, (1, 2, 3)),
            trial("c", 0, 0, (1, 2, 3, 4, 5, 6)),
        ],
        tasks,
        margin,
    )
    assert found == [
        Difference("a", "set", 1, 3, 3, 9, 0.125),
        Difference("b", "set", 0, 4, 4, None, None),
        Difference("c", "set", 0, 6, None, 6, None),
    ]
    assert asked == [([11, 20, 1, 2], 3, 9)]
