"""Runs on a tiny random target: what they write, how they go on, what they refuse."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from copies import copy_with
from safetensors.torch import load_file, save_file
from several_processes import assert_no_process_group, writing_threads
from thinned import thinned
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_fixtures import after_step, press_ctrl_c

from blockdraft import load_drafter, load_target
from blockdraft.folders import held
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.gguf.drafter import gguf_trained
from blockdraft.models import bundled_drafter, known
from blockdraft.targets import Target, target_fingerprint
from blockdraft_train import checkpoints, hidden_state_sources, preflight, quantized_weights
from blockdraft_train.data import hidden_states
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.devices import make_accelerator
from blockdraft_train.graceful_shutdown import FINISH, Stopped, StopSignals
from blockdraft_train.hidden_state_sources import FOLDER
from blockdraft_train.job import TrainingJob
from blockdraft_train.progress import Progress, RunLog, read_log
from blockdraft_train.settings_files import read_settings
from blockdraft_train.trainer import Trainer, run_folder, train
from blockdraft_train.variant import find_variant
from blockdraft_train.variants import variant_names

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

BASE = {
    "layers": "2",
    "target_layers": "0,1",
    "block-size": "5",
    "length": "40",
    "batch": "4",
    "anchors": "6",
    "held-out": "6",
    "steps": "6",
    "learning-rate": "3e-3",
    "eval-every": "3",
    "eval-prompts": "2",
    "eval-tokens": "6",
    "save-every": "2",
    "save-dtype": "float32",
    "trackers": "",
}
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tiny_target_dir: Path, tiny_data_dir: Path) -> Run:
    def call(out: Path, variant: str = "dflash", data: Path = tiny_data_dir, **changes: str) -> list[dict[str, Any]]:
        notes, more = changes.pop("notes", None), int(changes.pop("more", 0))
        report: Any = changes.pop("report", lambda stage, done, total: None)
        other_responses = bool(changes.pop("other_responses", False))
        named = {name.replace("_", "-"): value for name, value in changes.items()}
        kind = find_variant(variant).recipe_class
        base = {name: value for name, value in BASE.items() if hasattr(kind, name.replace("-", "_"))}
        recipe = read_settings(kind, flags=base | named)
        progress = Progress(report, notes.append if notes is not None else lambda text: None)  # type: ignore[attr-defined]
        accelerator = make_accelerator(recipe, run_folder(out), "cpu")
        target = load_target(tiny_target_dir, device="cpu")
        documents = read_data(data, unfinished=True)
        job = TrainingJob(
            variant,
            target,
            documents,
            out,
            recipe,
            accelerator,
            progress=progress,
            more=more,
            other_responses=other_responses,
        )
        return train(job)

    return call


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(run: Run, whole_runs: Path) -> Callable[..., Path]:
    """Return a function that returns the folder of a run with these settings that nothing interrupted.

    Tests share it. Its metrics are in `lines_of`.
    """

    def made(**changes: str) -> Path:
        folder = whole_runs / ("-".join(f"{name}={value}" for name, value in sorted(changes.items())) or "usual")
        if not folder.exists():
            run(folder, **changes)
        return folder

    return made


def lines_of(out: Path) -> list[dict[str, Any]]:
    return read_log(run_folder(out) / "log.jsonl")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def without_speed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


# Of heads, a test in `variants/` says so at less expense.
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name == "dflash" else pytest.mark.slow)
        for name in sorted({*variant_names()} - {"medusa", "mtp"})
    ],
)
def test_a_run_learns_and_leaves_a_drafter(
    variant: str, run: Run, tmp_path: Path, tiny_target_dir: Path, with_pictures: None
) -> None:
    out = tmp_path / "drafter"
    few = {"jumps": "0.1"} if variant == "flow" else {}  # learning from itself takes it longer
    lines = run(out, variant, steps="30", trackers="tensorboard", eval_every="15", save_every="10", **few)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert sum(line["loss"] for line in lines[-5:]) < 0.95 * sum(line["loss"] for line in lines[:5])
    end = lines[-1]
    assert 1 <= end["tau"] <= 6 and 1 <= end["held_out_accepted_length"] <= 6 and len(end["held_out_accuracy"]) >= 4
    assert "tau" in lines[14] and "tau" not in lines[15]
    drafter = load_drafter(out, target=load_target(tiny_target_dir))
    assert drafter.block_size >= 5
    folder = run_folder(out)
    assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == lines
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any(folder.rglob("events.out.tfevents*"))
    kind = find_variant(variant).recipe_class
    assert read_settings(kind, folder / "recipe.toml").length == 40
    assert len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_that_stopped_goes_on_to_the_same_weights(
    optimizer: str, run: Run, whole: Callable[..., Path], tmp_path: Path
) -> None:
    uninterrupted = whole(optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", optimizer=optimizer, report=after_step(4, press_ctrl_c))  # type: ignore[arg-type]
    notes: list[str] = []
    lines = run(tmp_path / "stopped", optimizer=optimizer, notes=notes)  # type: ignore[arg-type]
    saved = [file.name for file in sorted((run_folder(tmp_path / "stopped") / "checkpoints").iterdir())]
    assert saved == ["step-00000004.pt", "step-00000006.pt"] and any("Resuming from step 4" in note for note in notes)
    assert same(uninterrupted, tmp_path / "stopped")
    assert without_speed(lines_of(uninterrupted)) == without_speed(lines)


@pytest.mark.parametrize(("minutes", "count"), [("60", 1), ("1e-9", 3)])
def test_checkpoints_by_time(run: Run, tmp_path: Path, minutes: str, count: int) -> None:
    run(tmp_path / "drafter", steps="3", save_every="0", save_minutes=minutes, eval_prompts="0", keep="9")
    assert len(list((run_folder(tmp_path / "drafter") / "checkpoints").glob("step-*.pt"))) == count


@pytest.mark.slow
@pytest.mark.parametrize(("place", "number"), thinned(["forward", "between"], [signal.SIGTERM, signal.SIGINT], keep=2))
def test_a_signal_saves_what_was_learned(
    place: str,
    number: int,
    run: Run,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a step, here one of rounded weights, whose start is saved, or while its metrics are logged,
    which are kept."""
    rare = {"save_every": "0", "save_minutes": "0", "eval_prompts": "0", "qat_bits": "4"}
    uninterrupted = whole(**rare)
    calls, where = [0], (Trainer, "forward_sums") if place == "forward" else (RunLog, "add")
    original = getattr(*where)

    def stop(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            signal.raise_signal(number)
        return original(*arguments)

    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(*where, stop)
        notes: list[str] = []
        with pytest.raises(Stopped) as stopped:
            run(tmp_path / "stopped", notes=notes, **rare)  # type: ignore[arg-type]
    assert stopped.value.exit_status == 128 + number and signal.getsignal(number) is before
    assert any("stops once its state is saved" in note for note in notes) == (place == "between")
    state = checkpoints.newest(run_folder(tmp_path / "stopped") / "checkpoints")
    assert state is not None and state["step"] == (1 if place == "forward" else 2)
    lines = run(tmp_path / "stopped", **rare)
    assert same(uninterrupted, tmp_path / "stopped")
    assert without_speed(lines_of(uninterrupted)) == without_speed(lines)


def test_a_second_signal_saves_no_rounded_weights(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the weights of a rounded step, which the first signal ended, become what they were."""
    forward, put, calls = Trainer.forward_sums, quantized_weights.set_weights, list[str]()

    def interrupted(*arguments: Any) -> Any:
        calls.append("forward")
        if len(calls) > 1:
            signal.raise_signal(signal.SIGINT)
        return forward(*arguments)

    def interrupted_later(weights: Any, values: Any) -> None:
        calls.append("set")
        if len(calls) > 3:
            signal.raise_signal(signal.SIGINT)
        put(weights, values)

    monkeypatch.setattr(Trainer, "forward_sums", interrupted)
    monkeypatch.setattr(quantized_weights, "set_weights", interrupted_later)
    with pytest.raises(Stopped):
        run(tmp_path / "drafter", save_every="0", save_minutes="0", qat_bits="4")
    assert calls == ["forward", "set", "forward", "set"]
    assert checkpoints.newest(run_folder(tmp_path / "drafter") / "checkpoints") is None


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_signal_interrupts_an_evaluation_but_the_last(
    step: int, run: Run, whole: Callable[..., Path], tmp_path: Path
) -> None:
    rare = {"save_every": "0", "save_minutes": "0"}

    def stop(stage: str, done: int, total: int) -> None:
        if stage == f"step {step}: measuring tau":
            signal.raise_signal(signal.SIGTERM)

    notes: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", notes=notes, report=stop, **rare)  # type: ignore[arg-type]
    state = checkpoints.newest(run_folder(tmp_path / "stopped") / "checkpoints")
    assert state is not None and state["step"] == step
    assert ("The evaluation of step 3 is skipped." in notes) == (step == 3)
    lines = run(tmp_path / "stopped", **rare)
    assert same(whole(**rare), tmp_path / "stopped")
    assert [line["step"] for line in lines if "tau" in line] == ([6] if step == 3 else [3, 6])


def test_a_second_signal_stops_at_once() -> None:
    stops = StopSignals(lambda text: None)
    with stops.listening(), pytest.raises(Stopped), stops.deferred():
        signal.raise_signal(signal.SIGINT)
        assert stops.number == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the second signal was deferred")


@pytest.mark.slow
def test_a_resumed_run_reads_the_features_that_are_kept_beside_it(
    run: Run, whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, stopped = whole(hidden_states="memory", eval_prompts="0"), tmp_path / "stopped"
    assert not (run_folder(uninterrupted) / FOLDER).exists()
    notes: list[str] = []
    stop: Any = after_step(4, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, hidden_states="memory", eval_prompts="0", notes=notes, report=stop)  # type: ignore[arg-type]
    assert any("hidden states are stored in" in note for note in notes)
    shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-broken"))
    with monkeypatch.context() as patched:
        patched.setattr(hidden_states, "target_hidden_states", lambda *_: pytest.fail("computed again"))
        run(stopped, hidden_states="memory", eval_prompts="0")
    assert same(uninterrupted, stopped)
    assert not (run_folder(stopped) / FOLDER).exists()
    broken = tmp_path.with_name(f"{tmp_path.name}-broken") / stopped.name
    [shard] = (run_folder(broken) / FOLDER).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])
    run(broken, hidden_states="memory", eval_prompts="0")
    assert same(uninterrupted, broken)


@pytest.mark.slow
def test_features_that_find_no_room_on_the_disk_stay_in_memory(
    run: Run,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[str], AbstractContextManager[None]],
) -> None:
    uninterrupted = whole(hidden_states="memory", eval_prompts="0")
    plan = hidden_state_sources.plan_hidden_states
    with monkeypatch.context() as patched:
        patched.setattr(hidden_state_sources, "plan_hidden_states", lambda *given: replace(plan(*given), free=10**6))
        patched.setattr("blockdraft_train.data.hidden_states.save", lambda *_: pytest.fail("features are written"))
        run(tmp_path / "narrow", hidden_states="memory", eval_prompts="0")
    assert same(uninterrupted, tmp_path / "narrow")
    notes = list[str]()
    with full_disk("safetensors"):
        run(tmp_path / "full", hidden_states="memory", eval_prompts="0", notes=notes)  # type: ignore[arg-type]
    assert any("computes them again" in note and "No space left" in note for note in notes)
    assert same(uninterrupted, tmp_path / "full")


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(run: Run, tmp_path: Path) -> None:
    first = run(tmp_path / "drafter")
    assert run(tmp_path / "drafter") == first


@pytest.mark.slow
def test_a_larger_number_of_steps_goes_on_behind_the_end_to_the_same_weights(run: Run, tmp_path: Path) -> None:
    for out in (tmp_path / "whole", tmp_path / "stopped"):
        run(out, steps="4", eval_prompts="0")
    before = weights(tmp_path / "whole")
    lines = run(tmp_path / "whole", steps="9", eval_prompts="0")
    assert [line["step"] for line in lines] == list(range(1, 10)) and lines[4]["rate"] > lines[3]["rate"]
    assert not torch.equal(before["fc.weight"], weights(tmp_path / "whole")["fc.weight"])
    stop: Any = after_step(6, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", more="5", eval_prompts="0", steps="4", report=stop)
    notes: list[str] = []
    run(tmp_path / "stopped", more="5", eval_prompts="0", steps="4", notes=notes)  # type: ignore[arg-type]
    assert any("Resuming from step 6" in note for note in notes)
    assert same(tmp_path / "whole", tmp_path / "stopped")
    run(tmp_path / "stopped", eval_prompts="0", steps="4", notes=notes)  # type: ignore[arg-type]
    assert any("has done its 9 steps; a larger --steps" in note for note in notes)
    assert same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_a_drafter_of_part_of_the_vocabulary_is_written_in_the_format_that_holds_it(
    run: Run, tmp_path: Path, tiny_target_dir: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "drafter"
    lines = run(whole, draft_vocab="50")
    assert 0.3 < lines[-1]["covered"] <= 1 and "tau" in lines[-1]
    drafter: Any = load_drafter(whole, target=load_target(tiny_target_dir))
    assert len(drafter.reduced_head.kept) == 50
    measured = load_file(run_folder(whole) / "measured/model.safetensors")
    assert {*load_file(whole / "model.safetensors")} - {*measured} == {"embed_tokens.weight"}  # costs time each time
    with pytest.raises(KeyboardInterrupt):
        run(out, draft_vocab="50", report=after_step(4, press_ctrl_c))  # type: ignore[arg-type]
    run(out, draft_vocab="50")
    assert same(whole, out)


@pytest.mark.slow
def test_when_asked_to_finish_it_ends_within_a_few_steps(run: Run, tmp_path: Path) -> None:
    out, notes = tmp_path / "drafter", list[str]()
    changes: dict[str, Any] = {"steps": "500", "save_every": "0", "eval_prompts": "0", "eval_every": "0", "keep": "1"}
    lines = run(out, **changes, notes=notes, report=after_step(13, (run_folder(out) / FINISH).touch))  # type: ignore[arg-type]
    assert [line["step"] for line in lines] == list(range(1, 15)) and lines[-1]["rate"] == 0
    assert "held_out_loss" in lines[-1] and not (run_folder(out) / FINISH).exists()
    assert any("Finishing: the learning rates fall until step 14" in note for note in notes)
    ended = weights(out)
    (run_folder(out) / FINISH).touch()  # too late, and forgotten
    assert run(out, **changes) == lines and not (run_folder(out) / FINISH).exists()
    assert torch.equal(ended["fc.weight"], weights(out)["fc.weight"])
    assert len(run(out, **changes, more="2")) == 16


def test_two_runs_do_not_share_a_folder(run: Run, tmp_path: Path) -> None:
    with held(tmp_path / "drafter", "training"), pytest.raises(ValueError, match="in use by process .* training since"):
        run(tmp_path / "drafter")


def test_answers_of_another_model_are_refused_unless_named(
    run: Run, tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data_dir, data)
    manifest = json.loads((data / "data.json").read_text())
    for author, fits in ((target_fingerprint(load_target(tiny_target_dir)), True), ("0123456789abcdef", False)):
        written = {"writer": "target", "author": author}
        (data / "data.json").write_text(json.dumps(manifest | {"written_by": written}))
        if not fits:
            with pytest.raises(ValueError, match=r"another model \(fingerprint 0123456789abcdef\).*--other-responses"):
                run(tmp_path / "other", data=data, steps="1", eval_prompts="0")
        run(tmp_path / author, data=data, steps="1", eval_prompts="0", other_responses="" if fits else "yes")


def test_data_that_grow_leave_a_run_as_it_was(run: Run, tmp_path: Path, tiny_data_dir: Path) -> None:
    """The same for data that were still being made when it began."""
    documents = list(read_data(tiny_data_dir))
    writer = DataWriter(tmp_path / "data", {"tokenizer": read_data(tiny_data_dir).tokenizer})
    writer.begin()
    for row in range(0, 40, 2):
        writer.add(row, [documents[row]])
    writer.flush()
    small, notes, out = {"steps": "3", "eval_prompts": "0", "save_every": "1"}, list[str](), tmp_path / "stopped"
    run(tmp_path / "whole", data=tmp_path / "data", **small)
    with pytest.raises(KeyboardInterrupt):
        run(out, data=tmp_path / "data", **small, report=after_step(1, press_ctrl_c))  # type: ignore[arg-type]
    for row in range(1, 40, 2):
        writer.add(row, [documents[row]])
    writer.finish()
    run(out, data=tmp_path / "data", **small, notes=notes)
    [note] = [note for note in notes if "grown" in note]
    assert re.search(rf"has grown by 20 documents \(\d+ tokens\) since .* --init {out} --out FOLDER", note)
    assert any(note.startswith("14 documents to train on, 6 held out") for note in notes)
    assert same(tmp_path / "whole", out)
    with pytest.raises(ValueError, match="holds a run with data = .*choose another --out"):
        run(out, **small)  # other data


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": "2"},
        {"accumulation": "4"},
        {"hidden_states": "memory"},
        {"chunk": "3"},
        {"checkpoint_activations": "true"},
    ],
)
def test_how_a_step_is_computed_does_not_matter(changes: dict[str, str], run: Run, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", objective="decay=0.5,forward_kl=0.5")
    other = run(tmp_path / "other", objective="decay=0.5,forward_kl=0.5", **changes)
    tolerance = 2e-2 if "hidden_states" in changes else 2e-4  # hidden states in memory are rounded
    for ours, theirs in zip(plain, other, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["held_out_loss" if "held_out_loss" in ours else "loss"] > 0


@pytest.mark.slow
def test_bfloat16_trains_float32_weights(run: Run, tmp_path: Path) -> None:
    lines = run(tmp_path / "drafter", dtype="bfloat16", steps="20")
    assert lines[-1]["loss"] < lines[0]["loss"]
    state = checkpoints.newest(run_folder(tmp_path / "drafter") / "checkpoints")
    assert state is not None and {tensor.dtype for tensor in state["network"].values()} == {torch.float32}


def test_weights_are_quantized_in_every_other_step(run: Run, tmp_path: Path) -> None:
    """Here the second step of three."""
    changes = {"steps": "3", "eval_prompts": "0", "dtype": "float32"}
    plain = run(tmp_path / "plain", **changes)
    few = run(tmp_path / "few", **changes, qat_bits="4")
    many = run(tmp_path / "many", **changes, qat_bits="8")
    assert few[0]["loss"] == many[0]["loss"] == plain[0]["loss"]
    assert abs(few[1]["loss"] - plain[1]["loss"]) > 4 * abs(many[1]["loss"] - plain[1]["loss"]) > 0
    # Evaluated and written weights are not quantized.
    assert few[2]["held_out_loss"] == pytest.approx(plain[2]["held_out_loss"], rel=0.05)
    weight = weights(tmp_path / "few")["layers.0.self_attn.q_proj.weight"]
    assert len(weight[0].unique()) == weight.size(1)
    with pytest.raises(ValueError, match="must be 4 or 8, got '5'"):
        run(tmp_path / "odd", qat_bits="5")


@pytest.mark.parametrize("clip", [0.01, 0.0])
def test_the_optimizer_gets_clipped_gradients_and_the_scheduled_rate(clip: float, run: Run, tmp_path: Path) -> None:
    norms, rates = list[float](), list[float]()

    def watch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        gradients = [p.grad.flatten() for group in groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        rates.append(groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(watch)
    try:
        lines = run(tmp_path / "drafter", clip=str(clip), warmup="0.5", eval_every="0", eval_prompts="0")
    finally:
        hook.remove()
    assert min(line["gradient_norm"] for line in lines) > 0.1
    assert norms == pytest.approx([clip or line["gradient_norm"] for line in lines], rel=1e-3)
    assert rates == pytest.approx([3e-3 * line["rate"] for line in lines]) and len(set(rates)) > 3


def test_fixed_blocks_are_another_run(run: Run, tmp_path: Path) -> None:
    random, fixed = run(tmp_path / "a", steps="2"), run(tmp_path / "b", steps="2", anchor_placement="fixed")
    assert random[0]["loss"] != fixed[0]["loss"]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is full")
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(
    run: Run, whole: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    partial = run_folder(out) / "checkpoints" / "step-00000004.partial"
    with pytest.raises(ValueError, match="No space left on device.*newest checkpoint is step-00000002.pt"):
        run(out, report=after_step(3, lambda: partial.symlink_to("/dev/full")))  # type: ignore[arg-type]
    run(out)
    assert same(whole(), out)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is full")
def test_a_disk_that_is_full_for_the_log_names_the_last_checkpoint(
    run: Run, whole: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    log, lines = run_folder(out) / "log.jsonl", tmp_path / "lines"

    def fill() -> None:
        log.rename(lines)
        log.symlink_to("/dev/full")

    with pytest.raises(ValueError, match=r"No space left on device.*newest checkpoint is step-00000002.pt; free"):
        run(out, report=after_step(3, fill))  # type: ignore[arg-type]
    lines.replace(log)
    run(out)
    assert same(whole(), out)


def test_a_drafter_says_what_it_was_trained_for(run: Run, tmp_path: Path, tiny_target_dir: Path) -> None:
    short = {"steps": "1", "eval_prompts": "0", "held_out": "1"}
    run(tmp_path / "first", **short, qat_bits="4")
    file = tmp_path / "first" / "config.json"
    config = json.loads(file.read_text())
    assert config["qat_bits"] == 4
    assert config["target_fingerprint"] == load_target(tiny_target_dir, device="cpu").source_fingerprint
    own, others = list[str](), list[str]()
    run(tmp_path / "second", **short, init=str(tmp_path / "first"), notes=own)
    assert "qat_bits" not in json.loads((tmp_path / "second" / "config.json").read_text())
    file.write_text(json.dumps(config | {"target_fingerprint": "0123456789abcdef"}))
    run(tmp_path / "third", **short, init=str(tmp_path / "first"), notes=others)
    warnings = [note for note in others if note not in own]
    assert len(warnings) == 1 and "was trained for another target (fingerprint 0123456789abcdef)" in warnings[0]


def test_a_gguf_file_says_what_it_was_trained_for(tiny_target_dir: Path) -> None:
    file, target = bundled_drafter(known("smollm2")), load_target(tiny_target_dir, device="cpu")
    recipe = find_variant("eagle3").recipe_class(init=str(file))
    trained_for = gguf_trained(open_gguf(file)).target
    assert f"{file} was trained for another target (fingerprint {trained_for})" in preflight.init_note(recipe, target)
    assert preflight.init_note(recipe, Mock(wraps=target, source_fingerprint=trained_for)) is None


def test_what_does_not_fit_is_refused_at_the_start(
    run: Run,
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_disk: Callable[[int], None],
) -> None:
    out = tmp_path / "drafter"

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run(out, **changes)
        assert not (out / "config.json").exists()

    refused("target_layers must be layers of the target, 0 to 2", target_layers="0,7")
    refused("target_layers is 5, a number of layers, but the target has 3;.* name the layers", target_layers="5")
    refused("length is 4000 and the target's context is 256", length="4000")
    refused("held_out is 40 and the data hold 40", held_out="40")
    refused("mask_token_id is 100000 and the target's vocabulary has 265 tokens, 0 to 264", mask_token_id="100000")
    refused(
        "4 things do not fit:\n- length is 4000.*\n- held_out is 40.*\n- target_layers is 9.*\n- mask_token_id is 2,"
        " which",
        length="4000",
        held_out="40",
        target_layers="9",
        mask_token_id="2",
    )
    refused("ends outputs", mask_token_id="2")
    refused("qat_bits is 4, and the drafter has layers of 20 inputs", qat_bits="4", intermediate_size="20")
    refused("qat_bits is 4, and drafters of this kind are never quantized", variant="medusa", qat_bits="4")
    refused("no folder made by|does not exist", hidden_states=str(tmp_path / "nowhere"))
    refused("'nll' is unknown", objective="nll=1")
    refused("holds no draft|cannot be read|absent", init=str(tmp_path / "nowhere"))
    writer = DataWriter(tmp_path / "foreign", {"tokenizer": "0123"})
    writer.begin()
    writer.add(0, [Document(torch.arange(9), torch.ones(9).bool())])
    writer.finish()
    refused("made with the tokenizer 0123", data=tmp_path / "foreign")
    free_disk(100)
    refused("needs up to .* GiB .* are free; free some", steps="2")
    monkeypatch.undo()
    out.mkdir()
    (out / "thesis.tex").touch()
    refused("the folder to write must be new, empty or a draft model's.*, got .*drafter'")
    shutil.rmtree(run_folder(out))
    refused("is no run of this command; choose another --out")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        run(tmp_path / "file" / "drafter")


@pytest.mark.slow
def test_a_run_is_not_gone_on_with_under_another_recipe(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "drafter", steps="2")
    with pytest.raises(ValueError, match=r"with learning_rate = 0.003 \(now 0.1\), seed = 0 \(now 1\); give"):
        run(tmp_path / "drafter", steps="2", learning_rate="0.1", seed="1")
    run(tmp_path / "drafter", steps="2", eval_every="1")  # says how often, not what


def test_loss_that_is_no_number_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        run(tmp_path / "drafter", learning_rate="1e30", clip="0", steps="6")


@pytest.mark.parametrize("broken", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_a_target_that_computes_no_numbers_is_named(
    broken: str, run: Run, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = tmp_path / "target", load_target
    shutil.copytree(tiny_target_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[broken][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setitem(globals(), "load_target", lambda path, **given: load(folder, **given))
    with pytest.raises(FloatingPointError, match="The target computed numbers that are not finite at step 1"):
        run(tmp_path / "drafter")
    assert not run_folder(tmp_path / "drafter").exists()


def test_targets_that_cap_their_logits_teach_no_distributions(tiny_target_dir: Path) -> None:
    target: Target = load_target(tiny_target_dir)
    tokens = torch.arange(5, 30)
    preflight.check_teacher(target, tokens)
    head = target.head
    with pytest.raises(ValueError, match="scales or caps its logits; choose objectives that learn from tokens"):
        preflight.check_teacher(copy_with(target, head=lambda hidden: 0.1 * head(hidden)), tokens)


def words(target: Path, data: Path, out: Path, **changes: str) -> list[str]:
    """Return the words of a command that trains."""
    flags = BASE | {name.replace("_", "-"): value for name, value in changes.items()}
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    folders = ["--target", str(target), "--data", str(data), "--out", str(out), "--device", "cpu"]
    return ["train", "dflash", *folders, *given]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


@pytest.mark.slow
@pytest.mark.long
def test_killed_at_any_moment_it_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = {"steps": "40", "save_every": "1", "eval_every": "0", "eval_prompts": "0", "length": "80"}
    forked.run(*words(tiny_target_dir, tiny_data_dir, whole, **changes))
    folder = run_folder(killed) / "checkpoints"
    for least in (3, 11, 24):
        process = forked.Command(*words(tiny_target_dir, tiny_data_dir, killed, **changes))
        deadline = time.monotonic() + 240
        while not any(int(path.stem[5:]) >= least for path in folder.glob("step-*.pt")):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    forked.run(*words(tiny_target_dir, tiny_data_dir, killed, **changes))
    assert same(whole, killed)
    steps = [json.loads(line)["step"] for line in (run_folder(killed) / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(8, (2, 5), id="twice"), pytest.param(60, (2, 9, 17, 26, 38), id="often", marks=pytest.mark.long)],
)
def test_killed_within_any_step_it_goes_on_to_the_same_weights_and_leaves_nothing(
    steps: int, kills: tuple[int, ...], tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    whole, killed, draw = tmp_path / "whole", tmp_path / "killed" / "drafter", random.Random(0)
    changes = {"steps": str(steps), "save_every": "1", "eval_every": "1", "eval_prompts": "1", "length": "80"}
    log = run_folder(killed) / "log.jsonl"
    forked.run(*words(tiny_target_dir, tiny_data_dir, whole, **changes))
    for least in kills:
        process = forked.Command(*words(tiny_target_dir, tiny_data_dir, killed, **changes))
        deadline = time.monotonic() + 240
        while not (log.exists() and log.read_text().count("\n") >= least):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))  # some moment of measuring, writing or computing
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    forked.run(*words(tiny_target_dir, tiny_data_dir, killed, **changes))
    assert same(whole, killed)
    assert sorted(path.name for path in killed.parent.iterdir()) == ["drafter", "drafter.run"]
    assert not list(run_folder(killed).glob(".*")) and not list(run_folder(killed).rglob("*.partial"))


@pytest.mark.slow
def test_ended_by_a_signal_a_command_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    changes = {"steps": "40", "save_every": "0", "eval_every": "0", "eval_prompts": "0", "length": "80"}
    forked.run(*words(tiny_target_dir, tiny_data_dir, whole, **changes))
    given, stderr = words(tiny_target_dir, tiny_data_dir, stopped, **changes), tmp_path / "stderr"
    process = forked.Command(*given, stderr=stderr)
    log, deadline = run_folder(stopped) / "log.jsonl", time.monotonic() + 240
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, stderr.read_text()
    [saved] = (run_folder(stopped) / "checkpoints").iterdir()
    assert f"Interrupted; the same command resumes from step {int(saved.stem[5:])}" in stderr.read_text()
    stderr.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped", "stopped.run", "whole", "whole.run"]
    forked.run(*given)
    assert same(whole, stopped)


@pytest.mark.slow
def test_a_signal_finishes_the_run(tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    out = tmp_path / "drafter"
    changes = {"steps": "100000", "eval_every": "0", "save_every": "0"}
    process = forked.Command(*words(tiny_target_dir, tiny_data_dir, out, **changes))
    log, deadline = run_folder(out) / "log.jsonl", time.monotonic() + 240
    while not (log.exists() and log.read_text().count("\n") > 5):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(240) == 0 and load_drafter(out, target=load_target(tiny_target_dir)).block_size == 5
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["rate"] == 0 and "tau" in last


def launcher_variables(*words: str) -> dict[str, str]:
    """Return the environment variables that Accelerate's launcher adds for these words."""
    given, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return {name: value for name, value in prepare_multi_gpu_env(given).items() if os.environ.get(name) != value}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("ddp", "muon"),
        ("fsdp2", "adamw"),
        pytest.param("ddp", "adamw", marks=pytest.mark.long),
        pytest.param("fsdp2", "muon", marks=pytest.mark.long),
    ],
)
def test_two_processes_have_the_loss_of_one(
    kind: str, optimizer: str, run: Run, tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    # In float32 whatever the processor, so that sums in another order hardly differ.
    changes = {"objective": "decay=0.5,dpace=0.25,forward_kl=0.25", "optimizer": optimizer, "dtype": "float32"}
    changes |= {"qat_bits": "8"}
    if kind == "fsdp2":  # nothing is written between an evaluation and a step of rounded weights
        changes |= {"eval_prompts": "0"}
    single, double = tmp_path / "single", tmp_path / "double"
    run(single, **changes)
    given = words(tiny_target_dir, tiny_data_dir, double, accumulation="2", **changes)
    # With --multi_gpu, Accelerate's launcher starts several processes on CPUs too.
    kinds = {"ddp": ("--multi_gpu",), "fsdp2": ("--use_fsdp", "--fsdp_version", "2")}
    # Some free port: two of these tests may run at once.
    launch = (*kinds[kind], "--num_processes", "2", "--main_process_port", "0", "-m", "blockdraft")
    group = launcher_variables(*launch)
    if (kind, optimizer) in (("ddp", "muon"), ("fsdp2", "adamw")):
        stderr = forked.run_twice_at_once(*given, folder=tmp_path / "ends", more=group)
    else:  # the launcher itself, which takes longer, since all its processes import everything
        command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *given]
        environment = writing_threads(tmp_path / "ends", ENVIRONMENT)
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 0, ended.stderr
        stderr = ended.stderr
    assert f"2 processes ({'fsdp' if kind == 'fsdp2' else 'multi_cpu'})" in stderr.lower()
    texts = [(run_folder(out) / "log.jsonl").read_text() for out in (single, double)]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert len(logs[0]) == len(logs[1]) == 6
    for ours, theirs in zip(*logs, strict=True):
        for name in ("loss", "gradient_norm", "accepted_length", "held_out_loss", "held_out_accepted_length"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-3)
    theirs = weights(double)
    for name, tensor in weights(single).items():
        if optimizer == "muon":
            # It iterates in bfloat16 on processors that multiply it, so sums in another order move single weights far.
            assert float((theirs[name] - tensor).abs().mean()) < 5e-4, name
        else:
            torch.testing.assert_close(theirs[name], tensor, rtol=2e-2, atol=2e-4)
    assert_no_process_group(tmp_path / "ends", processes=2)
    if (kind, optimizer) == ("ddp", "muon"):
        return  # the longer tests resume this kind too
    (run_folder(double) / "checkpoints" / "step-00000006.pt").unlink()
    shutil.copytree(double, tmp_path / "before")
    resumed = forked.run_twice_at_once(*given, folder=tmp_path / "resumed", more=group)
    assert "Resuming from step 4" in resumed and same(tmp_path / "before", double)


def test_tokenizer_fingerprint_is_what_the_data_hold(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert target.tokenizer is not None
    assert read_data(tiny_data_dir).tokenizer == tokenizer_fingerprint(target.tokenizer)
