"""Decoding speed by the size of the model, beside llama.cpp's on the same weights: `make bench-sizes`.

The bundled pair, made 1, 2, 4 and 8 times as wide (`widen.py`), says the same words at every size: tau is that of a
trained pair, and the cost is that of the size. Shapes of published models (--shapes) have random weights, and their
draft tokens are replaced, so that tau is the published one (`pairs.py`). For each size and number of bits, all methods
are interleaved on the same prompts. The same command continues an interrupted run; --anew starts over. Results with
other widths, shapes, kinds, methods or lengths stay in the tables.

Written to --out: runs.csv with every answer, sizes.md and sizes.png.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from benchmarks.harness import interleaving
from benchmarks.harness.command import CORES, PROMPTS, ROOT, Parser, digest, in_words, keep_settings, listed, tell
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.records import Records
from benchmarks.peers import environments
from benchmarks.sizes import pairs, report
from benchmarks.sizes.measure import Run, Task, measure, tasks
from benchmarks.sizes.ways import LLAMA, LLAMA_KINDS, OUR_KINDS, Q4_K_ROW, Way, memory, start, ways
from benchmarks.sizes.widen import TARGET

from blockdraft.engine.text import encode
from blockdraft.prompt_sets import read_prompt_sets
from blockdraft.targets import load_target_text

Start: TypeAlias = Callable[[Way, list[Way], dict[str, Any], float, Path], PeerProcess]

QUICK = {
    "widths": "1,4",
    "kinds": "bfloat16,int4",
    "llama": "bf16,Q4_0",
    "methods": "chain:3,chain:auto",
    "limit": 2,
    "tokens": 32,
    "repeats": 1,
    "first": "16",
    "contexts": "",
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, out=ROOT / "build" / "sizes", quick=QUICK, resumes=True, threads=CORES)
    add, numbers, names = parser.add_argument, listed(int), listed()
    add("--prompts", type=Path, default=PROMPTS, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    add("--widths", type=names, default="1,2,4,8", help="powers of two (1,2,4,8); 16 takes 24 GiB of memory")
    add("--shapes", type=names, default="", help="such as qwen3-0.6b,qwen3-4b; alone, unless --widths is given too")
    kinds, theirs, methods = ",".join(OUR_KINDS), ",".join(LLAMA_KINDS), "chain:3,chain:5,chain:7,tree:16"
    add("--kinds", type=listed(known=OUR_KINDS), default=kinds, help=f"of our weights ({kinds})")
    add("--llama", type=listed(known=LLAMA_KINDS), default=theirs, help=f"kinds of llama.cpp's ({theirs}); '' for none")
    add("--methods", type=names, default=f"{methods},chain:auto,tree:auto", help="N draft tokens, or as many as pay")
    add(
        "--llama-draft-tokens",
        type=numbers,
        default="3,5",
        help="draft tokens of llama.cpp's drafting (3,5); '' for none",
    )
    add("--limit", type=int, default=8, help="prompts (8)")
    add("--tokens", type=int, default=96, help="most new tokens of an answer (96)")
    add("--first", type=numbers, default="16,512", help="prompt lengths of which the first token is timed (16,512)")
    add("--contexts", type=numbers, default="256,4096", help="prompt lengths behind which decoding is timed, one each")
    add("--repeats", type=int, default=5)
    add("--patience", type=float, default=3600.0, help="seconds that loading or one answer may take")
    given = parser.parse(words)
    if given.shapes and given.widths == names(parser.get_default("widths")):
        given.widths = []
    return given


def new_process() -> Executor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def measure_size(
    size: str,
    prompts: list[list[int]],
    stops: list[int],
    args: argparse.Namespace,
    runs: Records[Run],
    start: Start,
    executor: Callable[[], Executor],
) -> dict[Way, str]:
    """Measure what is left of a size; returns why ways are missing."""
    found = tasks(size, prompts, args.tokens, args.first, args.contexts)
    chosen = ways(args.kinds, args.methods, args.llama, args.llama_draft_tokens)
    missing: dict[Way, str] = {}
    if reason := environments.why_missing("llama_cpp"):
        missing |= {way: reason for way in chosen if way.side == LLAMA}
    # Of matrices with other rows llama.cpp would quietly keep some in another kind.
    elif any(length % Q4_K_ROW for length in pairs.row_lengths(size)):
        missing |= {way: f"rows are no multiple of {Q4_K_ROW}" for way in chosen if way.kind == "Q4_K"}
    chosen = [way for way in chosen if way not in missing]
    left = [
        (repeat, task, way)
        for repeat, task, way in interleaving.interleaved(found, chosen, args.repeats, Task.takes)
        if (size, *astuple(way), task.name, task.index, repeat) not in runs.had
    ]
    if not left:
        return missing
    longest = max(len(task.prompt) for task in found) + args.tokens + 64  # some peers look ahead
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        tell(f"size {size}: making the pair")
        with executor() as apart:  # the memory that making takes ends with it
            target, drafter = apart.submit(pairs.make, size, Path(folder), longest).result()
        given = {"target": str(target), "drafter": str(drafter), "assistant": None, "dtype": "bfloat16"}
        given |= {"device": "cpu", "threads": args.threads, "max_length": longest, "models": f"{folder}/gguf"}

        def load(process: Way) -> PeerProcess:
            served = [way for way in chosen if way.process == process]
            parts = (size, process.side, process.kind, process.method.replace(":", ""), process.drafter)
            tell(f"loading {' '.join(filter(None, parts))}")
            log = args.out / "logs" / f"{'-'.join(filter(None, parts))}.log"
            return start(process, served, given, args.patience, log)

        for bits, own in interleaving.groups(left, lambda step: step[2].bits).items():  # these are in memory together
            _check_memory(size, bits, {way.process for _, _, way in own}, target, drafter)
            missing |= measure(size, pairs.parameters(target), own, load, stops, runs)
    return missing


def _check_memory(size: str, bits: int, processes: Collection[Way], target: Path, drafter: Path) -> None:
    weights = [(folder / "model.safetensors").stat().st_size for folder in (target, drafter)]
    needed, free = memory(processes, *weights), psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"The {len(processes)} processes that decode size {size} with {bits} bits take about {needed / 1e9:.1f} GB"
            f" together; {free / 1e9:.1f} GB are free. Give fewer --kinds, --llama or --llama-draft-tokens."
        )


def run(args: argparse.Namespace, start: Start = start, executor: Callable[[], Executor] = new_process) -> None:
    """Measure, and write the report.

    Args:
        start: Loads the models of a process.
        executor: Makes the models, one at a time.
    """
    text = load_target_text(TARGET)
    [given] = read_prompt_sets([args.prompts], args.limit)
    prompts = [encode(prompt, text) for prompt in given.prompts]
    measured = {"prompts": digest(prompts), "tokens": args.tokens, "threads": args.threads}
    keep_settings(args.out, measured, args.anew)
    runs = Records(Run, args.out / "runs.csv")
    missing: dict[tuple[str, Way], str] = {}
    for size in [*args.widths, *args.shapes]:
        found = measure_size(size, prompts, sorted(text.eos_token_ids), args, runs, start, executor)
        missing |= {(size, way): reason for way, reason in found.items()}
    if not runs.all:
        raise ValueError(f"Nothing could be measured: {'; '.join(dict.fromkeys(missing.values()))}")
    page = report.page(runs.all, missing)
    (args.out / "sizes.md").write_text(page, encoding="utf-8")
    report.draw(runs.all, args.out / "sizes.png")
    print(page)
    if unequal := report.changed(runs.all):
        raise ValueError(f"These change tokens, so their speed says nothing: {', '.join(unequal)}.")


def main() -> None:
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
