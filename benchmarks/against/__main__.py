"""Decoding speed of the working tree against another commit: `python -m benchmarks.against COMMIT`.

Both trees load the bundled pair in a process each, which stays, and take turns on the same prompts: old new new old,
again and again, so that what else the machine does falls on both. The first turn of each does not count. Speed is all
tokens of the answers over the time of `generate`, prompts included; a ratio is that of two neighbours in time. Host
time is what a cycle takes outside the target's forward, hence in plain decoding all that is not the network.

It fails where a pair does not run compiled (unless `--backend hf`). Written: against.md and against.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.against.report import Cell, Sample, summary, table

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "peers" / "prompts.jsonl"
METHODS, ROWS = "plain,chain,tree", "1,4,16"
LEAST = 4  # prompts of a measurement, one after the other where the batch is smaller


class Tree:
    """The child process of one tree."""

    def __init__(self, root: Path, backend: str, threads: int | None) -> None:
        environment = os.environ | {"PYTHONPATH": str(root / "src")}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, str(Path(__file__).with_name("measure.py")), backend]
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.running: str = self._answer()["running"]

    def measure(self, **asked: Any) -> Sample:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Sample(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"The measurement ended with {self._process.returncode}; its message is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def checked_out(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """A working tree of a commit, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="against-") as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=root, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)


def compare(
    old: Tree, new: Tree, methods: Sequence[str], rows: Sequence[int], prompts: Sequence[str], tokens: int, rounds: int
) -> Iterator[Cell]:
    """Measure each method at each batch size."""
    for method in methods:
        for size in rows:
            asked = {"method": method, "rows": size, "tokens": tokens}
            asked["prompts"] = list(islice(cycle(prompts), max(size, LEAST)))
            for tree in (old, new):  # the warm-up
                tree.measure(**asked)
            found: dict[Tree, list[Sample]] = {old: [], new: []}
            for number in range(2 * rounds):
                for tree in (old, new) if number % 2 == 0 else (new, old):
                    found[tree].append(tree.measure(**asked))
            yield Cell(method, size, found[old], found[new])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--backend", choices=("native", "hf"), default="native")
    parser.add_argument("--methods", default=METHODS, help=f"of {METHODS}")
    parser.add_argument("--rows", default=ROWS, help=f"batch sizes ({ROWS})")
    parser.add_argument("--tokens", type=int, default=96, help="most new tokens of an answer (96)")
    parser.add_argument("--rounds", type=int, default=8, help="turns old new new old (8)")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "against")
    args = parser.parse_args()
    methods, rows = args.methods.split(","), [int(size) for size in args.rows.split(",")]
    if unknown := set(methods) - set(METHODS.split(",")):
        parser.error(f"unknown methods {sorted(unknown)}; there are {METHODS}")
    lines = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        folder = opened.enter_context(checked_out(args.commit))
        old = opened.enter_context(closing(Tree(folder, args.backend, args.threads)))
        new = opened.enter_context(closing(Tree(ROOT, args.backend, args.threads)))
        header = (
            f"The bundled pair, old: {args.commit} ({old.running}); new: the working tree ({new.running}). Greedy "
            f"answers of up to {args.tokens} tokens, {2 * args.rounds} pairs of measurements a row.\n\n"
        )
        summaries = []
        for cell in compare(old, new, methods, rows, prompts, args.tokens, args.rounds):
            summaries.append(summary(cell))
            print(table(summaries[-1:]).splitlines()[-1], flush=True)
            (args.out / "against.json").write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
            (args.out / "against.md").write_text(header + table(summaries), encoding="utf-8")
    print(f"\n{header}{table(summaries)}")
    return 0 if all(s["identical"] for s in summaries) else 1


if __name__ == "__main__":
    sys.exit(main())
