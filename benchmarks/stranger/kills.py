"""A fit that is killed again and again: `python -m benchmarks.stranger.kills --target DIR --kills 20`.

One fit runs undisturbed. Others follow the same plan and are killed with all their processes at random moments, until
`--kills` is reached; then they run to their end. Every drafter must be the same, bit for bit; else the status is 1.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.command import Parser
from blockdraft.tools.fit.steps import done_steps

WEIGHTS = "model.safetensors"
FIRST, LAST = 1 / 6, 1 / 2  # moments to kill at, over the time of a fit; before the first it only imports
POLL_SECONDS = 0.1


def run(command: Sequence[str], seconds: float = math.inf, enough: Callable[[], bool] = lambda: False) -> bool:
    """Run a fit, which is killed after so many seconds or once there is enough of it; returns whether it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "blockdraft", "fit", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    end = time.monotonic() + seconds
    while True:
        try:
            _, told = process.communicate(timeout=POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() > end or enough():
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return False
    assert process.returncode == 0, told
    return True


def killed(options: Sequence[str], folder: Path, kills: int, seed: int = 0) -> tuple[int, int]:
    """Number of fits that were killed, and of those among them with other weights than the one that was not."""
    whole, steps = folder / "whole", folder / "whole.fit"
    began = time.monotonic()
    run([*options, "--out", str(whole)], enough=lambda: "train" in done_steps(steps))  # what follows leaves the weights
    length = time.monotonic() - began
    plan, weights = (steps / "plan.json").read_bytes(), (whole / WEIGHTS).read_bytes()
    rng, number, differing = random.Random(seed), 0, 0
    while kills:
        number += 1
        out = folder / f"killed-{number}"
        out.with_name(f"{out.name}.fit").mkdir()
        (out.with_name(f"{out.name}.fit") / "plan.json").write_bytes(plan)
        while not run([*options, "--out", str(out)], rng.uniform(FIRST * length, LAST * length) if kills else math.inf):
            kills -= 1
            print(f"{out.name}: killed; {kills} kills left", flush=True)
        differing += (out / WEIGHTS).read_bytes() != weights
    return number, differing


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--target", required=True, help="model to fit")
    parser.add_argument("--data", help="prompts; by default the target writes them")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse()
    options = ["--target", args.target, "--device", "cpu", "--answers", str(args.answers), "--steps", str(args.steps)]
    options += ["--data", args.data] if args.data else []
    with tempfile.TemporaryDirectory() as folder:
        fits, differing = killed(options, Path(folder), args.kills, args.seed)
    print(f"{args.kills} kills, {fits} fits, {differing} with other weights")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
