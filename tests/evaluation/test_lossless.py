from blockdraft.evaluation.lossless import identical_share, looping_share, loops

LOOP = [*range(8)] * 4


def test_loops_counts_runs_of_eight() -> None:
    assert loops(LOOP)
    assert loops([5] * 11)  # occurrences overlap
    assert not loops([5] * 10)
    assert not loops(LOOP[:-1])
    assert not loops([token for i in range(9) for token in (*range(7), 100 + i)])  # runs of seven
    assert not loops(range(1000)) and not loops([])


def test_loops_need_not_be_adjacent() -> None:
    assert loops([token for i in range(4) for token in (*range(8), 100 + i)])


def test_a_prompt_is_identical_if_all_of_its_answers_are() -> None:
    reference = {"a": [1, 2], "b": [1, 2], "c": [1, 2], "d": [1, 2]}
    assert identical_share({key: [[1, 2], [1, 2]] for key in reference}, reference) == 1
    answers = {"a": [[1, 2], [1, 2]], "b": [[1, 2], [1, 3]], "c": [[1]], "d": [[1, 2, 3]]}
    assert identical_share(answers, reference) == 0.25


def test_a_prompt_loops_if_one_of_its_answers_does() -> None:
    assert looping_share({"a": [[1], LOOP], "b": [[1]], "c": [[2]], "d": [[3]]}) == 0.25
