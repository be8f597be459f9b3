import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.diffusion.converted import (
    PLAIN,
    REQUEST,
    Problem,
    answers_of,
    converted,
    measure,
    number_in,
    own_problems,
    read_problems,
    write_answers,
)
from benchmarks.diffusion.settings import ConvertedSettings
from blockdraft import Engine, SamplingParams, Target, load_drafter, load_target
from blockdraft.diffusion.sampler import Sampler
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.errors import UsageError

PROBLEMS = [Problem(f"{n} + {n}?", str(2 * n)) for n in range(5)]
HOW = ConvertedSettings(
    tune_steps=2, tune_batch=2, tune_length=16, asked=3, new_tokens=8, ways=("static=2", "left_to_right"), together=2
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu", compile="off")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "response": "It is so. " * 4}) + "\n" for n in range(8)))
    return path


def test_the_target_answers_what_is_left(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    generate = Engine.generate

    def watched(engine: Engine, prompts: list[str], params: SamplingParams) -> object:
        asked.extend(prompts)
        # Of its own the tiny target seldom ends.
        first, *others = generate(engine, prompts, params)
        return [replace(first, finish_reason="length"), *(replace(one, finish_reason="stop") for one in others)]

    monkeypatch.setattr(Engine, "generate", watched)
    path = tmp_path / "answers.jsonl"
    write_answers(target, PROBLEMS[:2], path, HOW, lambda *told: None)
    with path.open("a") as file:
        file.write('{"number": 2, "pro')  # killed
    write_answers(target, PROBLEMS, path, HOW, lambda *told: None)
    assert asked == [problem.prompt for problem in PROBLEMS]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 3]  # the first of each two has not ended
    assert all(row["prompt"] == PROBLEMS[row["number"]].prompt and row["response"] for row in rows)


def test_answers_of_all_ways(
    target: Target, tiny_target_dir: Path, tiny_drafter_dir: Path, data: Path, tmp_path: Path
) -> None:
    model = converted(tiny_target_dir, data, HOW, tmp_path, lambda *told: None)
    drafters = {"a drafter": load_drafter(tiny_drafter_dir, target=target)}
    plain = Engine(target).generate([problem.prompt for problem in PROBLEMS[:3]], SamplingParams(8))
    problems = [Problem(PROBLEMS[0].prompt, ""), *PROBLEMS[1:]]  # the tiny target writes no box
    one = replace(HOW, asked=1)
    measure(target, drafters, model, problems, one, tmp_path, lambda *told: None)
    asked = list[tuple[int, int]]()
    kept = measure(target, drafters, model, problems, HOW, tmp_path, lambda told, *counts: asked.append(counts))
    assert asked == [(0, 8), (2, 8), (4, 8), (6, 8)]
    ways = [PLAIN, "drafted by a drafter", *HOW.ways]
    assert sorted((each.way, each.number) for each in kept.all) == sorted((way, i) for way in ways for i in range(3))
    by = {(each.way, each.number): each for each in answers_of(tmp_path).all}
    for i, expected in enumerate(plain):
        for way in ways[:2]:
            assert json.loads(by[way, i].text) == expected.text and by[way, i].new_tokens == len(expected.token_ids)
            assert by[way, i].counted == len(expected.token_ids) - 1
        assert by[PLAIN, i].forwards == by[PLAIN, i].counted >= by[ways[1], i].forwards
        assert by["static=2", i].forwards < by["left_to_right", i].forwards
    assert {each.number for each in kept.all if each.right} == {0}
    chunks = list(Sampler(model, SampleSettings(8, "static=2")).stream([problems[2].prompt]))
    assert json.loads(by["static=2", 2].text) == "".join(chunk.text for chunk in chunks)
    assert by["static=2", 2].forwards == chunks[-1].forwards


def test_a_conversion_goes_on_where_it_was(tiny_target_dir: Path, data: Path, tmp_path: Path) -> None:
    def interrupt(told: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(tiny_target_dir, data, HOW, tmp_path, interrupt)
    told = list[tuple[int, int]]()
    model = converted(tiny_target_dir, data, HOW, tmp_path, lambda stage, *counts: told.append(counts))
    assert told[-1] == (1, 1) and model.config.block_size == HOW.block_size  # one of the two steps was done
    told.clear()
    converted(tiny_target_dir, data, HOW, tmp_path, lambda stage, *counts: told.append(counts))
    assert not told


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("2 + 2 = 4\nThe answer is \\boxed{4}.", "4"),
        ("\\boxed{1} and then \\boxed{$1,200}.", "1200"),
        ("He has 16 - 3 = <<16-3=13>>13 left.\n#### 1,013", "1013"),
        ("It is 4.", ""),
        ("\\boxed{4", "4"),
        ("", ""),
    ],
)
def test_the_result_of_an_answer(answer: str, number: str) -> None:
    assert number_in(answer) == number


def test_problems_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    values = {"question": "How much is 3 * 4?", "answer": "3 * 4 = 12\n#### 12"}
    path.write_text(json.dumps(values) + "\n")
    assert read_problems(path) == [Problem("How much is 3 * 4?" + REQUEST, "12")]
    for text, message in (
        ("", "holds no problem"),
        ('{"question": "a"}\n', "line 1, is not of the form"),
        ('{"question": 1, "answer": "#### 2"}\n', "line 1, is not of the form"),
        (json.dumps(values) + "\nno JSON\n", "line 2, is not of the form"),
        ('{"question": "a", "answer": "four"}\n', "line 1: the answer has neither"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_problems(path)
    with pytest.raises(UsageError, match="--problems takes JSON lines"):
        read_problems(tmp_path / "none")


def test_own_problems_are_new_each() -> None:
    asked = own_problems(50, 1)
    learned = own_problems(50, 1, asked)
    assert len({*asked, *learned}) == 100 and own_problems(50, 1) == asked
    assert all(problem.prompt.endswith(REQUEST) and problem.result for problem in asked)
