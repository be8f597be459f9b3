"""Compare decoding speed with another commit: `python -m benchmarks.against COMMIT`.

Each tree loads the pair (`--target`, `--drafter`; the bundled one by default) in its own process, and both are
interleaved on the same prompts: old new new old, repeated. The first measurement of each does not count. Speed is all
tokens over the time of `generate`, prefill included; a ratio is that of two neighbours in time. Host time is the part
of a plain step outside the target's forward pass.

The command fails if a pair does not run compiled (unless `--backend hf`) or tokens differ. It writes against.md and
against.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import interleaving
from benchmarks.harness.command import PROMPTS, ROOT, Parser, in_words, listed
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.report import table, write_files

from blockdraft.engine import loops
from blockdraft.models.places import located
from blockdraft.prompt_sets import read_prompt_sets

METHODS = ("plain", "chain", "tree")
MIN = 4  # prompts per measurement, one after the other if the batch is smaller
PATIENCE = 3600.0
CACHE = ROOT / "build/against-cache"  # without pulled models, so that the bundled pair is the default
HEADER = (
    "", "batch", "old, tokens/s", "new, tokens/s", "new / old (95 % interval)", "host, old", "host, new", "same tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One measurement of one tree."""

    seconds: float
    host_seconds_per_forward: float | None
    answers: list[list[int]]
    steps: int

    @property
    def speed(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def child(root: Path, pair: dict[str, str | None], threads: int | None, log: Path) -> PeerProcess:
    """Start the process of one tree. `pair` holds the arguments of `child.load`."""
    command = [sys.executable, str(Path(__file__).with_name("child.py"))]
    # Packages beside the core, which may be installed from the other tree, come from the same tree.
    sources = os.pathsep.join(map(str, [root / "src", *sorted(root.glob("packages/*/src"))]))
    environment = {"PYTHONPATH": sources, "BLOCKDRAFT_CACHE": str(CACHE)}
    return PeerProcess(command, pair, threads, log, PATIENCE, environment=environment, cwd=root)


@contextmanager
def checked_out(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """Check out a commit into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="against-") as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=root, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)


def compare(
    old: PeerProcess,
    new: PeerProcess,
    methods: Sequence[str],
    sizes: Sequence[int],
    prompts: Sequence[str],
    tokens: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield the summary of each method at each batch size."""
    for method in methods:
        for size in sizes:
            asked = {"method": method, "rows": size, "tokens": tokens}
            asked["prompts"] = list(islice(cycle(prompts), max(size, MIN)))
            for tree in (old, new):  # warm-up
                tree.ask("measure", asked)
            samples: dict[int, list[Sample]] = {0: [], 1: []}
            for _, _, which in interleaving.interleaved(["all"], [0, 1], 2 * rounds):
                samples[which].append(Sample(**(old, new)[which].ask("measure", asked)))
            yield summary(method, size, *samples.values())


def summary(method: str, size: int, old: Sequence[Sample], new: Sequence[Sample]) -> dict[str, Any]:
    """Return medians and ratios. Sample i of one tree was taken next to sample i of the other."""
    ratios = [mine.speed / before.speed for before, mine in zip(old, new, strict=True)]
    row: dict[str, Any] = {"method": method, "rows": size}
    for name, samples in (("old", old), ("new", new)):
        hosts = [1e6 * s.host_seconds_per_forward for s in samples if s.host_seconds_per_forward is not None]
        row[f"{name}_tokens_per_second"] = median(sample.speed for sample in samples)
        row[f"{name}_host_microseconds"] = interleaving.median(hosts)
    return row | {
        "ratio": median(ratios),
        "interval": list(interleaving.interval(ratios)),
        "identical": all(sample.answers == old[0].answers for sample in [*old, *new]),
        "repetitive": sum(map(loops, new[0].answers)),
        "answers": len(new[0].answers),
        "samples": [{k: v for k, v in asdict(s).items() if k != "answers"} for s in [*old, *new]],
    }


def line(row: dict[str, Any]) -> list[str]:
    """Return the table cells of a summary."""
    speeds = [f"{row[f'{tree}_tokens_per_second']:.1f}" for tree in ("old", "new")]
    # With a drafter, this time includes the drafter's and says nothing about the host.
    hosts = [row[f"{tree}_host_microseconds"] if row["method"] == "plain" else None for tree in ("old", "new")]
    same = "yes" if row["identical"] else "NO"
    same += f", {row['repetitive']} of {row['answers']} repetitive" if row["repetitive"] else ""
    ratio = f"{row['ratio']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})"
    return [row["method"], str(row["rows"]), *speeds, ratio, *(f"{h:.0f} us" if h else "" for h in hosts), same]


def main(words: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, out=ROOT / "build" / "against")
    add, known = parser.add_argument, ",".join(METHODS)
    add("commit", help="the commit to compare with")
    add("--target", type=Path, help="a folder, GGUF file or pulled model; the bundled target by default")
    add("--drafter", help="the target's default drafter, unless given; both trees must know the name")
    add("--backend", choices=("native", "hf"), default="native")
    kinds = ("float32", "bfloat16", "int8")
    add("--kv-dtype", choices=kinds, help="of the working tree's keys and values, where the commit's default differs")
    add("--methods", type=listed(known=METHODS), default=known, help=f"of {known}")
    add("--rows", type=listed(int), default="1,4,16", help="batch sizes (1,4,16)")
    add("--tokens", type=int, default=96, help="most new tokens per prompt (96)")
    add("--rounds", type=int, default=8, help="rounds of old new new old (8)")
    add("--threads", type=int, help="OMP_NUM_THREADS of both")
    add("--prompts", type=Path, default=PROMPTS, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    args = parser.parse(words)
    [given] = read_prompt_sets([args.prompts])
    with in_words(), ExitStack() as opened:
        target = args.target and str(Path(located(args.target)).resolve())
        pair = {"target": target, "drafter": args.drafter, "backend": args.backend}
        keys = {"kv_dtype": args.kv_dtype} if args.kv_dtype else {}
        folder = opened.enter_context(checked_out(args.commit))
        old, new = (
            opened.enter_context(child(root, own, args.threads, args.out / f"{name}.log"))
            for name, root, own in (("old", folder, pair), ("new", ROOT, pair | keys))
        )
        name = args.target.name if args.target else "The bundled pair"
        header = (
            f"{name}, old: {args.commit} ({old.about['running']}); new: the working tree ({new.about['running']}). "
            f"Greedy responses of up to {args.tokens} tokens, {2 * args.rounds} pairs of measurements a row.\n\n"
        )
        rows = list[dict[str, Any]]()
        for row in compare(old, new, args.methods, args.rows, given.prompts, args.tokens, args.rounds):
            rows.append(row)
            print(table(HEADER, [line(row)]).splitlines()[-1], flush=True)
            page = header + table(HEADER, map(line, rows)) + "\n"
            write_files(args.out, {"against.json": rows, "against.md": page})
    print(f"\n{page}")
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
