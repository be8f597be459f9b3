"""Benchmark decoding beside other work: `python -m benchmarks.threads --targets bundled,smollm2,MODEL.gguf`.

Each target decodes in a process of its own, plain and with its drafter. Requests follow each other

- alone,
- with a product of two matrices by torch between them, in another thread than the one that decodes,
- with a pause of 0.3 s between them,
- with a request to a second target between them,
- beside one busy loop of another process, and a second after it has ended.

The first four are interleaved. Figures are medians of the rounds, in tokens per second, with their ratio to "alone".
With --seeds, the first target also decodes plain in a new process for each of so many Python hash seeds, which order
the libraries of a process. --imports names modules to import first, which may bring an OpenMP library of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.command import CORES, Parser, in_words, listed, tell
from benchmarks.harness.process import PeerError
from benchmarks.harness.report import table

PROMPT = "Write a Python function that returns the sum of the squares of a list of numbers, and explain each line."
PAUSE_SECONDS = 0.3
SETTLE_SECONDS = 1.0  # after a busy loop begins or ends
MATRIX = 1000
BESIDE = ("alone", "torch", "pause", "other target")
COLUMNS = (*BESIDE, "busy", "after")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.threads", threads=CORES)
    parser.add_argument("--targets", type=listed(), default=["bundled", "smollm2"], help="(bundled,smollm2)")
    parser.add_argument("--drafters", type=listed(), default=["none", "auto"], help="none, auto or both (none,auto)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all conditions (3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of requests per condition and round (1)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per request (96)")
    parser.add_argument("--seeds", type=int, default=0, help="hash seeds to try (0)")
    parser.add_argument("--imports", type=listed(), default=[], help="modules to import before decoding")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse(words)


class Speed:
    """Measures tokens per second of an engine's requests."""

    def __init__(self, engine: Any, tokens: int, seconds: float) -> None:
        from blockdraft import SamplingParams

        self._engine, self._seconds = engine, seconds
        self._params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)

    def request(self) -> int:
        [completion] = self._engine.generate([PROMPT], self._params)
        return len(completion.token_ids)

    def measure(self, before: Callable[[], object] = lambda: None) -> float:
        """Return the speed of requests; `before` runs before each, outside the measured time."""
        tokens, taken = 0, 0.0
        while taken < self._seconds:
            before()
            began = time.perf_counter()
            tokens += self.request()
            taken += time.perf_counter() - began
        return tokens / taken


def decode(options: argparse.Namespace, child: dict[str, Any]) -> dict[str, float]:
    """Measure one target with one drafter in this process, and return tokens per second by condition."""
    import torch

    for name in options.imports:
        __import__(name)
    from blockdraft import Engine, load_drafter, load_target

    def engine(target: str, drafter: str) -> Engine:
        loaded = load_target(target, device="cpu", threads=options.threads)
        return Engine(loaded, load_drafter(None if drafter == "auto" else drafter, target=loaded))

    speed = Speed(engine(child["target"], child["drafter"]), options.tokens, options.seconds)
    for _ in range(3 if child["drafter"] == "auto" else 1):
        speed.measure()
    if child["only"] == "alone":
        return {"alone": statistics.median(speed.measure() for _ in range(options.rounds))}
    other = Speed(engine("bundled" if child["target"] != "bundled" else "smollm2", "none"), 16, 0)
    matrix = torch.ones(MATRIX, MATRIX)
    conditions = {
        "alone": lambda: None,
        "torch": lambda: matrix @ matrix,
        "pause": lambda: time.sleep(PAUSE_SECONDS),
        "other target": other.request,
    }
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for _ in range(options.rounds):
        for name, before in conditions.items():
            found[name].append(speed.measure(before))
    for _ in range(options.rounds):
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
            time.sleep(SETTLE_SECONDS)
            found["busy"].append(speed.measure())
            loop.kill()
        time.sleep(SETTLE_SECONDS)
        found["after"].append(speed.measure())
    return {name: statistics.median(values) for name, values in found.items()}


def start(words: Sequence[str], seed: int | None = None, **child: str | None) -> dict[str, float]:
    """Run `decode` in a new process.

    Raises:
        PeerError: It fails; the message is the end of its errors.
    """
    environment = os.environ | ({} if seed is None else {"PYTHONHASHSEED": str(seed)})
    command = [sys.executable, "-m", "benchmarks.threads", *words, "--child", json.dumps(child)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"{child} ended with {done.returncode}: {done.stderr[-400:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    options = arguments(words)
    if options.child is not None:
        print(json.dumps(decode(options, options.child)))
        return
    lines = []
    for target in options.targets:
        for drafter in options.drafters:
            tell(f"{target}, {drafter}")
            found = start(words, target=target, drafter=drafter, only=None)
            name = os.path.basename(target)
            cells = [f"{found[column]:.4g} ({found[column] / found['alone']:.2f})" for column in COLUMNS]
            lines.append([f"{name}, {'plain' if drafter == 'none' else drafter}", *cells])
    print(table(["tokens/s", *COLUMNS], lines))
    if options.seeds:
        speeds = []
        for seed in range(options.seeds):
            tell(f"hash seed {seed}")
            speeds.append(start(words, seed, target=options.targets[0], drafter="none", only="alone")["alone"])
        print()
        print(table(["hash seed", *map(str, range(options.seeds))], [["tokens/s", *(f"{s:.4g}" for s in speeds)]]))


if __name__ == "__main__":
    with in_words(resumes=False):
        main()
