"""The commands of a fit, and which of them are done.

Each runs in a process of its own, which frees all of its memory, and resumes where it was interrupted.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockdraft.data.folder import write_file
from blockdraft.errors import BlockdraftError
from blockdraft.machine import die_with_parent
from blockdraft.tools.fit.plan import Plan, duration
from blockdraft.tools.fit.prompts import HELD_OUT, PROMPTS
from blockdraft.training.progress import FINISH, run_folder
from blockdraft.types import Backend

DONE = "done.json"
TELL_SECONDS = 60.0  # between notes on the progress of a command
ENDING = 1.1  # duration of a training that is told to finish, over its duration until then
LEAST = 0.5  # share of its expected duration that a training gets, however long the steps before it took


@dataclass(frozen=True)
class Step:
    """A command of a fit.

    Attributes:
        name: Name of the command.
        arguments: Arguments of `blockdraft`, beginning with the command's name.
        seconds: Expected duration.
        counted: File to which the command adds a line for each part of its work, and the number of parts.
        finish: File that requests an early but complete end of the command; None if it has no such end.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    counted: tuple[Path, int] | None = None
    finish: Path | None = None

    @property
    def line(self) -> str:
        """The command as it is typed."""
        return shlex.join(["blockdraft", *self.arguments])

    def parts(self) -> int:
        """Number of parts that are done."""
        if self.counted is None or not self.counted[0].exists():
            return 0
        with self.counted[0].open("rb") as file:
            return sum(1 for _ in file)


class Pace:
    """Expected remaining seconds of a step that runs: by its parts where it counts them, else by the plan.

    Args:
        step: The step, which has begun now. Parts that it has by now are of an earlier start.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._first = step, (0.0, step.parts())

    def left(self, seconds: float) -> float:
        """Expected remaining seconds, `seconds` after the start."""
        step, done, (began, before) = self._step, self._step.parts(), self._first
        if not began and done > before:  # what came before the first parts, such as features, is not repeated
            self._first = seconds, done
        if step.counted is None or not done:
            return max(step.seconds - seconds, 0.0)
        remaining = step.counted[1] - done
        if began and done > before:
            return (seconds - began) / (done - before) * remaining
        return step.seconds / step.counted[1] * remaining


@dataclass(frozen=True)
class Where:
    """Target and folders of a fit.

    Attributes:
        out: Folder of the drafter.
        target: Target, as given on the command line; None is the bundled one.
        dtype, device, backend, adapter, revision: Options of the target, as given on the command line.
    """

    out: Path
    target: str | None
    dtype: str | None = None
    device: str | None = None
    backend: Backend | None = None
    adapter: str | None = None
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Folder of plan, prompts, data and measurements."""
        return self.out.with_name(f"{self.out.name}.fit")

    def options(self, dtype: str = "--dtype") -> list[str]:
        named = {"--target": self.target, "--adapter": self.adapter, "--revision": self.revision}
        named |= {dtype: self.dtype, "--device": self.device, "--backend": self.backend}
        return [part for name, value in named.items() if value is not None for part in (name, value)]


def make_steps(plan: Plan, where: Where, sources: Sequence[str], records: Sequence[str]) -> list[Step]:
    """The commands of a plan.

    Args:
        sources: Sources of prompts. Empty if the target writes its own.
        records: Options for reading the sources.
    """
    folder, seed = where.folder, str(plan.recipe["seed"])
    data, held_out, hidden_states = str(folder / "data"), str(folder / HELD_OUT), str(folder / "hidden_states")
    at_once = ["--batch-size", str(plan.batch_size)]
    wanted = ["--count", str(plan.answers), "--held-out", str(plan.held_out), "--seed", seed]
    rounded = [] if plan.quantize is None else ["--quantize", plan.quantize]
    answers = ["--max-new-tokens", str(plan.max_new_tokens), "--temperature", f"{plan.temperature:g}", "--seed", seed]
    recipe = {**plan.recipe, "hidden_states": hidden_states if plan.hidden_states == "disk" else plan.hidden_states}
    fields = [f"--{name.replace('_', '-')}={_flag(value)}" for name, value in recipe.items() if value is not None]
    limits = ["--limit", str(plan.bench_prompts), "--max-new-tokens", str(plan.bench_tokens)]
    limits += ["--temperature", f"{plan.temperature:g}", "--seed", seed]
    target, trained = where.options(), where.options("--target-dtype")
    # Without a target, commands that decode would take the default one.
    pair = [*replace(where, target=where.target or "bundled").options(), "--drafter", str(where.out)]
    commands: dict[str, list[str]] = {
        "prompts": [*sources, *records, *target, *wanted, *at_once, "--out", str(folder)],
        "data": [str(folder / PROMPTS), *target, "--regenerate", *answers, *at_once, *rounded, "--out", data],
        "hidden_states": [
            "--data",
            data,
            *trained,
            "--target-layers",
            _flag(plan.stored_target_layers or recipe["target_layers"]),
            "--out",
            hidden_states,
        ],
        "train": [plan.variant, *fields, *trained, "--data", data, "--prompts", held_out, "--out", str(where.out)],
        "calibrate": [*pair, "--anew"],
        "bench": [*pair, "--prompts", held_out, *limits, "--methods", "none,chain,chain:auto"]
        + ["--out", str(folder / "bench"), "--overwrite"],
    }
    run = run_folder(where.out)
    own = {"train": {"counted": (run / "log.jsonl", int(plan.recipe["steps"])), "finish": run / FINISH}}
    return [
        Step(name, (name.replace("_", "-"), *commands[name]), seconds, **own.get(name, {}))  # type: ignore[arg-type]
        for name, seconds in plan.seconds.items()
    ]


def _flag(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, list | tuple):  # a list of one ends in a comma, since a number alone means a count
        return ",".join(map(str, value)) + ("," if len(value) == 1 else "")
    return str(value)


def done_steps(folder: Path) -> dict[str, float]:
    """Names of the steps that are done, and the seconds that their last runs took."""
    path = folder / DONE
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def run_steps(steps: Sequence[Step], folder: Path, note: Callable[[str], None], slack: float = math.inf) -> None:
    """Run the steps that are not done.

    Args:
        slack: Seconds by which all steps together may take longer than expected before one is told to finish early.

    Raises:
        BlockdraftError: A step failed. Its own message has been printed.
    """
    done = done_steps(folder)
    for number, step in enumerate(steps, 1):
        if step.name in done:
            continue
        later = sum(one.seconds for one in steps[number:])
        told, began = f"step {number} of {len(steps)}: {step.name}", time.monotonic()
        over = sum(done[one.name] - one.seconds for one in steps[: number - 1])
        most = max(step.seconds + slack - over, LEAST * step.seconds)
        note(f"\n{told}, about {duration(step.seconds)}; in all about {duration(step.seconds + later)} left")
        note(step.line)
        code = _run(step.arguments, _watched(step, told, later, most, note))
        if code != 0:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            raise BlockdraftError(
                f"{step.name} ended with {how}; its message is above. The same command resumes the fit here."
            )
        done[step.name] = round(time.monotonic() - began, 1)
        write_file(folder / DONE, json.dumps(done).encode())


def _watched(step: Step, told: str, later: float, most: float, note: Callable[[str], None]) -> Callable[[], None]:
    """What is called now and then while a step runs, from now on.

    Args:
        told: The step's number and name.
        later: Expected seconds of the steps after it.
        most: Seconds that it may take.
    """
    began, pace = time.monotonic(), Pace(step)
    after = f"; about {duration(later)} for the steps after it" if later else ""

    def tell() -> None:
        seconds = time.monotonic() - began
        left = pace.left(seconds)
        if step.finish is not None and ENDING * seconds > most and _request(step.finish):
            note(f"{told}: the time is up, so it ends early, within a tenth of the work that is done.")
        if sys.stderr.isatty():  # where the command draws a bar
            return
        if step.finish is not None and step.finish.exists():
            note(f"{told} ends soon{after}")
        elif left:
            note(f"{told}; in all about {duration(left + later)} left")
        else:
            note(f"{told} takes longer than planned{after}")

    return tell


def _request(finish: Path) -> bool:
    """Make the file if its folder exists. Returns whether it was not there before."""
    new = finish.parent.is_dir() and not finish.exists()
    if new:
        finish.touch()
    return new


def _run(arguments: Sequence[str], tell: Callable[[], None] | None) -> int:
    # Two runs never write to the same folders.
    process = subprocess.Popen([sys.executable, "-m", "blockdraft", *arguments], preexec_fn=die_with_parent)
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()) if alone else None
    try:
        while True:
            try:
                return process.wait(TELL_SECONDS)
            except subprocess.TimeoutExpired:
                if tell is not None:
                    tell()
    except KeyboardInterrupt:  # the process got the signal too, and saves its work
        process.wait()
        raise
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)
