"""The parts of the tiny recipe that can be checked without training."""

import ast
import contextlib
import doctest
import io
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus import clean_gsm8k, documented_functions
from python_tasks import python_task
from solve import answer_of, problems, python_tasks, written
from train_target import MENDED, MIXTURES, check_kinds, kind_of, loop_rows, mixture, own_answers, packed_rows
from word_problems import word_problem
from write_answers import answers, hard_prompts, with_other_numbers

from blockdraft import SamplingParams


def test_word_problems_are_right() -> None:
    rng = random.Random(5)
    for _ in range(500):
        question, answer = word_problem(rng)
        *steps, last = answer.splitlines()
        assert question and steps
        results = []
        for step in steps:
            for left, right in re.findall(r"([$\d][\d $.+*/%()-]*) = \$?(\d+(?:\.\d+)?)", step):
                assert abs(eval(left.replace("$", "").replace("%", "")) - float(right)) < 1e-9, step
                results.append(float(right))
        boxed = re.fullmatch(r"The answer is \\boxed\{([\d.]+)\}\.", last)
        assert boxed and float(boxed[1]) == results[-1]


@pytest.mark.parametrize("odd", [0.0, 1.0])
def test_python_tasks_do_what_their_examples_say(odd: float) -> None:
    rng = random.Random(5)
    for _ in range(100):
        stub, solution = python_task(rng, odd)
        space: dict[str, object] = {}
        imports = "\n".join(line for line in stub.splitlines() if line.startswith(("from ", "import ")))
        exec(imports + "\n" + solution, space)
        function = ast.parse(stub).body[-1]
        assert isinstance(function, ast.FunctionDef)
        examples = doctest.DocTestParser().get_doctest(ast.get_docstring(function) or "", space, "stub", None, 0)
        with contextlib.redirect_stdout(io.StringIO()) as report:
            assert doctest.DocTestRunner(verbose=False).run(examples).failed == 0, report.getvalue()


def test_gsm8k_answers_get_one_style() -> None:
    raw = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 1,072"
    assert clean_gsm8k(raw) == (
        "Natalia sold 48 / 2 = 24 clips in May.\nShe sold 48 + 24 = 72 clips.\nThe answer is \\boxed{1072}."
    )


def test_documented_functions_are_split_at_the_docstring() -> None:
    source = 'import os\n\ndef f(x):\n    """Double x."""\n    return 2 * x\n\n\ndef g(x):\n    return x\n'
    assert list(documented_functions(source)) == [('def f(x):\n    """Double x."""\n', "def f(x):\n    return 2 * x")]


def test_answer_is_what_the_last_box_holds() -> None:
    assert answer_of("so \\boxed{3}.\nThe answer is \\boxed{$1,200}.") == "1200"
    assert answer_of("no box") is None


def test_rows_begin_with_documents_and_cut_only_the_last() -> None:
    documents = {"gsm8k": [[1, 2, 3], [4, 5]], "problem": [[6, 7]], "task": [[8] * 9]}
    shares = {"gsm8k": 0.5, "problem": 0.3, "task": 0.2}
    rows = packed_rows(documents, lambda: shares, 0, lambda: 8)
    for _ in range(50):
        row = next(rows)
        assert len(row) == 8 and 8 not in row  # the task is longer than a row
        assert row[0] in (1, 4, 6)


def test_the_target_begins_with_what_is_easy() -> None:
    first, later, last = (mixture("main", share) for share in (0.0, 0.125, 0.25))
    assert first["easy"] > later["easy"] > last["easy"] and first["leetcode"] == 0
    assert last == mixture("main", 1.0) == MIXTURES["main"]
    for shares in (first, later, *MIXTURES.values()):
        assert abs(sum(shares.values()) - 1) < 1e-9
    rng = random.Random(5)
    for _ in range(50):
        question, answer = word_problem(rng)
        row = {"kind": "problem", "messages": [{"content": question}, {"content": answer}]}
        assert kind_of(row) == ("easy" if len(answer.splitlines()) <= 3 else "problem")


def test_problems_to_solve_are_new() -> None:
    first = problems(20)
    known = frozenset(question for question, _ in first[:10])
    others = problems(20, known)
    assert others[:10] == first[10:] and len(set(others)) == 20


def test_odd_names_can_only_be_copied() -> None:
    rng = random.Random(5)
    usual, odd = ({python_task(rng, share)[1].partition("(")[0] for _ in range(300)} for share in (0.0, 1.0))
    assert len(odd) > 200 and not usual & odd


def test_a_corpus_that_lacks_a_kind_is_named() -> None:
    documents = {kind: [[1, 2]] for kind in MIXTURES["finish"]}
    check_kinds(documents, "finish")
    with pytest.raises(SystemExit, match="finish needs documents of the kinds odd_task;"):
        check_kinds({**documents, "odd_task": []}, "finish")


class RepetitiveEngine:
    """Answers at once: `[7] * 80`, which loops, the first times that a prompt is asked, and then its parameters."""

    def __init__(self, looping: dict[str, int]) -> None:
        self.looping = looping

    def submit(self, prompt: str, params: SamplingParams, listen: Any) -> Any:
        ids = [7] * 80 if self.looping[prompt] else [int(params.temperature), params.seed]
        self.looping[prompt] -= 1
        listen(SimpleNamespace(finish_reason=None))
        listen(SimpleNamespace(finish_reason="stop"))
        done = SimpleNamespace(token_ids=ids)
        return SimpleNamespace(result=lambda: SimpleNamespace(checked=lambda: done))


def test_what_loops_is_asked_again_and_given_up_in_the_end() -> None:
    engine: Any = RepetitiveEngine({"sound": 0, "twice": 2, "always": 9})
    prompts = dict(enumerate(engine.looping))
    params = {
        (number, before): SamplingParams(80, float(before > 0), seed=10 * number + before)
        for number in prompts
        for before in range(4)
    }
    results = sorted(answers(engine, prompts, lambda number, before: params[number, before], again=3))
    loop = [7] * 80
    assert results == [(0, [0, 0], []), (1, [1, 12], [loop] * 2), (2, loop, [loop] * 3)]
    assert engine.looping["always"] == 5


def test_only_whole_numbers_change() -> None:
    prompt = "def f2(x: int = 50): 1,200 apples, 3.5 pens, 20% of $80. >>> f2(7)"
    results = {with_other_numbers(prompt, random.Random(seed)) for seed in range(100)}
    form = re.compile(r"def f2\(x: int = (\d+)\): 1,200 apples, 3.5 pens, (\d+)% of \$(\d+)\. >>> f2\((\d+)\)")
    drawn = [[int(number) for number in form.fullmatch(variant).groups()] for variant in results]  # type: ignore[union-attr]
    assert len(results) > 90
    for place, number in enumerate((50, 20, 80, 7)):
        values = [numbers[place] for numbers in drawn]
        assert number // 2 <= min(values) < number < max(values) <= 2 * number + 3


def test_hard_prompts_are_drawn_as_they_are_and_answered_with_other_numbers(tmp_path: Path) -> None:
    solutions = {"gsm8k": "How much is 12 * 30?", "algorithms": "def f(n: int = 40)", "problem": "How much is 2 + 2?"}
    rows = [json.dumps({"kind": kind, "messages": [{"content": text}]}) for kind, text in solutions.items()]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(rows), encoding="utf-8")
    results = hard_prompts(corpus, 1, sampled_share=1.0)
    assert results == hard_prompts(corpus, 1, sampled_share=1.0) != hard_prompts(corpus, 2, sampled_share=1.0)
    kinds = ["gsm8k", *2 * ["gsm8k_other"], "algorithms", *6 * ["algorithms_other"]]
    assert sorted(kind for kind, _, _ in results) == sorted(kinds)
    for kind, prompt, sampled in results:
        if not kind.endswith("_other"):
            assert prompt == solutions[kind] and sampled
        else:
            assert (kind, prompt, not sampled) in results, "each is answered greedily and with sampling"
    assert any(prompt not in solutions.values() for _, prompt, _ in results)


def test_hard_prompts_without_numbers_are_answered_greedily_once(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"kind": "algorithms", "messages": [{"content": "def f()"}]}), encoding="utf-8")
    results = hard_prompts(corpus, 1, sampled_share=0.0)
    assert sorted(results) == [("algorithms", "def f()", True), ("algorithms_other", "def f()", False)]


def test_tasks_count_that_are_written_as_their_solution_and_that_no_corpus_holds(
    tmp_path: Path,
) -> None:
    class Wrong:
        """Answers nothing right."""

        def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
            return [SimpleNamespace(text="") for _ in prompts]

    class Knows(Wrong):
        """Knows every task, and is wrong about the first."""

        def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
            return [SimpleNamespace(text="\n" + solutions[prompt] * (n > 0)) for n, prompt in enumerate(prompts)]

    usual, odd = python_tasks(20, 0.0, None), python_tasks(20, 0.5, None)
    solutions = dict(odd)
    assert written(Wrong(), usual) == 0 and len({task for task, _ in usual}) == 20
    assert written(Knows(), odd) == 0.95
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"kind": "task", "messages": [{"content": usual[3][0]}]}) + "\n")
    others = python_tasks(20, 0.0, corpus)
    assert usual[3] not in others and others[:3] == usual[:3] and len(others) == 20


class OneToken:
    """A tokenizer of chats that are their answer, which is a number."""

    eos_token_id = 0

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])

    def apply_chat_template(self, chat: list[dict[str, str]], return_dict: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(chat[1]["content"])]}


def test_an_answer_in_the_place_of_one_that_looped_is_learned_from_more_often(tmp_path: Path) -> None:
    rows = [
        {"kind": "gsm8k", "prompt": "a", "ids": [5, 0]},
        {"kind": "gsm8k", "prompt": "b", "ids": [6, 0], "looped": [7]},
        {"kind": "gsm8k", "prompt": "c", "ids": [6, 9], "looped": [7]},
        {"kind": "gsm8k", "prompt": "d", "looped": [7]},
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer: Any = OneToken()
    assert own_answers([tmp_path / "answers.jsonl"], tokenizer, "settle") == [[5], *[[6]] * MENDED]


def test_greedy_answers_to_hard_prompts_are_sharpened(tmp_path: Path) -> None:
    files = [tmp_path / "answers.jsonl", tmp_path / "hard_answers.jsonl"]
    row = {"prompt": "a", "temperature": 0.0}
    looping = [*range(1, 7)] * 3 + [0]
    rows = [
        {**row, "kind": "gsm8k", "ids": [5, 0]},
        {**row, "kind": "gsm8k", "ids": [6, 0], "temperature": 0.7},
        {**row, "kind": "gsm8k", "ids": looping},
        {**row, "kind": "problem", "ids": [7, 0]},
    ]
    files[0].write_text("\n".join(map(json.dumps, rows)) + "\n")
    files[1].write_text(json.dumps({**row, "kind": "algorithms_other", "ids": [8, 0]}) + "\n")
    tokenizer: Any = OneToken()
    assert own_answers(files, tokenizer, "sharpen") == [[5], [8]]


def test_only_what_an_answer_repeats_is_unlearned(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "ids": [5]}, {"prompt": "b", "looped": [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 9]}]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))

    class Tokenizer:
        def apply_chat_template(
            self, chat: Any, add_generation_prompt: bool, return_dict: bool
        ) -> dict[str, list[int]]:
            return {"input_ids": [8, 8]}

    tokenizer: Any = Tokenizer()
    tokens, wrong = loop_rows([tmp_path / "answers.jsonl"], tokenizer, 20)
    assert tokens.tolist() == [[8, 8, *rows[1]["looped"], 0, 0, 0, 0]]
    assert wrong[0].nonzero().flatten().tolist() == [13, 14]  # 1 2 3 4 5 6 once more, and 2 3 4 5 6 1
    assert torch.equal(loop_rows([tmp_path / "answers.jsonl"], tokenizer, 14)[0], tokens[:, :14])
