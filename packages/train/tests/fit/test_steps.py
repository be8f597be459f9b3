"""The commands of a fit: how they read, and which of them run."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import forked
import psutil
import pytest
from command_line import commands_of
from typer.main import get_command

from blockdraft.cli import app
from blockdraft.errors import BlockdraftError
from blockdraft_train.fit import steps
from blockdraft_train.fit.facts import FitPlan
from blockdraft_train.fit.steps import Step, Where, done_steps, make_steps, run_steps

MakePlan = Callable[..., FitPlan]
WHERE = Where(Path("out"), "some/model", "bfloat16", "cpu", "hf")
ADAPTED = Where(Path("out"), "some/model", adapter="some/lora", revision="v2")


def test_every_command_is_one(make_plan: MakePlan) -> None:
    """Each can be read by the command line, whatever is asked for."""
    commands = commands_of(get_command(app))
    seconds = dict.fromkeys(("prompts", "data", "hidden-states", "train", "calibrate", "bench"), 1.0)
    plan = make_plan(hidden_states="disk", seconds=seconds, quantize="int8")
    for where in (WHERE, ADAPTED, Where(Path("out"), None)):
        made = make_steps(plan, where, ["chats.jsonl", "some/dataset"], ["--split", "test"])
        assert [step.name for step in made] == list(seconds)
        for step in made:
            command = commands[step.arguments[0]]
            context = command.make_context(step.name, list(step.arguments[1:]))
            decodes = step.name in ("calibrate", "bench")
            assert context.params.get("target") == (where.target or ("bundled" if decodes else None))
            assert (context.params["adapter"], context.params["revision"]) == (where.adapter, where.revision)
            assert step.line.startswith(f"blockdraft {step.name.replace('_', '-')} ")


def test_what_the_plan_says_is_what_the_commands_get(make_plan: MakePlan) -> None:
    made = {step.name: step for step in make_steps(make_plan(), WHERE, ["chats.jsonl"], [])}
    assert "prompts chats.jsonl --target some/model" in made["prompts"].line
    assert "--count 24 --held-out 4 --seed 5 --batch-size 16 --out out.fit" in made["prompts"].line
    assert "--max-new-tokens 16 --temperature 0.7 --seed 5 --batch-size 16 --out out.fit/data" in made["data"].line
    assert "--target-layers=0,1,2 " in made["train"].line and "--objective=dpace=1.0" in made["train"].line
    assert "--hidden-states=memory" in made["train"].line
    assert "--target-dtype bfloat16 --device cpu --backend hf --data out.fit/data" in made["train"].line
    rounded = {step.name: step for step in make_steps(make_plan(quantize="int8"), WHERE, [], [])}
    assert [name for name, step in rounded.items() if "--quantize int8" in step.line] == ["data"]
    assert "--quantize" not in made["data"].line
    stored = {step.name: step for step in make_steps(make_plan(hidden_states="disk"), WHERE, [], [])}
    assert "--hidden-states=out.fit/hidden-states" in stored["train"].line
    looped = {step.name: step for step in make_steps(make_plan(hidden_states=None), WHERE, [], [])}
    assert "--hidden-states" not in looped["train"].line


def test_one_target_layer_is_a_layer_and_no_number(make_plan: MakePlan) -> None:
    plan = make_plan()
    plan.recipe["target_layers"] = [0]
    made = {step.name: step for step in make_steps(plan, WHERE, [], [])}
    assert "--target-layers=0, " in made["train"].line


Command = Callable[[str], None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Make the steps run a shell script in place of Python. Its third argument is the name of the step."""

    def make(script: str) -> None:
        path = tmp_path / "command.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_steps_that_are_done_are_not_run_again(command: Command, make_plan: MakePlan, tmp_path: Path) -> None:
    """The step "data" fails the first time."""
    log = tmp_path / "log"
    command(f"echo $3 >> {log}; [ \"$(tr '\\n' ' ' < {log})\" != 'prompts data ' ] || exit 2")
    made, notes = make_steps(make_plan(), WHERE, [], []), list[str]()
    with pytest.raises(BlockdraftError, match="data ended with status 2"):
        run_steps(made, tmp_path, notes.append)
    assert list(done_steps(tmp_path)) == ["prompts"]
    run_steps(made, tmp_path, notes.append)
    assert log.read_text().split() == ["prompts", "data", "data", "train", "calibrate", "bench"]
    assert set(done_steps(tmp_path)) == {"prompts", "data", "train", "calibrate", "bench"}
    run_steps(made, tmp_path, notes.append)
    assert len(log.read_text().split()) == 6
    assert "\nstep 1 of 5: prompts, about 10 s; in all about 2 min left" in notes
    assert made[3].line in notes


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("late", "slack", "ends_early"),
    [(0.0, 1e3, False), (0.0, 0.0, True), (1e3, 1e3, True), (1e6, 1e3, True)],
    ids=["in time", "too long", "no slack left", "later than all slack"],
)
def test_a_training_ends_early_where_all_steps_take_too_long(
    late: float, slack: float, ends_early: bool, command: Command, tmp_path: Path, constants: Callable[..., None]
) -> None:
    constants(steps, NOTE_SECONDS=0.05)
    finish, notes = tmp_path / "run" / "finish", list[str]()
    finish.parent.mkdir()
    # It trains for a second, or as long as it is not told to finish.
    command(f"for i in $(seq {'1000' if ends_early else '20'}); do [ ! -e {finish} ] || exit 0; sleep 0.05; done")
    (tmp_path / "done.json").write_text(json.dumps({"data": 5.0 + late}))
    data, train = Step("data", ("data",), 5.0), Step("train", ("train",), 0.5, finish)
    run_steps([data, train], tmp_path, notes.append, slack)
    assert finish.exists() == ends_early
    assert sum("the time is up, so it ends early" in line for line in notes) == ends_early
    assert ("step 2 of 2: train ends soon" if ends_early else "step 2 of 2: train takes longer than planned") in notes


def test_a_failing_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BlockdraftError, match="generate ended with status 2"):
        run_steps([Step("generate", ("generate", "--block-size", "x", "hello"), 1.0)], tmp_path, lambda text: None)
    assert done_steps(tmp_path) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_command_gets_the_signal_and_saves(command: Command, tmp_path: Path) -> None:
    started, before = tmp_path / "started", signal.getsignal(signal.SIGTERM)
    command(f"trap 'exit 143' TERM\ntouch {started}\nwhile :; do sleep 0.05; done")

    def end() -> None:
        while not started.exists() or signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(BlockdraftError, match="x ended with status 143"):
        run_steps([Step("x", ("x",), 1.0)], tmp_path, lambda text: None)
    assert signal.getsignal(signal.SIGTERM) is before


def run_a_step(folder: Path) -> None:
    sys.executable = str(folder / "sleep.sh")
    run_steps([Step("x", ("x",), 1.0)], folder, print)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a child learns of its parent's end on Linux only")
def test_no_command_outlives_the_fit(tmp_path: Path) -> None:
    """Killed, the fit takes its command along."""
    (tmp_path / "sleep.sh").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "sleep.sh").chmod(0o755)
    process = forked.process(run_a_step, tmp_path)
    process.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    process.kill()
    process.join()
    child.wait(10)
