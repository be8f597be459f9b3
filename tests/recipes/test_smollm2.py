"""The data of a drafter for SmolLM2, with a tiny target in its place."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from blockdraft import Engine, load_target
from blockdraft.engine import loops
from blockdraft.targets import Target
from blockdraft.types import SamplingParams
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.responders import EngineResponder
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import find_variant

RECIPE = Path(__file__).parents[2] / "recipes/smollm2"


@pytest.fixture(scope="module")
def recipe() -> Iterator[Any]:
    """The modules of the recipe, by name."""
    names = ("prompts", "chats", "archive", "batched", "write_chats", "pack_chats")
    sys.path.insert(0, str(RECIPE))
    try:
        modules = {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(RECIPE))
    package = ModuleType("recipe")
    vars(package).update(modules)
    yield package
    for name in names:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Public sets of a few lines."""
    sets = {
        "instructions": [{"prompt": f"How do you say the number {'very ' * n}in words?"} for n in range(9)],
        "gsm8k_train": [{"question": f"What is {n} plus the {chr(97 + n) * 5} of it?"} for n in range(9)],
        "math_train": [{"problem": f"Find the root of {chr(97 + n) * 5} and add one to it."} for n in range(9)],
        "thealgorithms_python": [
            {
                "path": "a.py",
                "text": 'def twice(n):\n    """Twice the number.\n\n    >>> twice(2)\n    4\n    """\n    return n',
            }
        ],
        "leetcode_python": [
            {
                "path": "a/two-sum.py",
                "text": 'class Solution:\n    def two(self):\n        """Rtype"""\n        return 1\n',
            }
        ],
    }
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def written(recipe: Any, target: Target, folder: Path, numbers: range, stop: Callable[[], bool] = lambda: False) -> Any:
    lengths = recipe.write_chats.Lengths(prompt=24, first=60, further=40)
    writer = recipe.write_chats.Writer(target, recipe.prompts.PublicPrompts(folder), set(), 1, lengths)
    with Engine(target, max_batch_size=4) as engine:
        chats = recipe.write_chats.write(EngineResponder(engine), writer, numbers, stop)
        rows = [row for _, row in chats if row is not None]
    return sorted(rows, key=lambda row: row["task"])


def test_tasks_alternate_and_name_their_lines(recipe: Any, folder: Path) -> None:
    pattern = recipe.prompts.PATTERN
    kinds = [recipe.prompts.kind_of(number) for number in range(3 * len(pattern))]
    assert [kind for kind, _ in kinds] == 3 * pattern
    assert [count for kind, count in kinds if kind == "magpie"] == list(range(3 * pattern.count("magpie")))
    public = recipe.prompts.PublicPrompts(folder)
    names = [public.name("gsm8k_train", n) for n in range(9)]
    assert sorted(name["line"] for name in names) == list(range(9)) and public.name("gsm8k_train", 9) is None
    text = public.text("thealgorithms_python", 0)
    assert text.startswith("Write a solution") and "def twice(n):" in text and "return n" not in text
    assert '"two sum"' in public.text("leetcode_python", 0)


@pytest.mark.parametrize(
    "prompt, reason",
    [
        ("How do I bake a good loaf of bread?", None),
        ("Bread?", "length"),
        ("How to say хорошо in German", "not English"),
        ("lorem ipsum dolor sit amet", "not English"),
        ("what what what what what what what what what", "repeats itself"),
        ("What is this <|im_start|> for?", "special token"),
        ("HOW do you say 'number'?", "asked before"),
        ("Please tell me: one two three four five six seven eight nine ten eleven twelve the end", "measured"),
    ],
)
def test_unfit_prompts_are_reported(recipe: Any, tmp_path: Path, prompt: str, reason: str | None) -> None:
    file = tmp_path / "measured.jsonl"
    text = "One two three four five six seven eight nine ten eleven twelve. The start"
    file.write_text(json.dumps({"turns": [text + recipe.prompts.BOXED]}) + "\n")
    measured = recipe.prompts.measured_grams([file])
    assert recipe.prompts.unfit(prompt, measured, {recipe.prompts.key("How do you say: number")}) == reason
    assert recipe.prompts.unfit("What is two plus two?" + recipe.prompts.BOXED, measured, set()) is None


def test_answers_come_back_token_for_token(recipe: Any, target: Target, folder: Path) -> None:
    numbers = range(2 * len(recipe.prompts.PATTERN))
    rows = written(recipe, target, folder, numbers)
    assert [row["task"] for row in rows] == list(numbers)
    answered = [row for row in rows if "turns" in row]
    assert answered and any("looped" in turn for row in answered for turn in row["turns"])
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert recipe.archive.pack(file, folder / "kept") == len(rows)
    assert recipe.archive.unpack(folder / "again.jsonl", folder / "kept") == len(rows)
    assert (folder / "again.jsonl").read_bytes() == file.read_bytes()

    public = recipe.prompts.PublicPrompts(folder)
    with Engine(target) as engine:
        for row in answered:
            first = public.text(row["source"], row["line"]) if "sha" in row else None
            assert "prompt" not in row["turns"][0] if first else "prompt" in row["turns"][0]
            *prefixes, chat = recipe.chats.documents(target.tokenizer, row, first)
            for document in [*prefixes, chat]:
                ids = document.tokens[document.supervised].tolist()
                assert not loops(ids)
            turn = row["turns"][0]
            prompt = int(chat.supervised.int().argmax())
            shown = target.tokenizer.decode(chat.tokens[:prompt])
            assert shown.endswith(f"<|im_start|>user\n{turn.get('prompt', first)}<|im_end|>\n<|im_start|>assistant\n")
            greedy = prefixes[0] if "looped" in turn and prefixes else None if "looped" in turn else chat
            if greedy is not None and len(row["turns"]) == 1:
                expected = greedy.tokens[greedy.supervised].tolist()
                params = recipe.write_chats.SamplingParams(len(expected))
                assert engine.generate([chat.tokens[:prompt].tolist()], params)[0].token_ids == expected


def test_tokens_that_their_text_does_not_give_are_kept(recipe: Any, target: Target) -> None:
    ids = [target.tokenizer.convert_tokens_to_ids(token) for token in ("t", "h")]
    entries = recipe.chats.kept(target.tokenizer, "answer", ids)
    assert entries == {"answer": "th", "answer_ids": ids}
    assert recipe.chats.kept_ids(target.tokenizer, "answer", entries) == ids


def test_another_public_prompt_is_refused(recipe: Any, target: Target) -> None:
    row = {"source": "gsm8k_train", "line": 2, "sha": recipe.chats.sha("One"), "turns": [{"answer": "a"}]}
    assert len(list(recipe.chats.documents(target.tokenizer, row, "One"))) == 1
    with pytest.raises(ValueError, match="line 3 of gsm8k_train"):
        list(recipe.chats.documents(target.tokenizer, row, "Two"))


def test_two_turns_make_one_document(recipe: Any, target: Target) -> None:
    row = {"turns": [{"prompt": "One", "answer": "a"}, {"prompt": "Two", "answer": "b", "open": True}]}
    [document] = recipe.chats.documents(target.tokenizer, row, None)
    messages = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "user", "content": "Two"})
    prompt = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert target.tokenizer.decode(document.tokens) == prompt + "b"
    assert target.tokenizer.decode(document.tokens[document.supervised]) == "a<|im_end|>b"


def test_a_stopped_run_goes_on(recipe: Any, target: Target, folder: Path) -> None:
    numbers = range(20 * len(recipe.prompts.PATTERN))  # more than five rounds can answer
    calls = iter(range(100))
    rows = written(recipe, target, folder, numbers, stop=lambda: next(calls) > 4)
    assert 0 < len(rows) < len(numbers)
    file = folder / "answers.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text + '{"task": 7')
    assert recipe.write_chats.whole_lines(file) == rows and file.read_text() == text


def test_folders_of_data_and_validation(
    recipe: Any,
    tiny_target_dir: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = folder / "answers.jsonl"
    rows = [{"task": n, "source": "magpie", "turns": [{"prompt": f"Say {n}", "answer": str(n)}]} for n in range(60)]
    rows[7] = {"task": 7, "source": "magpie", "dropped": "length"}
    arguments = ["--target", str(tiny_target_dir), "--prompts", str(folder), "--answers", str(file)]
    for count in (50, 60):  # the second time there are more
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:count] + rows[50:51]))
        recipe.pack_chats.main([*arguments, "--out", str(folder / "out")])
        data, validation = read_data(folder / "out/data"), read_data(folder / "out/validation")
        assert (len(data), len(validation)) == (count - 2 - (count == 60), 2)
    assert torch.equal(data[0].tokens[data[0].supervised], data[0].tokens[-2:])
    assert "'documents': 57" in capsys.readouterr().out


def test_recipe_of_the_drafter_is_one() -> None:
    kind = find_variant("eagle3").recipe_class
    first, further = (vars(read_settings(kind, RECIPE / f"{name}.toml", {})) for name in ("drafter", "further"))
    assert first["init"] == "last_layer"
    assert all(first[name] == further[name] for name in ("block_size", "draft_vocab", "objective"))


def test_rows_of_a_batch_answer_as_each_would_alone(
    recipe: Any, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")
    reference, contiguous = recipe.batched.reference, []
    monkeypatch.setattr(
        recipe.batched, "reference", lambda q, *rest: contiguous.append(q.is_contiguous()) or reference(q, *rest)
    )
    responder = recipe.batched.BatchedResponder(target, rows=2, slots=60)
    prompts = [[7 * row + i for i in range(3 + 9 * row)] for row in range(4)]
    params = [SamplingParams(5 + 20 * row) for row in range(4)]
    for key, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        responder.submit(key, (), prompt, param)
    answers = dict[int, Any]()
    while len(answers) < len(prompts):
        answers |= dict(responder.responses())
    with Engine(target, max_batch_size=2) as engine:
        whole = [completion.token_ids for completion in engine.generate(prompts, params)]
    expected = [ids[: 60 - len(prompt)] for ids, prompt in zip(whole, prompts, strict=True)]  # a row is as long as that
    assert [answers[key].token_ids for key in range(4)] == expected
    assert all(answer.ended == (answer.token_ids[-1] == target.tokenizer.eos_token_id) for answer in answers.values())
    assert all(contiguous), "the kernel reads queries as if they were"
    with pytest.raises(ValueError, match="A prompt has 60 tokens, and a row has 60 slots"):
        responder.submit(9, (), [1] * 60, params[0])


def test_a_row_that_loops_is_free_again(recipe: Any, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")
    monkeypatch.setattr(recipe.batched, "draw", lambda logits, heat, *rest: torch.full_like(heat, 9, dtype=torch.int64))
    responder = recipe.batched.BatchedResponder(target, rows=1, slots=300)
    for key in range(2):
        responder.submit(key, (), [1, 2, 3], SamplingParams(200))
    assert [key for _ in range(2) for key, answer in responder.responses() if set(answer.token_ids) == {9}] == [0, 1]
    responder.submit(2, (), [1, 2, 3], SamplingParams(200))
    [(_, answer)] = responder.responses()
    assert len(answer.token_ids) <= recipe.batched.CHECKED + recipe.batched.STEPS


def test_draws_are_of_the_most_probable_tokens(recipe: Any) -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    logits, heat = probs.log().expand(count, -1), torch.ones(count)
    drawn = recipe.batched.draw(logits, heat, torch.full((count,), 0.75)).bincount(minlength=4) / count
    torch.testing.assert_close(drawn, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.02, rtol=0)
    drawn = recipe.batched.draw(logits, 0.5 * heat, torch.ones(count)).bincount(minlength=4) / count
    squared = probs.square() / probs.square().sum()
    torch.testing.assert_close(drawn, squared, atol=0.02, rtol=0)
    assert set(recipe.batched.draw(logits[:50], 0 * heat[:50], torch.ones(50)).tolist()) == {0}
