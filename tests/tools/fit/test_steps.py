"""The commands of a fit: how they read, and which of them run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.main import get_command

from blockdraft.cli import app
from blockdraft.errors import BlockdraftError
from blockdraft.tools.fit import steps
from blockdraft.tools.fit.facts import Plan
from blockdraft.tools.fit.steps import Step, Where, done_steps, make_steps, run_steps

MakePlan = Callable[..., Plan]
WHERE = Where(Path("out"), "some/model", "bfloat16", "cpu", "hf")
ADAPTED = Where(Path("out"), "some/model", adapter="some/lora", revision="v2")


def test_every_command_is_one(make_plan: MakePlan) -> None:
    """Each can be read by the command line, whatever is asked for."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
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


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that were run, in place of which nothing happens; "data" fails the first time."""
    found: list[str] = []

    def run(arguments: tuple[str, ...], tell: object) -> int:
        found.append(arguments[0])
        return 2 if found == ["prompts", "data"] else 0

    monkeypatch.setattr(steps, "_run", run)
    return found


def test_steps_that_are_done_are_not_run_again(ran: list[str], make_plan: MakePlan, tmp_path: Path) -> None:
    made, told = make_steps(make_plan(), WHERE, [], []), list[str]()
    with pytest.raises(BlockdraftError, match="data ended with status 2"):
        run_steps(made, tmp_path, told.append)
    assert list(done_steps(tmp_path)) == ["prompts"]
    run_steps(made, tmp_path, told.append)
    assert ran == ["prompts", "data", "data", "train", "calibrate", "bench"]
    assert set(done_steps(tmp_path)) == {"prompts", "data", "train", "calibrate", "bench"}
    run_steps(made, tmp_path, told.append)
    assert len(ran) == 6
    assert "\nstep 1 of 5: prompts, about 10 s; in all about 2 min left" in told
    assert made[3].line in told


@pytest.mark.parametrize(
    ("data_took", "times"),
    [
        (0.0, ((30.0, False), (45.0, False), (46.0, True), (52.0, True))),  # 1.1 times 45.5 s
        (15.0, ((30.0, False), (31.0, False), (32.0, True))),  # the answers have taken 15 s of the slack
        (900.0, ((13.0, False), (14.0, True))),  # half of its time
    ],
)
def test_a_training_ends_early_where_all_steps_take_too_long(
    data_took: float,
    times: tuple[tuple[float, bool], ...],
    make_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_steps(make_plan(), Where(tmp_path / "out", None), [], [])
    data, train = (next(step for step in made if step.name == name) for name in ("data", "train"))
    assert train.seconds == 30
    now, told, finish = [0.0], list[str](), tmp_path / "out.run" / "finish"
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])

    def run(arguments: tuple[str, ...], tell: Callable[[], None]) -> int:
        began = now[0]
        if arguments[0] == "data":
            now[0] += data.seconds + data_took
            tell()
            return 0
        finish.parent.mkdir(exist_ok=True)
        for seconds, asked in times:
            now[0] = began + seconds
            tell()
            assert finish.exists() == asked
        return 0

    monkeypatch.setattr(steps, "_run", run)
    run_steps([data, train], tmp_path, told.append, slack=20.0)
    assert sum("the time is up, so it ends early" in line for line in told) == 1
    assert told[-1] == "step 2 of 2: train ends soon"
    assert any("step 1 of 2: data takes longer than planned; about 30 s for the steps" in line for line in told)


def test_a_failing_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BlockdraftError, match="generate ended with status 2"):
        run_steps([Step("generate", ("generate", "--block-size", "x", "hello"), 1.0)], tmp_path, lambda text: None)
    assert done_steps(tmp_path) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_command_is_reported_of_a_signal_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, script = tmp_path / "started", tmp_path / "command.sh"
    script.write_text(f"#!/bin/sh\ntrap 'exit 143' TERM\ntouch {started}\nwhile :; do sleep 0.05; done\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        while not started.exists() or signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert steps._run(["x"], None) == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a child learns of its parent's end on Linux only")
def test_no_command_outlives_the_fit(tmp_path: Path) -> None:
    """Killed, the fit takes its command along."""
    code = (
        "from blockdraft.tools.fit import steps\n"
        "import sys\n"
        f"sys.executable = {str(tmp_path / 'sleep.sh')!r}\n"
        "steps._run(['x'], None)\n"
    )
    (tmp_path / "sleep.sh").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "sleep.sh").chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    child.wait(10)
