"""The bundled pair: it is there, small, well-behaved, and drafting changes nothing about its answers."""

import json
import os
from pathlib import Path

import pytest
from thinned import thinned

import blockdraft
from blockdraft.drafters import TINY_DRAFTER
from blockdraft.engine import mean_tau
from blockdraft.formats import read_config

PAIR = Path(blockdraft.__file__).parent / "pair/tiny"
SHARED = Path(os.environ.get("BLOCKDRAFT_DATA", Path(__file__).parents[2] / "shared/data"))
PROMPTS = [
    "A baker makes 4 trays of 6 rolls. She sells 9 rolls. How many rolls are left?",
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    '```python\ndef count_evens(numbers):\n    """Return how many of the numbers are even."""\n\n```',
    [{"role": "user", "content": "What is 37 + 58?"}],
    "grüße \U0001f600",
]


@pytest.fixture(scope="module", params=[TINY_DRAFTER], ids=lambda folder: folder.name)
def engine(request: pytest.FixtureRequest) -> blockdraft.Engine:
    target = blockdraft.load_target("bundled")
    return blockdraft.Engine(
        target, blockdraft.load_drafter(request.param, target=target), drafting=blockdraft.Drafting(None)
    )


@pytest.fixture(scope="module")
def plain(engine: blockdraft.Engine) -> blockdraft.Engine:
    return blockdraft.Engine(engine.target, blockdraft.load_drafter("none", target=engine.target))


def test_files_are_small_and_complete() -> None:
    files = [file for file in PAIR.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 40e6
    for folder in (PAIR / "target", TINY_DRAFTER):
        assert {"README.md", "config.json", "model.safetensors"} <= {file.name for file in folder.iterdir()}
        assert read_config(folder)["rope_theta"] == 1e4  # where readers of before transformers 5 look for it
    assert read_config(TINY_DRAFTER)["architectures"] == ["DFlashDraftModel"]


@pytest.mark.parametrize(
    ("prompt", "params"), thinned(PROMPTS, [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}], keep=2)
)
def test_drafting_changes_nothing(
    engine: blockdraft.Engine, plain: blockdraft.Engine, prompt: object, params: dict[str, float]
) -> None:
    sampling = blockdraft.SamplingParams(max_new_tokens=64, **params)  # type: ignore[arg-type]
    [drafted], [undrafted] = (e.generate([prompt], sampling) for e in (engine, plain))  # type: ignore[list-item]
    assert drafted.token_ids == undrafted.token_ids


@pytest.mark.slow
def test_backends_give_the_same_answers(engine: blockdraft.Engine, plain: blockdraft.Engine) -> None:
    """Ours and transformers', with and without drafter; greedy answers show the least difference."""
    assert engine.target.backend == "native"
    theirs = blockdraft.load_target("bundled", backend="hf")
    sampling = blockdraft.SamplingParams(max_new_tokens=64)
    expected = [
        blockdraft.Engine(
            theirs, blockdraft.load_drafter(name, target=theirs), drafting=blockdraft.Drafting(None)
        ).generate(PROMPTS, sampling)
        for name in ("none", None)
    ]
    for completions in (*expected, engine.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)):
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected[0]]


def test_drafting_pays(engine: blockdraft.Engine) -> None:
    completions = engine.generate(PROMPTS[:2], blockdraft.SamplingParams(max_new_tokens=128))
    assert mean_tau([completion.stats for completion in completions]) > 2
    assert [completion.finish_reason for completion in completions] == ["stop", "stop"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(None, id="all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["gsm8k", "humaneval"])
def test_benchmark_prompts(engine: blockdraft.Engine, plain: blockdraft.Engine, name: str, count: int | None) -> None:
    """The first 96 tokens of each; `recipes/tiny/measure.py` compares whole answers."""
    file = SHARED / f"prompts/{name}.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is not there; set BLOCKDRAFT_DATA to the folder that holds prompts/")
    prompts = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    sampling = blockdraft.SamplingParams(max_new_tokens=96)
    drafted, undrafted = (
        blockdraft.Engine(e.target, e.drafter, max_batch_size=16, drafting=blockdraft.Drafting(None)).generate(
            prompts, sampling
        )
        for e in (engine, plain)
    )
    different = [i for i, (a, b) in enumerate(zip(drafted, undrafted, strict=True)) if a.token_ids != b.token_ids]
    assert different == []
