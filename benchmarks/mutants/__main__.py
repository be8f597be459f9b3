"""Breaks the code on purpose and runs the tests that should notice: `python -m benchmarks.mutants [WORD ...]`.

The mutations are in this folder's TOML files, an entry each:

    [[mutant]]
    file = "src/blockdraft/decode/tree.py"
    old = "tokens[0] = len(path_probs)"                # must occur exactly once
    new = "tokens[0] = 1"
    tests = ["tests/decode/test_tree.py"]          # as pytest takes them
    why = "The bonus of one row counted for all."

Each is applied to a copy of the working tree. Results are kept in build/mutants.json until a source or a test changes,
so an interrupted run goes on where it stopped. The status is 1 where a mutation survives or no longer fits the code,
and where all tests of one are skipped, as those of the page are without a browser.
"""

from __future__ import annotations

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

from benchmarks.harness.command import ROOT, Parser
from benchmarks.harness.report import table, write_files
from benchmarks.mutants.mutant import FOLDER, Mutant, Result, copied, fingerprint, judge, read, run_tests

OUTCOMES = ("survived", "stale", "skipped", "caught")  # those first that need work


def results_table(results: Sequence[tuple[Mutant, Result]], root: Path = ROOT) -> str:
    ordered = sorted(results, key=lambda pair: OUTCOMES.index(pair[1].outcome))
    lines = ([r.outcome, f"{r.seconds:.1f}", mutant.place(root), mutant.why, r.by] for mutant, r in ordered)
    return table(["outcome", "s", "where", "what is broken", "noticed by"], lines) + "\n"


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
        return None if found is None else Result(*(found[name] for name in ("outcome", "seconds", "by")))

    def add(self, mutant: Mutant, result: Result) -> None:
        self._results[mutant.key(self._state)] = asdict(result) | {"state": self._state, "file": mutant.file}
        write_files(self._path.parent, {self._path.name: self._results})


def examine(
    mutants: Sequence[Mutant], root: Path, kept: Kept, jobs: int, seconds: float
) -> list[tuple[Mutant, Result]]:
    """Judge unknown mutations in parallel, each in a copy of its own; report progress."""
    results = [(mutant, result) for mutant in mutants if (result := kept.find(mutant)) is not None]
    known = {mutant for mutant, _ in results}
    left = [mutant for mutant in mutants if mutant not in known]
    if results:
        print(f"{len(results)} of {len(mutants)} are known from before", flush=True)
    if not left:
        return results
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(jobs, len(left))):
            trees.put(copied(root, Path(place) / str(number)))

        def one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return judge(mutant, tree, Path(place) / "cache", seconds)
            finally:
                trees.put(tree)

        began = time.perf_counter()
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(one, mutant): mutant for mutant in left}
            try:
                for count, future in enumerate(as_completed(futures), start=1):
                    mutant, result = futures[future], future.result()
                    kept.add(mutant, result)
                    results.append((mutant, result))
                    minutes = (time.perf_counter() - began) / count * (len(left) - count) / 60
                    found = f"{result.outcome} in {result.seconds:.0f} s: {mutant.place(root)} {mutant.why}"
                    print(f"[{count}/{len(left)}, {minutes:.1f} min left] {found} {result.by}", flush=True)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return results


def sound(mutants: Sequence[Mutant], root: Path, seconds: float) -> str:
    """Run all named tests on the unbroken code; returns their output if they fail."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    # A test that is named alone and by its file runs once.
    tests = [test for test in tests if not any(test != other and test.startswith(other) for other in tests)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        status, output = run_tests(copied(root, Path(place) / "tree"), tests, Path(place) / "cache", seconds)
    return "" if status == 0 else f"pytest ended with {status}:\n{output[-3000:]}"


def main() -> int:
    parser = Parser(__doc__, resumes=True)
    parser.add_argument("words", nargs="*", help="only mutations whose file or description holds one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: one a core)")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest run of one mutation's tests (300)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests on the unbroken code first")
    args = parser.parse()
    mutants = read(sorted(FOLDER.glob("*.toml")))
    if args.words:
        mutants = [m for m in mutants if any(word in m.file or word in m.why for word in args.words)]
    if not mutants:
        parser.error(f"no mutation holds one of {args.words}")
    kept = Kept(args.results, fingerprint(ROOT), args.anew)
    left = [mutant for mutant in mutants if kept.find(mutant) is None]
    if left and not args.unchecked:
        print(f"the tests of {len(left)} mutations on the unbroken code", flush=True)
        if trouble := sound(left, ROOT, 10 * args.seconds):
            print(trouble, file=sys.stderr)
            return 2
    results = examine(mutants, ROOT, kept, args.jobs, args.seconds)
    print(f"\n{results_table(results)}")
    outcomes = [result.outcome for _, result in results]
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in reversed(OUTCOMES)))
    return 0 if outcomes.count("caught") == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
