"""`blockdraft diffusion` on tiny random models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from blockdraft_diffusion.cli import UNKNOWN
from blockdraft_diffusion.create import convert
from blockdraft_diffusion.settings import ConvertSettings
from blockdraft_train import checkpoints

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_accelerator(fresh_accelerator: None) -> None:
    """What one test says of devices is nothing to the next."""


@pytest.fixture
def run(blockdraft: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the thing in the inn " * 20)
    return lambda *args: blockdraft("diffusion", *args)


@pytest.fixture(scope="session")
def model(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion") / "model"
    convert(tiny_target_dir, folder, ConvertSettings(block_size=4))
    return folder


@pytest.mark.slow
def test_from_a_target_to_an_answer(tiny_target_dir: Path, run: Run) -> None:
    code, out, err = run("convert", tiny_target_dir, "--block-size", 4, "--no-token-shift", "--out", "made")
    assert (code, out) == (0, "") and "made: blocks of 4, without token shift, mask token <|mask|> (id 3)" in err
    sizes = ("--length", 16, "--batch", 2, "--warmup", 0)
    given = ("train", "--model", "made", "--data", "text.txt", "--out", "trained", *sizes)
    code, out, err = run(*given, "--steps", 3)
    assert (code, out) == (0, "")
    assert "step 3 of 3, loss " in err and "The model is in trained, " in err and "bits per held-out token" in err
    code, out, err = run(*given, "--steps", 4)
    assert code == 0 and "Resuming from step 3" in err and "step 4 of 4" in err
    code, out, err = run("perplexity", "text.txt", "--model", "trained", "--json", "--draws", 4, "--length", 16)
    report = json.loads(out)
    assert code == 0 and report["low"] < report["perplexity"] < report["high"] and not report["exact"]
    assert report["draws"] == 4 and 2 ** report["bits_per_token"] == pytest.approx(report["perplexity"])
    code, out, err = run("generate", "--model", "trained", "--max-new-tokens", 10, "the thing")
    assert code == 0 and out.endswith("\n")


def test_perplexity_in_words(model: Path, run: Run) -> None:
    code, out, _ = run("perplexity", "text.txt", "--model", model, "--length", 32)
    assert code == 0 and out.startswith("perplexity at most ") and "8 draws" in out
    code, out, _ = run("perplexity", "text.txt", "--model", model, "--length", 32, "--block-size", 1)
    assert code == 0 and out.startswith("perplexity ") and "at most" not in out and "draws" not in out
    report = json.loads(run("perplexity", "text.txt", "--model", model, "--block-size", 1, "--json")[1])
    assert report["exact"] and report["low"] == report["high"] == report["perplexity"]


def test_answers_as_json(model: Path, run: Run) -> None:
    how = ("generate", "--model", model, "--max-new-tokens", 9, "--seed", 1, "--ignore-eos", "--json")
    code, out, _ = run(*how, "--strategy", "left_to_right", "--show-steps", "hi")
    report = json.loads(out)
    assert code == 0 and len(report["token_ids"]) == 9 and report["finish_reason"] == "length"
    assert report["forwards"] >= 9 and report["tokens_per_forward"] == pytest.approx(9 / report["forwards"])
    assert report["steps"][-1][-1] is None or report["steps"][-1][-1] == report["token_ids"][-1]
    assert json.loads(run(*how, "--strategy", "threshold=0", "hi")[1])["forwards"] < report["forwards"]


def test_many_prompts(model: Path, run: Run) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "hi"}\n{"turns": ["a longer one", "x"]}\n')
    how = ("generate", "--model", model, "--max-new-tokens", 7, "--ignore-eos", "--seed", 3)
    code, out, _ = run(*how, "--prompts", "prompts.jsonl")
    report = sorted((json.loads(line) for line in out.splitlines()), key=lambda entry: entry["index"])
    assert code == 0 and [entry["index"] for entry in report] == [0, 1]
    assert json.loads(run(*how, "--json", "hi")[1])["token_ids"] == report[0]["token_ids"]
    code, _, err = run(*how, "--prompts", "prompts.jsonl", "hi")
    assert code == 2 and "--prompts prompts.jsonl and a prompt exclude each other" in err


def test_shown_steps(model: Path, run: Run) -> None:
    how = ("generate", "--model", model, "--max-new-tokens", 6, "--ignore-eos", "--strategy", "left_to_right")
    code, out, err = run(*how, "--show-steps", "hi")
    assert code == 0 and out == run(*how, "hi")[1]
    lines = [line for line in err.splitlines() if line.startswith(("'", '"'))]
    assert len(lines) == 6 and UNKNOWN in lines[0] and lines[0].count(UNKNOWN) >= lines[1].count(UNKNOWN)


def test_gaps(model: Path, run: Run) -> None:
    how = ("generate", "--model", model, "--max-new-tokens", 3, "--infill", "the thing [GAP] in the inn")
    code, out, err = run(*how, "--seed", 1)
    assert code == 0 and out.startswith("the thing ") and out.endswith(" in the inn\n")
    assert "tokens after the gap are in other blocks, so it does not see them; --block-size " in err
    size = int(err.split("--block-size ")[1].split()[0])
    code, out, err = run(*how, "--json", "--show-steps", "--block-size", size)
    report = json.loads(out)
    assert (code, err) == (0, "") and len(report["gap_token_ids"]) == 3 and len(report["token_ids"]) == size
    assert report["tokens_per_forward"] == pytest.approx(3 / report["forwards"])
    assert None not in report["steps"][-1] and report["steps"][-1] == report["token_ids"]


def test_from_nothing_by_a_recipe(tiny_target_dir: Path, run: Run) -> None:
    shape = ("--layers", 1, "--hidden-size", 16, "--heads", 2, "--context", 64, "--block-size", 4)
    code, out, err = run("new", "--like", tiny_target_dir, "--out", "new", *shape)
    assert (code, out) == (0, "") and "new: blocks of 4, without token shift, mask token <|mask|> (id 3)" in err
    code, out, _ = run("train", "--show-recipe", "--batch", 2)
    assert code == 0 and "\nbatch = 2\n" in out and "# Peak learning rate of AdamW." in out
    Path("recipe.toml").write_text("length = 16\nbatch = 8\nwarmup = 0\neval_every = 7\nheld_out = 0.0\n")
    given = ("train", "recipe.toml", "--model", "new", "--data", "text.txt", "--out", "trained", "--device", "cpu")
    code, out, err = run(*given, "--steps", 2, "--batch", 2)
    assert (code, out) == (0, "") and "The model is in trained; log" in err
    recipe = Path("trained.run/recipe.toml").read_text()
    assert "batch = 2\n" in recipe and "eval_every = 7\n" in recipe and "length = 16\n" in recipe


def test_interrupted(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C tells what the same command will do."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blockdraft_diffusion.train.train", interrupted)
    given = ("train", "--model", model, "--data", "text.txt", "--steps", 3, "--out", "trained")
    code, _, err = run(*given)
    assert code == 130 and "Interrupted before the first checkpoint; the same command starts over" in err
    checkpoints.save(Path("trained.run/checkpoints"), 7, {}, keep=1)
    assert "the same command resumes from step 7" in run(*given)[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--model", "nowhere", "hi"], "nowhere has no config.json of a model"),
        (["generate", "--model", "MODEL", "--strategy", "x", "hi"], "strategy is 'x'; use one of first_hitting"),
        (["generate", "--model", "MODEL", "--top-p", "0", "hi"], "--top-p must be greater than 0, got '0'"),
        (["generate", "--model", "MODEL", "--device", "abacus", "hi"], "Device abacus is not usable here"),
        (["generate", "--model", "MODEL", "--infill", "a \udcff[GAP]"], "The prompt is not valid UTF-8 text"),
        (
            ["train", "--model", "MODEL", "--data", "text.txt", "--steps", "1", "--out", "x", "--device", "abacus"],
            "Device abacus is not usable here",
        ),
        (["generate", "--model", "MODEL", "--infill", "a [GAP]", "hi"], "--infill and a prompt exclude each other"),
        (["generate", "--model", "MODEL", "--infill", "a [GAP]", "--stop", "x"], "--infill and --stop exclude"),
        (["new", "--out", "x", "--heads", "3"], "--hidden-size is 256 and heads 3"),
        (["train", "--model", "MODEL", "--steps", "3"], "--data and --out are missing"),
        (["train", "--lenght", "9"], "--lenght is unknown; did you mean length"),
        (["perplexity", "absent.txt", "--model", "MODEL"], "There is no absent.txt"),
        (["convert", "--mask-token-id", "0", "--out", "x"], "--mask-token-id is 0, an end token; give a token"),
    ],
)
def test_bad_input(args: list[str], message: str, model: Path, run: Run) -> None:
    code, out, err = run(*(model if item == "MODEL" else item for item in args))
    assert (code, out) == (2, "") and message in err and not Path("x").exists()
