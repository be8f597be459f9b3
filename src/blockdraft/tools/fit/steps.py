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

    def left(self, seconds: float, before: int) -> float:
        """Expected remaining seconds.

        Args:
            seconds: Seconds since the start of this run.
            before: Number of parts that were done before this run.
        """
        done = self.parts() - before
        if self.counted is None or done <= 0:
            return max(self.seconds - seconds, 0.0)
        return seconds / done * (self.counted[1] - before - done)


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
    data, held_out, features = str(folder / "data"), str(folder / HELD_OUT), str(folder / "features")
    at_once = ["--batch-size", str(plan.batch_size)]
    wanted = ["--count", str(plan.answers), "--held-out", str(plan.held_out), "--seed", seed]
    rounded = [] if plan.quantize is None else ["--quantize", plan.quantize]
    answers = ["--max-new-tokens", str(plan.max_new_tokens), "--temperature", f"{plan.temperature:g}", "--seed", seed]
    recipe = {**plan.recipe, "features": features if plan.features == "disk" else plan.features}
    fields = [f"--{name.replace('_', '-')}={_flag(value)}" for name, value in recipe.items() if value is not None]
    limits = ["--limit", str(plan.bench_prompts), "--max-new-tokens", str(plan.bench_tokens)]
    limits += ["--temperature", f"{plan.temperature:g}", "--seed", seed]
    target, trained = where.options(), where.options("--target-dtype")
    # Without a target, commands that decode would take the default one.
    pair = [*replace(where, target=where.target or "bundled").options(), "--drafter", str(where.out)]
    commands: dict[str, list[str]] = {
        "prompts": [*sources, *records, *target, *wanted, *at_once, "--out", str(folder)],
        "data": [str(folder / PROMPTS), *target, "--regenerate", *answers, *at_once, *rounded, "--out", data],
        "features": ["--data", data, *trained, "--taps", _flag(recipe["taps"]), "--out", features],
        "train": [plan.variant, *fields, *trained, "--data", data, "--prompts", held_out, "--out", str(where.out)],
        "calibrate": [*pair, "--anew"],
        "bench": [*pair, "--prompts", held_out, *limits, "--methods", "none,chain,chain:auto"]
        + ["--out", str(folder / "bench"), "--overwrite"],
    }
    run = run_folder(where.out)
    own = {"train": {"counted": (run / "log.jsonl", int(plan.recipe["steps"])), "finish": run / FINISH}}
    return [
        Step(name, (name, *commands[name]), seconds, **own.get(name, {}))  # type: ignore[arg-type]
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
        slack: Seconds by which a step may take longer than expected before it is told to finish early.

    Raises:
        BlockdraftError: A step failed. Its own message has been printed.
    """
    done = done_steps(folder)
    for number, step in enumerate(steps, 1):
        if step.name in done:
            continue
        later = sum(one.seconds for one in steps[number:])
        told, began, before = f"step {number} of {len(steps)}: {step.name}", time.monotonic(), step.parts()
        note(f"\n{told}, about {duration(step.seconds)}; in all about {duration(step.seconds + later)} left")
        note(step.line)

        def tell(
            step: Step = step, told: str = told, later: float = later, began: float = began, before: int = before
        ) -> None:
            seconds = time.monotonic() - began
            if step.finish is not None and seconds > step.seconds + slack and _request(step.finish):
                note(f"{told} takes longer than planned, so it ends early, within a tenth of the work that is done.")
            if not sys.stderr.isatty():  # where the command draws a bar
                left = step.left(seconds, before)
                note(f"{told}; in all about {duration(left + later)} left")

        code = _run(step.arguments, tell)
        if code != 0:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            raise BlockdraftError(
                f"{step.name} ended with {how}; its message is above. The same command resumes the fit here."
            )
        done[step.name] = round(time.monotonic() - began, 1)
        write_file(folder / DONE, json.dumps(done).encode())


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
