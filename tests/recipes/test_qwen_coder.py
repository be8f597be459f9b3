"""The recipe of the Qwen2.5-Coder drafters, with the tiny target in place of the real one."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from blockdraft import Engine, SamplingParams, load_target
from blockdraft.drafters import load_drafter
from blockdraft.targets import Target
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.hidden_states import plan_hidden_states, read_hidden_states
from blockdraft_train.data.loops import loop_begin
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.progress import read_log

RECIPE = Path(__file__).parents[2] / "recipes/qwen2.5-coder"
MODULES = (
    "tools",
    "wording",
    "prompts",
    "chats",
    "shards",
    "recording",
    "responses",
    "documents",
    "code_files",
    "mix",
    "measure_tau",
    "gpu_inputs",
    "on_gpu",
)
TOKENS = 60
WRITTEN = {"question", "program", "chat", "tools"}  # kinds whose prompts the target writes
FUNCTION = """def {0}_values(items):
    running_sum = 0
    for item in items:
        running_sum += item.{0}
    return running_sum


"""


@pytest.fixture(scope="module")
def recipe() -> Iterator[Any]:
    """The modules of the recipe, by name."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(RECIPE))
        sys.path.remove(str(RECIPE.parent / "smollm2"))
        for name in (*MODULES, "batched"):
            sys.modules.pop(name, None)


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Let pytest have its handlers of signals again after the test."""
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def run(recipe: Any) -> Callable[..., None]:
    """Run a script of the recipe with these arguments."""

    def main(script: str, *arguments: object) -> None:
        getattr(recipe, script).main(list(map(str, arguments)))

    return main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public sets, of a few lines each."""
    folder = tmp_path_factory.mktemp("sets")
    words = [chr(97 + number) * 5 for number in range(20)]
    file = "".join(FUNCTION.format(word) for word in words)
    languages = ("python", "javascript", "typescript", "go", "rust", "java", "kotlin", "cpp")
    head = 'def twice(n):\n    """Twice the number.\n\n    >>> twice(2)\n    4\n    """\n    return 2 * n\n'
    sets = {
        "code_files": [
            {"language": language, "repository": f"o/{language}", "path": f"src/{word}.x", "text": f"// {word}\n{file}"}
            for language in languages
            for word in words[:3]
        ],
        "thealgorithms_python": [{"path": f"{word}.py", "text": head + file} for word in words],
        "leetcode_python": [
            {"path": f"a/two-{word}.py", "text": 'class Solution:\n    def two(self):\n        """Rtype"""\n'}
            for word in words
        ],
        "exercism": [{"slug": word, "text": f"# Description\n\nPrint \u2028 {word}."} for word in words],
        "gsm8k_train": [{"question": f"What is two plus the {word} of it?"} for word in words],
        "math_train": [{"problem": f"Find the root of {word} and add one."} for word in words],
        "instructions": [{"prompt": f"Say {word} in other words."} for word in words],
    }
    for name, rows in sets.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def test_any_beginning_of_the_list_is_the_same_mixture(recipe: Any, data: Path) -> None:
    pattern = recipe.prompts.PATTERN.split()
    tasks = list(recipe.prompts.tasks(data, 1, 8 * len(pattern), set()))
    beginning = list(recipe.prompts.tasks(data, 1, 4 * len(pattern), set()))
    assert len(beginning) > 3 * len(pattern) and beginning == tasks[: len(beginning)]
    assert [task["kind"] for task in tasks[: len(pattern)]] == pattern
    assert len({task["id"] for task in tasks}) == len(tasks)
    assert all(task["id"] == recipe.prompts.task_id(task) for task in tasks)
    general = sum(pattern.count(kind) for kind in ("chat", "maths", "instruction"))
    assert general == len(pattern) / 5
    others = list(recipe.prompts.tasks(data, 2, 4 * len(pattern), set()))
    assert {task["id"] for task in others} != {task["id"] for task in tasks[: len(others)]}


def test_sets_that_end_leave_their_places(recipe: Any, data: Path) -> None:
    counts = Counter(task["kind"] for task in recipe.prompts.tasks(data, 1, 10_000, set()))
    assert counts["instruction"] == 20 and counts["maths"] == 40 and counts["exercise"] == 20 * 8
    assert counts["fim"] > 1000 and counts["question"] > 1000


def test_measured_prompts_are_left_out(recipe: Any, data: Path, tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    (tmp_path / "measured.jsonl").write_text(json.dumps({"turns": [f"Count: {words.title()}!"]}) + "\n")
    measured = recipe.prompts.measured_grams([tmp_path / "measured.jsonl"])
    folder = tmp_path / "sets"
    folder.mkdir()
    for file in data.glob("*.jsonl"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "instructions.jsonl").write_text(json.dumps({"prompt": f"Continue {words}, please."}) + "\n")
    kinds = Counter(task["kind"] for task in recipe.prompts.tasks(folder, 1, 50, measured))
    assert kinds["instruction"] == 0 and kinds["maths"] > 0
    assert Counter(task["kind"] for task in recipe.prompts.tasks(folder, 1, 50, set()))["instruction"] == 1
    assert recipe.responses.unfit(f"So what is {words} then?", measured) == "measured"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("How do I read a file?", None),
        ("How?", "length"),
        ("Wie schreibt man ä, ö, ü, é und ß auf?", "not English"),
        ("What is <|im_start|> good for here?", "special token"),
        ("do do do do do do do do", "repetitive"),
    ],
)
def test_unfit_prompts(recipe: Any, prompt: str, reason: str | None) -> None:
    assert recipe.responses.unfit(prompt, set()) == reason


def test_gaps_and_excerpts_are_parts_of_their_files(recipe: Any, data: Path) -> None:
    files = recipe.prompts.read_files(data)
    texts = {file.text for file in files}
    fim = recipe.prompts.fim(files, random.Random(0))
    for _ in range(200):
        text = next(fim)["text"]
        _, _, rest = text.rpartition("<|fim_prefix|>")
        prefix, _, suffix = rest.removesuffix("<|fim_middle|>").partition("<|fim_suffix|>")
        assert any(prefix in whole and suffix in whole for whole in texts)
    parts = recipe.prompts.excerpts(files, random.Random(0))
    for _ in range(50):
        part = next(parts)
        assert 200 <= len(part.text) <= recipe.prompts.LONGEST_EXCERPT
        old, new = recipe.prompts.rename(part.text, random.Random(0))
        assert part.text.count(old) >= 3 and new not in part.text


def respond(recipe: Any, target: Target, tasks: list[dict[str, Any]], stop_after: int | None = None) -> list[Any]:
    """Return the lines of tasks, as many as there are when the pool is stopped."""
    writer = recipe.responses.Writer(target, set(), TOKENS)
    lines: list[Any] = []
    with Engine(target, max_batch_size=4) as engine:
        pool = recipe.responses.Pool(engine)
        for _, line in pool.lines(map(writer.job, tasks)):
            lines += [line] if line is not None else []
            if len(lines) == stop_after:
                pool.stop()
    return lines


def test_responses_come_back_token_for_token(recipe: Any, target: Target, data: Path) -> None:
    tasks = list(recipe.prompts.tasks(data, 1, 50, set()))
    by_id = {task["id"]: task for task in tasks}
    lines = respond(recipe, target, tasks)
    assert sorted(line["id"] for line in lines) == sorted(by_id)
    assert target.tokenizer is not None
    chats, greedy = recipe.chats.ChatTokens(target.tokenizer), 0
    with Engine(target) as engine:
        for line in lines:
            if "dropped" in line:
                continue
            document = chats.document(by_id[line["id"]], line)
            assert loop_begin(document.tokens[document.supervised].tolist(), **recipe.responses.REPEAT) is None
            begin = int(document.supervised.int().argmax())
            end = len(document.tokens)
            if len(line["turns"]) > 1 or "temperature" in by_id[line["id"]]:
                continue
            greedy += 1
            params = SamplingParams(end - begin)
            [completion] = engine.generate([document.tokens[:begin].tolist()], params)
            assert completion.token_ids == document.tokens[begin:].tolist()
    assert greedy > 5


def test_a_stopped_pool_begins_unfinished_tasks_again(recipe: Any, target: Target, data: Path) -> None:
    tasks = [task for task in recipe.prompts.tasks(data, 1, 50, set()) if task["kind"] in ("edit", "maths", "fim")]
    whole = {line["id"]: line for line in respond(recipe, target, tasks)}
    first = respond(recipe, target, tasks, stop_after=5)
    assert 5 <= len(first) < len(tasks)
    done = {line["id"] for line in first}
    second = respond(recipe, target, [task for task in tasks if task["id"] not in done])
    assert {line["id"]: line for line in first + second} == whole


def test_a_prompt_that_is_too_long_is_dropped(recipe: Any, target: Target) -> None:
    task = {"id": "0" * 16, "kind": "edit", "turns": [{"text": "word " * 20_000}]}
    [line] = respond(recipe, target, [task])
    assert line["dropped"] and "turns" not in line


def test_shards_survive_a_kill(recipe: Any, tmp_path: Path, constants: Callable[..., None]) -> None:
    constants(recipe.shards, SHARD_LINES=3)
    folder, packed = tmp_path / "responses", tmp_path / "packed"
    shards = recipe.shards.Shards(folder, "part-0")
    for number in range(4):
        shards.append({"id": str(number), "turns": [{"response": "ä\u2028\n"}]})
    assert recipe.shards.pack(folder, packed) == 4
    full = (packed / "part-0-000.jsonl.xz").stat().st_mtime_ns
    with (folder / "part-0-001.jsonl").open("ab") as file:
        file.write(b'{"id": "4", "tur')
    assert [line["id"] for line in recipe.shards.read_shards(folder)] == ["0", "1", "2", "3"]
    shards = recipe.shards.Shards(folder, "part-0")
    for number in range(4, 8):
        shards.append({"id": str(number), "turns": []})
    lines = list(recipe.shards.read_shards(folder))
    assert [line["id"] for line in lines] == list("01234567")
    assert recipe.shards.pack(folder, packed) == 8 and (packed / "part-0-000.jsonl.xz").stat().st_mtime_ns == full
    assert recipe.shards.unpack(tmp_path / "again", packed) == 8
    assert list(recipe.shards.read_shards(tmp_path / "again")) == lines
    with pytest.raises(FileExistsError, match="has shards already"):
        recipe.shards.unpack(folder, packed)


def test_holes_are_parts_of_long_files(recipe: Any, target: Target, tmp_path: Path) -> None:
    assert target.tokenizer is not None
    chats = recipe.chats.ChatTokens(target.tokenizer)
    (tmp_path / "short.py").write_text("pass\n" * 79)
    assert recipe.measure_tau.holes(chats, tmp_path, 4) == []
    (tmp_path / "long.py").write_text("".join(f"x{number} = {number}\n" for number in range(100)))
    prompts = recipe.measure_tau.holes(chats, tmp_path, 4)
    assert len(prompts) == 4 and len(set(map(tuple, prompts))) > 1
    for prompt in prompts:
        text = target.tokenizer.decode(prompt)
        prefix, suffix = text.split("<|fim_suffix|>")
        before, behind = (int(word) for word in (prefix.split()[-1], suffix.split()[0].removeprefix("x")))
        assert behind - before - 1 in (1, 3, 6)


def test_code_with_a_hole_is_a_part_of_the_file(recipe: Any) -> None:
    code = "".join(f"x{number} = {number}\n" for number in range(500))
    for seed in range(50):
        text = recipe.code_files.with_hole(code, random.Random(seed)).removesuffix("<|endoftext|>")
        prefix, suffix, middle = re.split(r"<\|fim_(?:suffix|middle)\|>", text.removeprefix("<|fim_prefix|>"))
        assert prefix + middle + suffix in code and prefix and len(middle) >= recipe.code_files.HOLE[0]


def test_a_mixture_holds_whole_documents_of_each_folder(
    recipe: Any, run: Callable[..., None], target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    identity = {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": {"writer": "people"}}
    for name, value in (("a", 5), ("b", 6)):
        writer = DataWriter(tmp_path / name, identity)
        writer.begin()
        for number in range(6):
            writer.add(number, [Document(torch.full((10 + number,), value), torch.ones(10 + number, dtype=torch.bool))])
        writer.finish()
    options = ["--target", tiny_target_dir, "--data", tmp_path / "a", tmp_path / "b"]
    run("mix", *options, "--tokens", 25, 1000, "--out", tmp_path / "mixed")
    documents = list(read_data(tmp_path / "mixed"))
    of_a = [len(document.tokens) for document in documents if document.tokens[0] == 5]
    assert 25 <= sum(of_a) < 25 + 15 and len(documents) - len(of_a) == 6
    values = [int(document.tokens[0]) for document in documents]
    assert values not in (sorted(values), sorted(values, reverse=True))
    assert all((document.tokens == document.tokens[0]).all() for document in documents)
    with pytest.raises(SystemExit):
        run("mix", *options, "--tokens", 25, "--out", tmp_path / "other")


def test_recorded_hidden_states_are_those_of_the_documents(
    recipe: Any,
    run: Callable[..., None],
    tiny_target_dir: Path,
    target: Target,
    data: Path,
    tmp_path: Path,
    restored_signals: None,
    constants: Callable[..., None],
) -> None:
    prompts, recorded = tmp_path / "prompts.jsonl", tmp_path / "recorded"
    constants(recipe.recording, FILE_TOKENS=1000)
    constants(recipe.code_files, TOKENS=100)

    run("prompts", "--data", data, "--out", prompts, "--count", 40)
    options = ("--target", tiny_target_dir, "--prompts", prompts, "--out", tmp_path / "responses", "--tokens", 30)
    layers = ("--target-layers", "0,1")
    run("responses", *options, "--batch", 4, "--dense", "--record", recorded, *layers)
    assert len(list(recorded.glob("*.safetensors"))) > 1
    run("code_files", "--target", tiny_target_dir, "--data", data, "--out", tmp_path / "also/data")
    code = read_data(tmp_path / "also/data")
    settings = HiddenStateSettings()
    plan_hidden_states(tmp_path / "also/hidden-states", target, code, (0, 1), settings).write()
    also = ("--also", tmp_path / "also")
    run("recording", "--target", tiny_target_dir, "--recorded", recorded, "--out", tmp_path / "packed", *also, *layers)
    documents = read_data(tmp_path / "packed/data")
    stored = read_hidden_states(tmp_path / "packed/hidden-states")
    stored.check(target, documents, (0, 1))
    answered = [line for line in recipe.shards.read_shards(tmp_path / "responses") if "turns" in line]
    assert not {line["kind"] for line in answered} & set(recipe.documents.COPIES)
    trained = sum(not recipe.documents.is_validation(line["id"]) for line in answered)
    assert len(documents) - len(code) == trained and len(code) > 10
    for document, hidden_states in zip(documents, stored, strict=True):
        [computed] = target_hidden_states(target, (0, 1), [document.tokens])
        # Keys and values had 8 bits while the target responded.
        assert (hidden_states - computed).norm() < 0.05 * computed.norm()


@pytest.mark.slow
def test_commands_stop_and_resume(
    recipe: Any,
    run: Callable[..., None],
    tiny_target_dir: Path,
    tiny_eagle3_dir: Path,
    data: Path,
    tmp_path: Path,
    restored_signals: None,
    constants: Callable[..., None],
) -> None:
    prompts, responses = tmp_path / "prompts.jsonl", tmp_path / "responses"

    run("prompts", "--data", data, "--out", prompts, "--count", 40)
    tasks = {task["id"] for task in recipe.prompts.read_lines(prompts)}
    options = ("--target", tiny_target_dir, "--prompts", prompts, "--out", responses, "--batch", 4, "--tokens", TOKENS)
    command = [sys.executable, RECIPE / "responses.py", *options, "--share", "0/2"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as process:
        while not list(responses.glob("*.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert {line["id"] for line in recipe.shards.read_shards(responses)} <= tasks
    for part in range(2):
        run("responses", *options, "--share", f"{part}/2")
    lines = list(recipe.shards.read_shards(responses))
    assert {line["id"] for line in lines} == tasks and len(lines) == len(tasks)
    constants(recipe.documents, VALIDATION=3)
    options = ("--target", tiny_target_dir, "--prompts", prompts)
    for _ in range(2):  # the second time nothing is added
        run("documents", *options, "--responses", responses, "--out", tmp_path)
        counts = [len(read_data(tmp_path / name)) for name in ("data", "validation")]
        assert sum(counts) == sum("turns" in line for line in lines) and all(counts)
    run("documents", *options, "--responses", responses, "--out", tmp_path / "dense", "--dense")
    dense = read_data(tmp_path / "dense/data")
    assert len(dense) < counts[0] and len(read_data(tmp_path / "dense/validation")) == counts[1]
    kinds = {task["kind"] for task in recipe.prompts.read_lines(prompts)} - WRITTEN
    sizes = ("--count", 2, "--draft-tokens", 3, "--max-new-tokens", 32, "--out", tmp_path / "tau.json")
    run("measure_tau", *options, "--drafter", tiny_eagle3_dir, "lookup", "--kinds", *sorted(kinds), *sizes)
    results = json.loads((tmp_path / "tau.json").read_text())
    assert [result["draft_tokens"] for result in results] == [0, 3, 3] * (len(results) // 3) and results
    assert all(result["identical"] == 1 and result["tau"] >= 1 for result in results)


def test_parts_of_a_file_hold_all_but_unused_rows(recipe: Any, tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "target.gguf"
    tensors = {
        name: rng.standard_normal((40, 32), dtype=np.float32)
        for name in ("token_embd.weight", "blk.0.attn_q.weight", "output.weight")
    }
    writer = gguf.GGUFWriter(file, "qwen2")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    used = np.arange(38) % 3 == 0
    recipe.gpu_inputs.write_parts(file, used, tmp_path, 2000)
    assert len(list(tmp_path.glob("target.*.gz"))) > 2
    joined = recipe.on_gpu.join(tmp_path, tmp_path / "joined.gguf")
    for tensor in gguf.GGUFReader(joined).tensors:
        expected = tensors[tensor.name].copy()
        if tensor.name != "blk.0.attn_q.weight":
            expected[:38][~used] = 0
            expected[38:] = 0
        assert np.array_equal(tensor.data, expected), tensor.name
    max(tmp_path.glob("target.*.gz")).unlink()
    with pytest.raises(SystemExit, match="not complete"):
        recipe.on_gpu.join(tmp_path, tmp_path / "joined.gguf")


@pytest.mark.slow
def test_responses_and_training_by_the_clock(
    recipe: Any,
    run: Callable[..., None],
    tiny_target_dir: Path,
    tiny_eagle3_dir: Path,
    data: Path,
    tmp_path: Path,
    constants: Callable[..., None],
) -> None:
    prompts, inputs, out = tmp_path / "prompts.jsonl", tmp_path / "inputs", tmp_path / "out"
    run("prompts", "--data", data, "--out", prompts, "--count", 100)
    options = ("--target", tiny_target_dir, "--data", data, "--prompts", prompts, "--responses", tmp_path / "none")
    run("gpu_inputs", *options, "--out", inputs)
    constants(recipe.on_gpu, SLOTS=700, LONGEST=192)
    options = ("--inputs", inputs, "--target", tiny_target_dir, "--init", tiny_eagle3_dir, "--out", out)
    options += ("--device", "cpu", "--rows", 4, "--documents", 20, "--held-out", 2, "--batch", 2, "--anchors", 16)
    began = time.monotonic()
    run("on_gpu", *options, "--respond", 2, "--train", 2)
    assert time.monotonic() - began < 60
    documents = list(recipe.on_gpu.read_documents(out / "responses.npz"))
    assert len(documents) > 3 and all(document.supervised.any() for document in documents)
    rates = [line["rate"] for line in read_log(out / "drafter.run/log.jsonl")]
    assert len(rates) > 2 and max(rates) > 0.5 and rates[-1] < 0.5 * max(rates)
    drafter = load_drafter(out / "drafter", target=load_target(tiny_target_dir))
    chosen = drafter.network.kept.tolist()
    counts = Counter(
        int(token) for document in read_data(out / "data") for token in document.tokens[document.supervised]
    )
    least = min(counts[token] for token in chosen)
    assert all(token in chosen for token, count in counts.items() if count > least)
