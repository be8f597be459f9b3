"""The commands of a fit, and which of them are done.

Each runs in its own process, which frees all of its memory at the end, and resumes where it was interrupted.
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

from blockdraft.errors import BlockdraftError
from blockdraft.folders import write_file
from blockdraft.machine import die_with_parent
from blockdraft.types import Backend
from blockdraft_train.fit.facts import FitPlan, duration
from blockdraft_train.fit.prompts import HELD_OUT, PROMPTS
from blockdraft_train.progress import FINISH, run_folder
from blockdraft_train.settings_files import as_text

DONE = "done.json"
NOTE_SECONDS = 60.0  # between notes on the progress of a command
ENDING = 1.1  # duration of a training that is told to finish early, over its duration until then
MIN = 0.5  # share of its expected duration that a training gets, however long the steps before it took


@dataclass(frozen=True)
class Step:
    """A command of a fit.

    Attributes:
        arguments: Arguments of `blockdraft`, beginning with the command's name.
        seconds: Expected duration.
        finish: File that requests an early but complete end of the command.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    finish: Path | None = None

    @property
    def line(self) -> str:
        """The command as it is typed."""
        return shlex.join(["blockdraft", *self.arguments])


@dataclass(frozen=True)
class Where:
    """Target and folders of a fit, as given on the command line.

    Attributes:
        out: Folder of the drafter.
        target: None is the bundled one.
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
        """Return the command-line options of the target."""
        values = {"--target": self.target, "--adapter": self.adapter, "--revision": self.revision}
        values |= {dtype: self.dtype, "--device": self.device, "--backend": self.backend}
        return [word for flag, value in values.items() if value is not None for word in (flag, value)]


def make_steps(plan: FitPlan, where: Where, sources: Sequence[str], records: Sequence[str]) -> list[Step]:
    """Return the commands of a plan.

    Args:
        sources: Sources of prompts; empty if the target writes its own.
        records: Options for reading the sources.
    """
    folder = where.folder
    data, held_out, states = (str(folder / name) for name in ("data", HELD_OUT, "hidden-states"))
    seed = ["--seed", str(plan.recipe["seed"])]
    sampling = ["--temperature", f"{plan.temperature:g}", *seed]
    batch = ["--batch-size", str(plan.batch_size)]
    quantize = [] if plan.quantize is None else ["--quantize", plan.quantize]
    recipe = {**plan.recipe, "hidden_states": states if plan.hidden_states == "disk" else plan.hidden_states}
    fields = [f"--{name.replace('_', '-')}={as_text(value)}" for name, value in recipe.items() if value is not None]
    layers = as_text(plan.stored_target_layers or recipe["target_layers"])
    target, trained = where.options(), where.options("--target-dtype")
    # Without a target, commands that decode would take the default one.
    pair = [*replace(where, target=where.target or "bundled").options(), "--drafter", str(where.out)]
    commands: dict[str, list[str]] = {
        "prompts": [*sources, *records, *target]
        + ["--count", str(plan.answers), "--held-out", str(plan.held_out), *seed, *batch, "--out", str(folder)],
        "data": [str(folder / PROMPTS), *target, "--regenerate"]
        + ["--max-new-tokens", str(plan.max_new_tokens), *sampling, *batch, *quantize, "--out", data],
        "hidden-states": ["--data", data, *trained, "--target-layers", layers, "--out", states],
        "train": [plan.variant, *fields, *trained, "--data", data, "--prompts", held_out, "--out", str(where.out)],
        "calibrate": [*pair, "--anew"],
        "bench": [*pair, "--prompts", held_out, "--limit", str(plan.bench_prompts)]
        + ["--max-new-tokens", str(plan.bench_tokens), *sampling, "--methods", "none,chain,chain:auto"]
        + ["--out", str(folder / "bench"), "--overwrite"],
    }
    finish = {"train": run_folder(where.out) / FINISH}
    return [Step(name, (name, *commands[name]), seconds, finish.get(name)) for name, seconds in plan.seconds.items()]


def done_steps(folder: Path) -> dict[str, float]:
    """Return the names of the steps that are done, and the seconds that their last runs took."""
    path = folder / DONE
    done: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return done


def run_steps(steps: Sequence[Step], folder: Path, note: Callable[[str], None], slack: float = math.inf) -> None:
    """Run the steps that are not done.

    Args:
        slack: Seconds by which all steps together may exceed their expected time before one is told to finish early.

    Raises:
        BlockdraftError: A step failed. Its own message has been printed.
    """
    done = done_steps(folder)
    for number, step in enumerate(steps, 1):
        if step.name in done:
            continue
        title, start = f"step {number} of {len(steps)}: {step.name}", time.monotonic()
        later = sum(other.seconds for other in steps[number:])
        late = sum(done[other.name] - other.seconds for other in steps[: number - 1])
        longest = max(step.seconds + slack - late, MIN * step.seconds)
        note(f"\n{title}, about {duration(step.seconds)}; in all about {duration(step.seconds + later)} left")
        note(step.line)
        code = _run(step.arguments, _watcher(step, title, later, longest, note))
        if code != 0:
            status = f"signal {-code}" if code < 0 else f"status {code}"
            raise BlockdraftError(
                f"{step.name} ended with {status}; its message is above. The same command resumes the fit here."
            )
        done[step.name] = round(time.monotonic() - start, 1)
        write_file(folder / DONE, json.dumps(done).encode())


def _watcher(step: Step, title: str, later: float, longest: float, note: Callable[[str], None]) -> Callable[[], None]:
    """Return a function to call now and then while a step runs, which starts now.

    Args:
        title: Number and name of the step.
        later: Expected seconds of the steps after it.
        longest: Seconds that it may take.
    """
    start = time.monotonic()

    def watch() -> None:
        seconds = time.monotonic() - start
        if step.finish is not None and ENDING * seconds > longest and _request(step.finish):
            note(f"{title}: the time is up, so it ends early, within a tenth of the work that is done.")
        if sys.stderr.isatty():  # the command draws a bar
            return
        after = f"; about {duration(later)} for the steps after it" if later else ""
        if step.finish is not None and step.finish.exists():
            note(f"{title} ends soon{after}")
        elif seconds < step.seconds:
            note(f"{title}; in all about {duration(step.seconds - seconds + later)} left")
        else:
            note(f"{title} takes longer than planned{after}")

    return watch


def _request(finish: Path) -> bool:
    """Make the file if its folder exists. Return whether it is new."""
    is_new = finish.parent.is_dir() and not finish.exists()
    if is_new:
        finish.touch()
    return is_new


def _run(arguments: Sequence[str], watch: Callable[[], None]) -> int:
    # The process dies with this one, so two runs never write to the same folders.
    process = subprocess.Popen([sys.executable, "-m", "blockdraft", *arguments], preexec_fn=die_with_parent)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()) if is_main else None
    try:
        while True:
            try:
                return process.wait(NOTE_SECONDS)
            except subprocess.TimeoutExpired:
                watch()
    except KeyboardInterrupt:  # the process got the signal too, and saves its work
        process.wait()
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
