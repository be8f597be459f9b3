"""Benchmark start-up time and memory of single commands: `python -m benchmarks.start MODEL.gguf`.

It measures `import torch`, the commands that need no model, and `blockdraft generate` of one token; with --llama
PROGRAM (the `llama_peer` that `make bench-peers` builds) also llama.cpp on the same file. Warm runs are interleaved,
and the minimum of each column counts. With --cold, each is first run after the system has dropped the model's file, and
our packed weights, from memory; other files, such as torch's, stay.

Seconds are wall-clock; CPU seconds are those of all threads, which other programs disturb less. Memory is the largest
resident set, with mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import CORES, Parser, tell
from benchmarks.harness.report import table

from blockdraft.machine import cache_folder

IDLE = ("--help", "models", "cache list", "env")  # commands that load no model
# Runs a command from a small process, since the system counts the memory of the one that starts another as its own.
LAUNCH = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[2:], stdout=int(sys.argv[1]), stderr=int(sys.argv[1]))
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - begin
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
CONTEXT = 512  # tokens that llama.cpp plans its cache for


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.start", threads=CORES)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--repeats", type=int, default=3, help="warm runs of each (3)")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama_peer, to measure it, too")
    parser.add_argument("--cold", action="store_true", help="measure a run without cached files, too")
    given = parser.parse(words)
    if given.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {given.repeats}.")
    for file in (given.model, given.llama):
        if file is not None and not file.is_file():
            parser.error(f"There is no file {file}.")
    return given


def run(command: Sequence[str], threads: int, stdin: str = "") -> Measured:
    """Run a command to its end.

    Raises:
        RuntimeError: It fails; the message has the end of what it told.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as told:
        launched = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(told.fileno()), *command],
            input=stdin,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[told.fileno()],
            env=environment,
            check=True,
        )
        status, seconds, cpu_seconds, peak = json.loads(launched.stdout)
        if status:
            told.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {status}: {told.read()[-400:]}")
    return Measured(seconds, cpu_seconds, peak * 1024 / 1e6)


def least(runs: Sequence[Measured]) -> Measured:
    return Measured(*(min(getattr(each, name) for each in runs) for name in ("seconds", "cpu_seconds", "peak_mb")))


def forget(path: Path) -> None:
    """Let the system drop a file, or all files of a folder, from its memory."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Return commands and their inputs, by their names in the table."""
    ours = [sys.executable, "-m", "blockdraft"]
    found = {"import torch": ([sys.executable, "-c", "import torch"], "")}
    found |= {f"blockdraft {name}": ([*ours, *name.split()], "") for name in IDLE}
    one = ["generate", "--target", str(options.model), "--drafter", "none", "--max-new-tokens", "1", "Hi"]
    found["blockdraft generate"] = ([*ours, *one], "")
    if options.llama is not None:
        settings = {"type": "f32", "model": str(options.model), "max_length": CONTEXT, "threads": options.threads}
        request = {"decode": {"prompt": [1], "stops": [], "max_new_tokens": 1}}
        found["llama.cpp"] = ([str(options.llama), json.dumps(settings)], json.dumps(request) + "\n")
    return found


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    wanted = commands(options)
    rows = {}
    run(*(wanted["blockdraft generate"][0], options.threads))  # the first start compiles and packs
    if options.cold:
        for name in ("blockdraft generate", "llama.cpp"):
            if name in wanted:
                forget(options.model)
                forget(cache_folder() / "weights")
                rows[f"{name}, cold"] = run(wanted[name][0], options.threads, wanted[name][1])
    runs: dict[str, list[Measured]] = {name: [] for name in wanted}
    for number in range(options.repeats):
        for name, (command, stdin) in wanted.items():
            tell(f"{name}, {number + 1} of {options.repeats}")
            runs[name].append(run(command, options.threads, stdin))
    rows |= {name: least(each) for name, each in runs.items()}
    lines = [[name, f"{r.seconds:.2f}", f"{r.cpu_seconds:.2f}", f"{r.peak_mb:.0f}"] for name, r in rows.items()]
    print(f"{options.model.name}, {options.model.stat().st_size / 1e6:.0f} MB")
    print(table(["what", "seconds", "CPU seconds", "peak MB"], lines))


if __name__ == "__main__":
    main()
