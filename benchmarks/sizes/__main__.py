"""Decoding speed by the size of the model, beside llama.cpp's on the same weights: `make bench-sizes`.

The bundled pair, made 1, 2, 4 and 8 times as wide (`widen.py`), says the same words at every size, so tau is that of a
trained pair and the cost is that of the size. Shapes of published models (--shapes) have random weights, and there
guesses are replaced: as many are right as the published tau says (`pairs.py`). For each size and number of bits all
ways to decode take turns on the same prompts. An interrupted run goes on where it was; --anew forgets it. What was
measured with other widths, shapes, kinds, methods or lengths stays in the tables.

Written to --out: runs.csv with every answer, sizes.md and sizes.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context
from pathlib import Path

import psutil

from benchmarks.harness.command import in_words, keep_settings
from benchmarks.harness.process import PeerProcess
from benchmarks.peers import environments
from benchmarks.sizes import pairs, report
from benchmarks.sizes.runs import Runs, measure, steps, tasks
from benchmarks.sizes.ways import LLAMA, LLAMA_KINDS, OUR_KINDS, Q4_K_ROW, Way, memory, start, ways
from benchmarks.sizes.widen import TARGET
from blockdraft.engine.text import encode
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.targets import load_target_text

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "peers" / "prompts.jsonl"
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=Path, default=PROMPTS, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    add("--widths", default="1,2,4,8", help="powers of two (1,2,4,8); 16 takes 24 GiB of memory")
    add("--shapes", default="", help="such as qwen3-0.6b,qwen3-1.7b,qwen3-4b; alone, unless --widths is given too")
    add("--kinds", default=",".join(OUR_KINDS), help=f"of our weights ({','.join(OUR_KINDS)})")
    add("--llama", default=",".join(LLAMA_KINDS), help=f"kinds of llama.cpp's ({','.join(LLAMA_KINDS)}); '' for none")
    add(
        "--methods", default="chain:3,chain:5,chain:7,tree:16,chain:auto,tree:auto", help="N guesses, or as many as pay"
    )
    add("--llama-guesses", default="3,5", help="guesses of llama.cpp's drafting (3,5); '' for none")
    add("--limit", type=int, default=8, help="prompts (8)")
    add("--tokens", type=int, default=96, help="most new tokens of an answer (96)")
    add("--first", default="16,512", help="prompt lengths of which the first token is timed (16,512)")
    add("--contexts", default="256,4096", help="prompt lengths behind which decoding is timed, one prompt each")
    add("--repeats", type=int, default=5)
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    add("--patience", type=float, default=3600.0, help="seconds that loading or one answer may take")
    add("--quick", action="store_true", help=f"a few minutes: {', '.join(f'{k} {v}' for k, v in QUICK.items() if v)}")
    add("--anew", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=ROOT / "build" / "sizes")
    given = parser.parse_args()
    if given.quick:
        parser.set_defaults(**QUICK)
        given = parser.parse_args()
    if given.shapes and given.widths == parser.get_default("widths"):
        given.widths = ""
    return given


def words(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def measure_size(
    size: str, prompts: list[list[int]], stops: list[int], arguments: argparse.Namespace, runs: Runs
) -> dict[Way, str]:
    """Measure what is left of a size; returns why ways are missing."""
    first, contexts = ([int(each) for each in words(text)] for text in (arguments.first, arguments.contexts))
    guesses = [int(each) for each in words(arguments.llama_guesses)]
    found = tasks(size, prompts, arguments.tokens, first, contexts)
    chosen = ways(words(arguments.kinds), words(arguments.methods), words(arguments.llama), guesses)
    missing: dict[Way, str] = {}
    if reason := environments.why_missing("llama_cpp"):
        missing |= {way: reason for way in chosen if way.side == LLAMA}
    # Of other rows llama.cpp would quietly keep some in another kind.
    elif any(row % Q4_K_ROW for row in pairs.rows(size)):
        missing |= {way: f"rows are no multiple of {Q4_K_ROW}" for way in chosen if way.kind == "Q4_K"}
    chosen = [way for way in chosen if way not in missing]
    left = [
        (task, way, repeat)
        for task, way, repeat in steps(found, chosen, arguments.repeats)
        if (size, *astuple(way), task.name, task.index, repeat) not in runs.had
    ]
    if not left:
        return missing
    longest = max(len(task.prompt) for task in found) + arguments.tokens + 64  # some peers look ahead
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        print(f"size {size}: making the pair", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # the memory that making takes ends with it
            target, drafter = apart.submit(pairs.make, size, Path(folder), longest).result()
        given = {
            "target": str(target),
            "drafter": str(drafter),
            "assistant": None,
            "dtype": "bfloat16",
            "device": "cpu",
        }
        given |= {"threads": arguments.threads, "max_length": longest, "models": str(Path(folder) / "gguf")}

        def load(process: Way) -> PeerProcess:
            served = [way for way in chosen if way.process == process]
            parts = (size, process.side, process.kind, process.method.replace(":", ""), process.drafter)
            log = arguments.out / "logs" / f"{'-'.join(filter(None, parts))}.log"
            return start(process, served, given, arguments.patience, log)

        for bits in dict.fromkeys(way.bits for way in chosen):  # these are in memory together
            own = [step for step in left if step[1].bits == bits]
            _check_memory(size, bits, {way.process for _, way, _ in own}, target, drafter)
            missing |= measure(size, pairs.parameters(target), own, load, stops, runs)
    return missing


def _check_memory(size: str, bits: int, processes: Collection[Way], target: Path, drafter: Path) -> None:
    weights = [(folder / "model.safetensors").stat().st_size for folder in (target, drafter)]
    needed, free = memory(processes, *weights), psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"The {len(processes)} processes that decode size {size} with {bits} bits take about {needed / 1e9:.1f} GB"
            f" together; {free / 1e9:.1f} GB are free. Give fewer --kinds, --llama or --llama-guesses."
        )


def run(arguments: argparse.Namespace) -> None:
    if arguments.anew and arguments.out.exists():
        shutil.rmtree(arguments.out)
    text = load_target_text(TARGET)
    [given] = read_prompt_sets([arguments.prompts], arguments.limit)
    prompts = [encode(prompt, text) for prompt in given.prompts]
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    keep_settings(arguments.out, {"prompts": digest, "tokens": arguments.tokens, "threads": arguments.threads})
    runs = Runs(arguments.out / "runs.csv")
    missing: dict[tuple[str, Way], str] = {}
    for size in [*words(arguments.widths), *words(arguments.shapes)]:
        found = measure_size(size, prompts, sorted(text.eos_token_ids), arguments, runs)
        missing |= {(size, way): reason for way, reason in found.items()}
    if not runs.all:
        raise ValueError(f"Nothing could be measured: {'; '.join(dict.fromkeys(missing.values()))}")
    page = report.page(runs.all, missing)
    (arguments.out / "sizes.md").write_text(page, encoding="utf-8")
    report.draw(runs.all, arguments.out / "sizes.png")
    print(page)
    if unequal := report.changed(runs.all):
        raise ValueError(f"These change tokens, so their speed says nothing: {', '.join(unequal)}.")


def main() -> None:
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
