"""Fuzz by hand: `python tests/fuzz --minutes 60` runs random cases on all cores; `--seed N` repeats one.

Every completion is compared with plain decoding of that request alone; see `fuzz_check.py`. A case that fails, or ends
its process, is printed with the command that repeats it, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # before torch is imported
os.environ.setdefault("BLOCKDRAFT_CACHE", str(Path(__file__).parents[2] / "build/tests-cache"))


def work(first: int, count: int, until: float) -> Iterator[dict[str, Any]]:
    """Run cases first, first + 1, ... Yield a line when each begins, and one when it has ended."""
    from fuzz_cases import case_of
    from fuzz_check import run
    from fuzz_models import Models

    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for seed in range(first, first + count):
            if time.time() > until:
                return
            yield {"begun": seed}
            try:
                yield {"ended": seed, **vars(run(case_of(seed), models))}
            except Exception as error:
                yield {"failed": seed, "error": f"{type(error).__name__}: {error}"}


class Tally:
    """Sums up and prints the results of all workers."""

    def __init__(self, minutes: float) -> None:
        self.sums: dict[str, int] = {}
        self.cases = 0
        self.failed: list[int] = []
        self._began, self._minutes, self._lock, self._shown = time.time(), minutes, threading.Lock(), 0.0

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            if "ended" in line:
                self.cases += 1
                for name, value in line.items():
                    if name != "ended":
                        self.sums[name] = self.sums.get(name, 0) + value
            elif "failed" in line:
                self.cases += 1
                self.failed.append(line["failed"])
                print(f"\nFAILED {line['error']}\nRepeat: make fuzz SEED={line['failed']}\n", flush=True)
            if time.time() - self._shown > 15:
                self.show()

    def show(self) -> None:
        self._shown = time.time()
        minutes = (self._shown - self._began) / 60
        sums = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in self.sums.items())
        print(
            f"{minutes:.1f} of {self._minutes:g} minutes: {self.cases} cases, {sums}, {len(self.failed)} failed",
            flush=True,
        )


def watch(first: int, until: float, tally: Tally) -> None:
    """Run cases in another process, and in a new one after a case that ended it."""
    seed = first
    while time.time() < until:
        command = [sys.executable, __file__, "--worker", "--seed", str(seed), "--until", str(until)]
        begun: int | None = None
        ended = False
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    line = json.loads(text)
                    begun, ended = line.get("begun", begun), "begun" not in line
                    tally.add(line)
        if not process.returncode:
            return
        if begun is None or ended:
            raise RuntimeError(f"A worker ended with {process.returncode} outside any case: {' '.join(command)}")
        tally.add({"failed": begun, "error": f"the process ended with {process.returncode}"})
        seed = begun + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="run this case alone, or the first of --cases")
    parser.add_argument("--cases", type=int, default=1, help="with --seed: so many, in this process")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for line in work(args.seed, 10**9, args.until):
            print(json.dumps(line), flush=True)
        return 0
    tally = Tally(args.minutes)
    if args.seed is not None:
        from fuzz_cases import case_of

        if args.cases == 1:
            print(case_of(args.seed))
        for line in work(args.seed, args.cases, args.until):
            tally.add(line)
    else:
        # Seeds of the clock, far apart, so that no two runs or workers meet.
        first, until = int(time.time()) * 1000, time.time() + 60 * args.minutes
        print(f"seeds from {first} on, {args.workers} workers, {args.minutes:g} minutes", flush=True)
        starts = [first + worker * 10**12 for worker in range(args.workers)]
        threads = [threading.Thread(target=watch, args=(start, until, tally)) for start in starts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tally.show()
    if tally.failed:
        print("failed:", *tally.failed)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
