"""Training: it learns, and an interrupted run ends with the same weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from several_processes import assert_no_process_group, writing_threads
from torch import nn

from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion import train as train_module
from blockdraft.diffusion.create import new_model
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.noise import intervals
from blockdraft.diffusion.settings import DiffusionRecipe, LikelihoodSettings, NewSettings
from blockdraft.diffusion.text import Tokens, read_texts
from blockdraft.diffusion.train import MovingAverage, train
from blockdraft.errors import NumbersError, UsageError
from blockdraft.training import checkpoints
from blockdraft.training.graceful_shutdown import FINISH
from blockdraft.training.progress import Progress
from blockdraft.training.trainer import run_folder

SMALL = {"length": 12, "batch": 4, "warmup": 2, "held_out": 0.1, "save_every": 2, "eval_every": 0, "ema": 0.0}
SMALL |= {"dtype": "float32"}  # whatever the processor


def texts(count: int = 200) -> list[Tokens]:
    """Five tokens over and over, in two parts."""
    ids = torch.arange(count) % 5 + 60
    return [Tokens(part, torch.ones(len(part), dtype=torch.bool)) for part in ids.split(count - 50)]


def run(model_of: Any, out: Path, steps: int, progress: Progress | None = None, **changes: Any) -> list[dict[str, Any]]:
    recipe = DiffusionRecipe(**SMALL | changes)
    return train(model_of(4), texts(), steps, out, recipe, progress or Progress())


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, two: Path) -> bool:
    theirs = weights(two)
    return all(torch.equal(weight, theirs[name]) for name, weight in weights(one).items())


class Killed(Exception):
    pass


def killing(step: int) -> Progress:
    """Progress that ends the process, as it were, after this step."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith(f"step {step} "):
            raise Killed

    return Progress(progress)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_interrupted_anywhere(model_of: Any, tmp_path: Path, ema: float) -> None:
    lines = run(model_of, tmp_path / "whole", 5, ema=ema)
    for step in (1, 2, 3):
        with pytest.raises(Killed):
            run(model_of, tmp_path / "cut", 5, killing(step), ema=ema)
    again = run(model_of, tmp_path / "cut", 5, ema=ema)
    assert same(tmp_path / "whole", tmp_path / "cut")
    timed = {"tokens_per_second"}
    assert [[v for k, v in line.items() if k not in timed] for line in lines] == [
        [v for k, v in line.items() if k not in timed] for line in again
    ]
    log = [json.loads(line) for line in (run_folder(tmp_path / "cut") / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5] and "held_out_bits" in log[-1]


def test_a_run_goes_on_behind_its_end(model_of: Any, tmp_path: Path) -> None:
    run(model_of, tmp_path / "out", 3)
    notes: list[str] = []
    run(model_of, tmp_path / "out", 3, Progress(note=notes.append))
    assert any("has done its 3 steps" in note for note in notes)
    run(model_of, tmp_path / "out", 4)
    run(model_of, tmp_path / "whole", 4)
    assert same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_it_learns(model_of: Any, tmp_path: Path) -> None:
    how = LikelihoodSettings(length=12, draws=4)
    before = likelihood(model_of(4), texts(), how).bits_per_token
    model = model_of(4)
    recipe = DiffusionRecipe(**SMALL | {"learning_rate": 3e-3})
    lines = train(model, texts(), 40, tmp_path / "out", recipe)
    trained = load_model(tmp_path / "out", "cpu")
    after = likelihood(trained, texts(), how).bits_per_token
    assert after < before / 3 and lines[-1]["loss"] < lines[0]["loss"] / 2
    assert likelihood(model, texts(), how).bits_per_token == after  # the network itself is what was written
    assert lines[-1]["held_out_bits"] == pytest.approx(after, rel=0.5)


def test_another_block_size(model_of: Any, tmp_path: Path) -> None:
    run(model_of, tmp_path / "out", 1, block_size=12)
    assert load_model(tmp_path / "out", "cpu").config.block_size == 12


@pytest.mark.slow
def test_running_mean(model_of: Any, tmp_path: Path) -> None:
    """The file holds the moving average of the weights, which few steps begin."""
    kept = []
    for steps in (1, 2, 3):
        run(model_of, tmp_path / f"plain{steps}", steps)
        kept.append(weights(tmp_path / f"plain{steps}")["model.norm.weight"])
    run(model_of, tmp_path / "mean", 3, ema=0.9)
    wanted = model_of(4).network.model.norm.weight
    for step, own in enumerate(kept):
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * own
    assert torch.allclose(weights(tmp_path / "mean")["model.norm.weight"], wanted, atol=1e-6)


def test_each_row_once_in_an_epoch(model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def spy(model: Any, ids: torch.Tensor, noise: Any) -> torch.Tensor:
        seen.append(ids)
        assert not noise.masked[:, 0].any()
        return model.network.model.norm.weight.sum() * torch.ones(ids.shape)

    monkeypatch.setattr("blockdraft.diffusion.train.losses", spy)
    ids = torch.arange(120) + 60
    train(
        model_of(4),
        [Tokens(ids, torch.ones(120, dtype=torch.bool))],
        5,
        tmp_path / "out",
        DiffusionRecipe(**SMALL | {"held_out": 0.0, "complementary": True}),
    )
    rows = [row[0].item() for batch in seen for row in batch[:4]]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(60, 180, 12)) and rows[:10] != rows[10:]
    assert all(torch.equal(*batch.chunk(2)) for batch in seen)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"length": 250},
            "which make 0 rows of 250 with something to learn, 0 of them held out; give more",
        ),
        ({"held_out": 1.0}, "16 of them held out"),
        ({"block_size": 13}, "block_size is 13 and rows have 12 tokens"),
        ({"length": 300}, "length is 300, and the model has a context of 256"),
        ({"low": 0.9, "high": 0.5}, "low is 0.9 and high 0.5"),
        ({"low": 0.0}, "low is 0.0 and high 1.0"),
        ({"schedule": "cosine", "complementary": True}, "complementary masks take the schedule linear"),
        ({"schedule": "quick"}, "schedule must be 'linear', 'square', "),
    ],
)
def test_bad_settings(model_of: Any, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run(model_of, tmp_path / "out", 2, **changes)
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_written_by_time_too(model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, saved = checkpoints.save, []

    def save(folder: Path, step: int, *rest: Any) -> None:
        original(folder, step, *rest)
        saved.append(step)

    monkeypatch.setattr(checkpoints, "save", save)
    run(model_of, tmp_path / "hourly", 3, save_every=0, save_minutes=60.0)
    assert saved == [3]
    run(model_of, tmp_path / "always", 3, save_every=0, save_minutes=1e-9)
    assert saved == [3, 1, 2, 3]


def test_another_run_is_left_alone(model_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model_of, out, 2)
    with pytest.raises(UsageError, match=r"holds a run with learning_rate = 0.0003 \(now 0.1\)"):
        run(model_of, out, 3, learning_rate=0.1)
    with pytest.raises(UsageError, match="has done 2 steps, and 1 are asked for"):
        run(model_of, out, 1)
    run(model_of, out, 2, save_every=1)  # which changes nothing that is learned
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(UsageError, match="exists and is no run of this command"):
        run(model_of, other, 1)


def test_a_loss_that_is_no_number(model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model_of, tmp_path / "out", 2)
    monkeypatch.setattr(
        "blockdraft.diffusion.train.losses", lambda model, ids, noise: model.network.model.norm.weight.sum() / 0
    )
    with pytest.raises(
        NumbersError, match=r"step 3 are not both finite; lower the learning rate. The checkpoint of step 2 "
    ):
        run(model_of, tmp_path / "out", 3)
    state = checkpoints.newest(run_folder(tmp_path / "out") / "checkpoints")
    assert state is not None and state["step"] == 2


def test_a_model_that_is_not_finite_is_not_trained(model_of: Any, tmp_path: Path) -> None:
    """The message blames the model and not the learning rate, also if no row holds the token at first."""
    model = model_of(4)
    with torch.no_grad():
        model.network.model.embed_tokens.weight[200] = torch.nan
    with pytest.raises(NumbersError, match=r"weight model.embed_tokens.weight is not finite; copy its files again"):
        train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    model = model_of(4)
    model.network.model.norm.weight.data.fill_(3e38)
    with pytest.raises(NumbersError, match="before anything was learned: .*; begin with another model"):
        train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    assert not list(tmp_path.iterdir())


def test_bfloat16_where_the_processor_multiplies_it(
    model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerator: None
) -> None:
    """Losses in bfloat16 are about those in float32."""
    lines = {}
    real = train_module.losses
    for able in (True, False):
        seen = []

        def spy(*given: Any, seen: list[bool] = seen) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return real(*given)

        monkeypatch.setattr(train_module, "losses", spy)
        monkeypatch.setattr("blockdraft.training.devices.multiplies_bfloat16", lambda able=able: able)
        AcceleratorState._reset_state(True)
        lines[able] = run(model_of, tmp_path / str(able), 3, dtype="auto")
        assert {*seen} == {able}
    for rounded, whole in zip(lines[True], lines[False], strict=True):
        assert rounded["loss"] != whole["loss"] and rounded["loss"] == pytest.approx(whole["loss"], rel=0.02)
    assert lines[True][-1]["held_out_bits"] == pytest.approx(lines[False][-1]["held_out_bits"], rel=0.02)
    assert weights(tmp_path / "True")["model.norm.weight"].dtype == torch.float32


def test_the_folder_that_it_began_with_may_go(folder_of: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of(), tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    model = load_model(folder, "cpu")
    shutil.rmtree(folder)
    train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 2}


def test_rows_with_nothing_to_learn_are_left_out(model_of: Any, tmp_path: Path) -> None:
    """Rows without a token to learn are left out before rows are held out, so there is something to measure."""
    ids, notes = torch.arange(120) % 5 + 60, list[str]()
    recipe = DiffusionRecipe(**SMALL | {"held_out": 0.2})
    lines = train(
        model_of(4), [Tokens(ids, torch.arange(120) < 70)], 1, tmp_path / "out", recipe, Progress(note=notes.append)
    )
    assert "held_out_bits" in lines[-1] and notes[0].startswith("4 rows of 12 tokens to train on, 2 held out")
    assert "4 rows without a token to learn, left out" in notes


def test_told_to_finish(model_of: Any, tmp_path: Path) -> None:
    """The run ends after the present step with a whole model, and the same command resumes it."""
    notes: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("step 2 "):
            (run_folder(tmp_path / "out") / FINISH).touch()

    lines = run(model_of, tmp_path / "out", 9, Progress(progress, notes.append), save_every=0)
    assert (
        len(lines) == 3 and "held_out_bits" in lines[-1] and any("Told to finish at step 3" in note for note in notes)
    )
    assert not (run_folder(tmp_path / "out") / FINISH).exists()
    run(model_of, tmp_path / "out", 4, save_every=0)
    run(model_of, tmp_path / "whole", 4, save_every=0)
    assert same(tmp_path / "out", tmp_path / "whole")


def test_how_long_it_takes_is_told(model_of: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    run(model_of, tmp_path / "out", 5, Progress(note=notes.append), batch=None)
    assert "4 rows a step" in notes[0]
    assert any(" s a step, so about 1 min for the 2 steps left; touch " in note for note in notes)


def test_times_are_searched(model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval found is sampled from, reported, and kept when a run is resumed."""
    clips: list[tuple[float, float]] = []
    real = train_module.training_noise

    def spy(eligible: Any, size: int, schedule: str, clip: tuple[float, float], *rest: Any) -> Any:
        clips.append(tuple(clip))
        return real(eligible, size, schedule, clip, *rest)

    monkeypatch.setattr(train_module, "training_noise", spy)
    lines = run(model_of, tmp_path / "out", 4, search_every=2, search_batches=2, low=0.2, high=0.9)
    found = lines[1]["low"], lines[1]["high"]
    assert clips == [(0.2, 0.9)] * 2 + [found] * 2 and found in intervals() and "low" not in lines[0]
    with pytest.raises(Killed):
        run(model_of, tmp_path / "cut", 4, killing(3), search_every=2, search_batches=2, low=0.2, high=0.9)
    clips.clear()
    run(model_of, tmp_path / "cut", 4, search_every=2, search_batches=2, low=0.2, high=0.9)
    assert clips == [found] * 2 and same(tmp_path / "out", tmp_path / "cut")


def test_blocks_of_one_token_need_no_search(model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of such blocks are masked, since any other time only adds variance."""
    seen: list[torch.Tensor] = []
    real = train_module.losses

    def spy(model: Any, ids: torch.Tensor, noise: Any) -> torch.Tensor:
        seen.append(noise.masked)
        return real(model, ids, noise)

    monkeypatch.setattr(train_module, "losses", spy)
    run(model_of, tmp_path / "out", 1, block_size=1, search_every=1, held_out=0.0)
    assert seen[0][:, 1:].all() and len(seen) == 1


def test_the_papers_network_is_trained_and_read_back(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Buffers of the paper's checkpoints are written too."""
    shape = NewSettings(layers=1, hidden_size=16, heads=2, context=32, block_size=4)
    new_model(tiny_target_dir, tmp_path / "new", shape)
    model = load_model(tmp_path / "new", "cpu")
    recipe = DiffusionRecipe(**SMALL | {"low": 0.45, "high": 0.95, "ema": 0.5})
    train(model, texts(), 2, tmp_path / "out", recipe)
    trained = load_model(tmp_path / "out", "cpu").network.state_dict()
    assert trained["sampling_eps_min"].item() == pytest.approx(0.45)
    assert trained["sampling_eps_max"].item() == pytest.approx(0.95)
    ours = model.network.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in trained.items() if "sampling" not in name)


def test_a_length_that_is_no_multiple_of_the_block(model_of: Any, tmp_path: Path) -> None:
    """The last block of each row is shorter, and all of its tokens count."""
    [line] = run(model_of, tmp_path / "out", 1, length=13, block_size=5)
    assert line["loss"] > 0 and line["held_out_bits"] > 0


@pytest.mark.slow
def test_two_processes_learn_what_one_does(model_of: Any, folder_of: Any, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(Path(train_module.__file__).parents[2])
    data, one, two = tmp_path / "text.txt", tmp_path / "one", tmp_path / "two"
    data.write_text("the inn in the thing. " * 30)
    how = {"length": 12, "batch": 4, "warmup": 2, "ema": 0.5, "complementary": True, "search_every": 2, "save_every": 2}
    how["dtype"] = "float32"  # whatever the processor, so that sums in another order hardly differ
    model = model_of(4)
    train(model, read_texts([str(data)], RecordSettings(), model), 3, one, DiffusionRecipe(**how))
    # On CPUs too, Accelerate's launcher starts several processes when told that they are many "GPUs".
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    given = ["--model", folder_of(), "--data", data, "--out", two, "--device", "cpu", "--steps", 3]
    given += [part for name, value in how.items() for part in (f"--{name.replace('_', '-')}", str(value).lower())]
    started = [sys.executable, *launch, "-m", "blockdraft", "diffusion", "train", *map(str, given)]

    environment = writing_threads(tmp_path / "ends", environment)
    ended = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert_no_process_group(tmp_path / "ends", processes=2)
    assert "2 processes (multi_cpu)" in ended.stderr.lower()
    logs = [
        [json.loads(line) for line in (run_folder(out) / "log.jsonl").read_text().splitlines()] for out in (one, two)
    ]
    assert len(logs[0]) == len(logs[1]) == 3
    for ours, theirs in zip(*logs, strict=True):
        for name in ours.keys() - {"tokens_per_second"}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-2, atol=2e-4)


def test_shards_are_refused(model_of: Any, tmp_path: Path) -> None:
    sharded: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(UsageError, match="use --multi_gpu in place of --use_fsdp"):
        train(model_of(4), texts(), 1, tmp_path / "out", accelerator=sharded)


def linear(value: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def test_moving_average_forgets_the_first_steps() -> None:
    made = linear(0.0)
    mean, wanted = MovingAverage(made, 0.15), 0.0
    for step in range(4):
        nn.init.constant_(made.weight, step + 1.0)
        mean.update(step)
        decay = min(0.15, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * (step + 1)
        assert abs(mean.weights["weight"].item() - wanted) < 1e-6
    plain = MovingAverage(made, 0.0)
    nn.init.constant_(made.weight, 9.0)
    plain.update(3)
    assert plain.weights["weight"].item() == 9.0


def test_moving_average_replaces_the_weights_for_a_while() -> None:
    made = linear(5.0).train()
    mean = MovingAverage(made, 0.9, {"weight": torch.full((1, 1), 2.0)})
    with mean.applied():
        assert made.weight.item() == 2.0 and not made.training
    assert made.weight.item() == 5.0 and made.training
    mean.load_into_network()
    assert made.weight.item() == 2.0
