from blockdraft.evaluation.lossless import identical_share, looping_share

LOOP = [*range(8)] * 4


def test_a_prompt_is_identical_if_all_of_its_answers_are() -> None:
    reference = {"a": [1, 2], "b": [1, 2], "c": [1, 2], "d": [1, 2]}
    assert identical_share({key: [[1, 2], [1, 2]] for key in reference}, reference) == 1
    answers = {"a": [[1, 2], [1, 2]], "b": [[1, 2], [1, 3]], "c": [[1]], "d": [[1, 2, 3]]}
    assert identical_share(answers, reference) == 0.25


def test_a_prompt_loops_if_one_of_its_answers_does() -> None:
    assert looping_share({"a": [[1], LOOP], "b": [[1]], "c": [[2]], "d": [[3]]}) == 0.25
