"""Breaks the code on purpose and runs the tests that should notice: `python -m benchmarks.mutants [WORD ...]`.

The mutations are in this folder's TOML files, an entry each:

    [[mutant]]
    file = "src/blockdraft/decode/tree.py"
    old = "tokens[0] = len(path_probs)"                # must occur exactly once
    new = "tokens[0] = 1"
    tests = ["tests/decode/test_tree.py"]          # as pytest takes them
    why = "The bonus of one row counted for all."

Each is applied to a copy of the working tree. Results are kept in build/mutants.json until a source or a test changes,
so an interrupted run goes on where it stopped. The status is 1 where a mutation survives or no longer fits the code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from benchmarks.mutants.mutants import (
    FOLDER,
    ROOT,
    Mutant,
    Result,
    as_result,
    copied,
    fingerprint,
    judge,
    read,
    run_tests,
)


def table(results: Sequence[tuple[Mutant, Result]], root: Path = ROOT) -> str:
    """All results in markdown, those that need work first."""
    order = {"survived": 0, "stale": 1, "caught": 2}
    lines = ["| outcome | s | where | what is broken | noticed by |", "|---|---|---|---|---|"]
    for mutant, result in sorted(results, key=lambda pair: order[pair[1].outcome]):
        where = place_of(mutant, root)
        lines.append(f"| {result.outcome} | {result.seconds:.1f} | {where} | {mutant.why} | {result.by} |")
    return "\n".join(lines) + "\n"


def place_of(mutant: Mutant, root: Path) -> str:
    return f"{mutant.file.removeprefix('src/blockdraft/')}:{mutant.line(root)}"


class Kept:
    """Results in a file.

    Args:
        state: Fingerprint of what they hold for.
    """

    def __init__(self, path: Path, state: str, anew: bool = False) -> None:
        self._path, self._state = path, state
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not anew else {}
        self._results = {key: value for key, value in known.items() if value["state"] == state}

    def find(self, mutant: Mutant) -> Result | None:
        found = self._results.get(mutant.key(self._state))
        return None if found is None else as_result(found)

    def add(self, mutant: Mutant, result: Result) -> None:
        self._results[mutant.key(self._state)] = asdict(result) | {"state": self._state, "file": mutant.file}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._results, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)


def examine(
    mutants: Sequence[Mutant], root: Path, kept: Kept, jobs: int, seconds: float
) -> list[tuple[Mutant, Result]]:
    """Judge what is not yet known, some at a time, each in a copy of its own; report progress."""
    results = [(mutant, result) for mutant in mutants if (result := kept.find(mutant)) is not None]
    known = {mutant for mutant, _ in results}
    open_ones = [mutant for mutant in mutants if mutant not in known]
    if results:
        print(f"{len(results)} of {len(mutants)} are known from before", flush=True)
    if not open_ones:
        return results
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        cache = Path(place) / "cache"
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(jobs, len(open_ones))):
            trees.put(copied(root, Path(place) / str(number)))

        def one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return judge(mutant, tree, cache, seconds)
            finally:
                trees.put(tree)

        began = time.perf_counter()
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(one, mutant): mutant for mutant in open_ones}
            try:
                for count, future in enumerate(as_completed(futures), start=1):
                    mutant, result = futures[future], future.result()
                    kept.add(mutant, result)
                    results.append((mutant, result))
                    left = (time.perf_counter() - began) / count * (len(open_ones) - count)
                    progress = f"[{count}/{len(open_ones)}, {left / 60:.1f} min left]"
                    found = f"{result.outcome} in {result.seconds:.0f} s: {place_of(mutant, root)} {mutant.why}"
                    print(progress, found, result.by, flush=True)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return results


def sound(mutants: Sequence[Mutant], root: Path, seconds: float) -> str:
    """Run all named tests on the code as it is: what fails anyway notices nothing. What they print if they fail."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    # A test that is named by itself and within its file runs once.
    tests = [test for test in tests if not any(test != other and test.startswith(other) for other in tests)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        status, output = run_tests(copied(root, Path(place) / "tree"), tests, Path(place) / "cache", seconds)
    return "" if status == 0 else f"pytest ended with {status}:\n{output[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose file or description holds one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: one a core)")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest run of one mutation's tests (300)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--anew", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests on the unbroken code first")
    args = parser.parse_args()
    mutants = read(sorted(FOLDER.glob("*.toml")))
    if args.words:
        mutants = [m for m in mutants if any(word in m.file or word in m.why for word in args.words)]
    if not mutants:
        parser.error(f"no mutation holds one of {args.words}")
    kept = Kept(args.results, fingerprint(ROOT), args.anew)
    open_ones = [mutant for mutant in mutants if kept.find(mutant) is None]
    if open_ones and not args.unchecked:
        print(f"the tests of {len(open_ones)} mutations on the unbroken code", flush=True)
        if trouble := sound(open_ones, ROOT, 10 * args.seconds):
            print(trouble, file=sys.stderr)
            return 2
    results = examine(mutants, ROOT, kept, args.jobs, args.seconds)
    print(f"\n{table(results)}")
    outcomes = [result.outcome for _, result in results]
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("caught", "survived", "stale")))
    return 0 if outcomes.count("caught") == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
