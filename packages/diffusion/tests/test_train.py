"""Training loop: it learns, and an interrupted run ends with the same weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from accelerate.utils import DistributedType
from copies import copy_with
from safetensors.torch import load_file
from several_processes import assert_no_process_group

from blockdraft import machine
from blockdraft.errors import NumbersError, UsageError
from blockdraft_diffusion.create import new_model
from blockdraft_diffusion.folder import load_model
from blockdraft_diffusion.likelihood import likelihood
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_diffusion.settings import DiffusionRecipe, LikelihoodSettings, NewSettings
from blockdraft_diffusion.text import TextTokens, read_texts
from blockdraft_diffusion.train import train
from blockdraft_train import checkpoints
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.graceful_shutdown import FINISH
from blockdraft_train.progress import Progress
from blockdraft_train.trainer import run_folder

SMALL = {"length": 12, "batch": 4, "warmup": 2, "held_out": 0.1, "save_every": 2, "eval_every": 0, "ema": 0.0}
SMALL |= {"dtype": "float32"}  # the same on every processor


def texts(count: int = 200) -> list[TextTokens]:
    """Return two texts that repeat five tokens."""
    ids = torch.arange(count) % 5 + 60
    return [TextTokens(part, torch.ones(len(part), dtype=torch.bool)) for part in ids.split(count - 50)]


def run(model_of: Any, out: Path, steps: int, progress: Progress | None = None, **changes: Any) -> list[dict[str, Any]]:
    recipe = DiffusionRecipe(**SMALL | changes)
    return train(model_of(4), texts(), steps, out, recipe, progress or Progress())


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    others = weights(second)
    return all(torch.equal(weight, others[name]) for name, weight in weights(first).items())


def record_inputs(model: DiffusionModel) -> tuple[DiffusionModel, list[torch.Tensor]]:
    """Return the model and a list that collects the inputs of its network, `[B, 2, L]`: noisy and clean tokens."""
    inputs: list[torch.Tensor] = []
    hidden = model.network.hidden

    def record(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        inputs.append(tokens.view(len(tokens), 2, -1))
        return hidden(tokens, *args)

    return replace(model, network=copy_with(model.network, hidden=record)), inputs


class Killed(Exception):
    pass


def killing(step: int) -> Progress:
    """Return a progress callback that raises after this step."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith(f"step {step} "):
            raise Killed

    return Progress(progress)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_interrupted_run_resumes(model_of: Any, tmp_path: Path, ema: float) -> None:
    lines = run(model_of, tmp_path / "whole", 5, ema=ema)
    for step in (1, 2, 3):
        with pytest.raises(Killed):
            run(model_of, tmp_path / "cut", 5, killing(step), ema=ema)
    again = run(model_of, tmp_path / "cut", 5, ema=ema)
    assert same(tmp_path / "whole", tmp_path / "cut")
    for line in lines + again:
        del line["tokens_per_second"]
    assert lines == again
    log = [json.loads(line) for line in (run_folder(tmp_path / "cut") / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5] and "held_out_bits" in log[-1]


def test_finished_run_continues_with_more_steps(model_of: Any, tmp_path: Path) -> None:
    run(model_of, tmp_path / "out", 3)
    notes: list[str] = []
    run(model_of, tmp_path / "out", 3, Progress(note=notes.append))
    assert any("has done its 3 steps" in note for note in notes)
    run(model_of, tmp_path / "out", 4)
    run(model_of, tmp_path / "whole", 4)
    assert same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_it_learns(model_of: Any, tmp_path: Path) -> None:
    settings = LikelihoodSettings(length=12, draws=4)
    before = likelihood(model_of(4), texts(), settings).bits_per_token
    model = model_of(4)
    recipe = DiffusionRecipe(**SMALL | {"learning_rate": 3e-3})
    lines = train(model, texts(), 40, tmp_path / "out", recipe)
    trained = load_model(tmp_path / "out", "cpu")
    after = likelihood(trained, texts(), settings).bits_per_token
    assert after < before / 3 and lines[-1]["loss"] < lines[0]["loss"] / 2
    assert likelihood(model, texts(), settings).bits_per_token == after  # the network has the written weights
    assert lines[-1]["held_out_bits"] == pytest.approx(after, rel=0.5)


@pytest.mark.slow
def test_moving_average_is_written(model_of: Any, tmp_path: Path) -> None:
    """The file has the moving average of the weights."""
    norms = []
    for steps in (1, 2, 3):
        run(model_of, tmp_path / f"plain{steps}", steps)
        norms.append(weights(tmp_path / f"plain{steps}")["model.norm.weight"])
    run(model_of, tmp_path / "mean", 3, ema=0.9)
    expected = model_of(4).network.model.norm.weight
    for step, norm in enumerate(norms):
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * norm
    assert torch.allclose(weights(tmp_path / "mean")["model.norm.weight"], expected, atol=1e-6)


def test_each_epoch_trains_on_all_sequences(model_of: Any, tmp_path: Path) -> None:
    model, ids = model_of(4), torch.arange(120) + 60
    model, inputs = record_inputs(model)
    recipe = DiffusionRecipe(**SMALL | {"held_out": 0.0})
    train(model, [TextTokens(ids, torch.ones(120, dtype=torch.bool))], 5, tmp_path / "out", recipe)
    order = [sequence[1, 0].item() for batch in inputs for sequence in batch]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(60, 180, 12)) and order[:10] != order[10:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 250}, "which make 0 sequences of 250 with something to learn, 0 of them held out; give more"),
        ({"held_out": 1.0}, "16 of them held out"),
        ({"block_size": 13}, "block_size must be at most 12, the length of sequences, got 13"),
        ({"length": 300}, "length must be at most 256, the model's context, got 300"),
        ({"low": 0.9, "high": 0.5}, "low is 0.9 and high 0.5"),
        ({"low": 0.0}, "low is 0.0 and high 1.0"),
    ],
)
def test_bad_settings(model_of: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(model_of, tmp_path / "out", 2, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("minutes", "count"), [(60.0, 1), (1e-9, 2)])
def test_checkpoints_by_time(model_of: Any, tmp_path: Path, minutes: float, count: int) -> None:
    run(model_of, tmp_path / "out", 3, save_every=0, save_minutes=minutes)
    assert len(list((run_folder(tmp_path / "out") / "checkpoints").iterdir())) == count


def test_another_run_is_kept(model_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model_of, out, 2)
    with pytest.raises(UsageError, match=r"holds a run with learning_rate = 0.0003 \(now 0.1\)"):
        run(model_of, out, 3, learning_rate=0.1)
    with pytest.raises(UsageError, match="steps must be at least 2"):
        run(model_of, out, 1)
    run(model_of, out, 2, save_every=1)  # does not affect the weights
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(UsageError, match="exists and is no run of this command"):
        run(model_of, other, 1)


def test_loss_that_is_not_finite(model_of: Any, tmp_path: Path) -> None:
    message = "step 2 are not both finite; lower the learning rate, .* The newest checkpoint stays as it is"
    with pytest.raises(NumbersError, match=message):
        run(model_of, tmp_path / "out", 3, learning_rate=1e30, warmup=0, save_every=1)
    state = checkpoints.newest(run_folder(tmp_path / "out") / "checkpoints")
    assert state is not None and state["step"] == 1


def test_model_that_is_not_finite(model_of: Any, tmp_path: Path) -> None:
    """The message names the model and not the learning rate, even if no sequence has the token."""
    model = model_of(4)
    with torch.no_grad():
        model.network.model.embed_tokens.weight[200] = torch.nan
    with pytest.raises(NumbersError, match="weight model.embed_tokens.weight is not finite; copy or create"):
        train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    model = model_of(4)
    model.network.model.norm.weight.data.fill_(3e38)
    with pytest.raises(NumbersError, match="step 1 are not both finite"):
        train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    assert not list(tmp_path.iterdir())


def test_bfloat16_if_the_processor_supports_it(
    model_of: Any,
    tmp_path: Path,
    constants: Callable[..., None],
    fresh_accelerator: Callable[[], None],
) -> None:
    """Losses in bfloat16 are close to those in float32, and the weights stay float32."""
    lines = {}
    for supported in (True, False):
        constants(machine, BFLOAT16_FLAGS=machine.processor_flags() if supported else frozenset())
        fresh_accelerator()
        lines[supported] = run(model_of, tmp_path / str(supported), 3, dtype="auto")
    for bfloat16, float32 in zip(lines[True], lines[False], strict=True):
        assert bfloat16["loss"] != float32["loss"] and bfloat16["loss"] == pytest.approx(float32["loss"], rel=0.02)
    assert lines[True][-1]["held_out_bits"] == pytest.approx(lines[False][-1]["held_out_bits"], rel=0.02)
    assert weights(tmp_path / "True")["model.norm.weight"].dtype == torch.float32


def test_source_folder_may_be_deleted_after_loading(folder_of: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of(), tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    model = load_model(folder, "cpu")
    shutil.rmtree(folder)
    train(model, texts(), 1, tmp_path / "out", DiffusionRecipe(**SMALL))
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 2}


def test_sequences_without_a_token_to_learn_are_skipped(model_of: Any, tmp_path: Path) -> None:
    """They are skipped before sequences are held out, so the held-out ones have tokens to measure."""
    ids, notes = torch.arange(120) % 5 + 60, list[str]()
    recipe = DiffusionRecipe(**SMALL | {"held_out": 0.2})
    lines = train(
        model_of(4), [TextTokens(ids, torch.arange(120) < 70)], 1, tmp_path / "out", recipe, Progress(note=notes.append)
    )
    assert "held_out_bits" in lines[-1] and notes[0].startswith("4 training sequences of 12 tokens, 2 held out")
    assert "4 sequences without a token to learn, left out" in notes


def test_finish_request(model_of: Any, tmp_path: Path) -> None:
    """The run ends after the current step with a complete model, and the same command resumes it."""
    notes: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("step 2 "):
            (run_folder(tmp_path / "out") / FINISH).touch()

    lines = run(model_of, tmp_path / "out", 9, Progress(progress, notes.append), save_every=0)
    assert len(lines) == 3 and "held_out_bits" in lines[-1]
    assert any("Finishing with step 3" in note for note in notes)
    assert not (run_folder(tmp_path / "out") / FINISH).exists()
    run(model_of, tmp_path / "out", 4, save_every=0)
    run(model_of, tmp_path / "whole", 4, save_every=0)
    assert same(tmp_path / "out", tmp_path / "whole")


def test_paper_network_is_trained_and_loaded(tiny_target_dir: Path, tmp_path: Path) -> None:
    """The noise levels are written to the buffers of the paper's checkpoints."""
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


@pytest.mark.slow
def test_two_processes_match_one_process(model_of: Any, folder_of: Any, tmp_path: Path) -> None:
    data, single, double = tmp_path / "text.txt", tmp_path / "single", tmp_path / "double"
    data.write_text("the inn in the thing. " * 30)
    recipe = {"length": 12, "batch": 4, "warmup": 2, "ema": 0.5}
    recipe |= {"save_every": 2}
    recipe["dtype"] = "float32"  # so that the order of sums hardly matters
    model = model_of(4)
    train(model, read_texts([str(data)], RecordSettings(), model), 3, single, DiffusionRecipe(**recipe))
    args = ["--model", folder_of(), "--data", data, "--out", double, "--device", "cpu", "--steps", 3]
    args += [part for name, value in recipe.items() for part in (f"--{name.replace('_', '-')}", str(value).lower())]
    stderr = forked.run_twice_at_once("diffusion", "train", *args, folder=tmp_path / "ends")
    assert_no_process_group(tmp_path / "ends", processes=2)
    assert "2 processes (multi_cpu)" in stderr.lower()
    logs = [(run_folder(out) / "log.jsonl").read_text().splitlines() for out in (single, double)]
    assert len(logs[0]) == len(logs[1]) == 3
    for expected, actual in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        for name in expected.keys() - {"tokens_per_second"}:
            assert actual[name] == pytest.approx(expected[name], rel=1e-3)
    for name, tensor in weights(single).items():
        torch.testing.assert_close(weights(double)[name], tensor, rtol=1e-2, atol=2e-4)


def test_sharded_weights_are_not_supported(model_of: Any, tmp_path: Path) -> None:
    sharded: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(UsageError, match="use --multi_gpu in place of --use_fsdp"):
        train(model_of(4), texts(), 1, tmp_path / "out", accelerator=sharded)
