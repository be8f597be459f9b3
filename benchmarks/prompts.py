"""Time whole prompts of GGUF files, beside llama.cpp's `llama-bench`: `python -m benchmarks.prompts MODEL.gguf ...`.

    python -m benchmarks.peers.environments llama_bench
    python -m benchmarks.prompts MODEL.gguf [MODEL.gguf] [--lengths 2048,8192,20480] [--kv-dtypes bfloat16,int8]

Prompts are random tokens. Ours are read by an engine with each dtype of keys and values, and by llama-bench with flash
attention off and on, interleaved, each in a process of its own. The same command continues an interrupted run; --anew
starts over. Results go to prompts.csv and prompts.md of --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness.command import CORES, ROOT, Parser, in_words, keep_settings, listed, tell
from benchmarks.harness.interleaving import groups, interleaved, median
from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.harness.records import Records
from benchmarks.harness.report import number, table, write_files
from benchmarks.peers import environments

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

LLAMA = {"llama.cpp, flash attention off": "0", "llama.cpp, flash attention on": "1"}
OURS = "blockdraft, "  # before the dtype of keys and values
LLAMA_BENCH = environments.folder("llama_cpp") / "build" / "bin" / "llama-bench"
WARM_UP = 64  # tokens of a first prompt, which is not timed
PATIENCE = 3600.0  # seconds of the longest prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read."""

    KEY: ClassVar[tuple[str, ...]] = ("model", "way", "length", "repeat")

    model: str
    way: str
    length: int
    repeat: int
    seconds: float


def serve(settings: dict[str, Any]) -> None:
    """Load the model, and answer each length with the seconds that a prompt of it takes."""
    longest = settings["longest"] + 1
    target = load_target(
        settings["model"],
        device="cpu",
        compile="on",
        threads=settings["threads"],
        max_context=longest,
        kv_dtype=settings["kv_dtype"],
    )
    engine, draws = Engine(target, load_drafter("none", target=target)), random.Random(0)
    print(json.dumps({"ready": {"running": target.running}}), flush=True)
    for line in sys.stdin:
        tokens = [draws.randrange(target.vocab_size) for _ in range(json.loads(line)["read"]["tokens"])]
        [done] = engine.generate([tokens], SamplingParams(1, ignore_eos=True))
        print(json.dumps({"seconds": done.stats.prefill_seconds}), flush=True)


def read_ours(model: Path, dtype: str, length: int, threads: int, log: Path) -> float:
    """Return the seconds that our engine takes for a prompt."""
    command = [sys.executable, "-m", "benchmarks.prompts", "--serve"]
    settings = {"model": str(model), "kv_dtype": dtype, "threads": threads, "longest": max(length, WARM_UP)}
    with PeerProcess(command, settings, threads, log, PATIENCE) as process:
        process.ask("read", {"tokens": WARM_UP})
        return float(process.ask("read", {"tokens": length})["seconds"])


def read_theirs(model: Path, flash: str, length: int, threads: int, program: Path = LLAMA_BENCH) -> float:
    """Return the seconds that llama-bench takes for a prompt, after a short one.

    Raises:
        PeerError: llama-bench fails.
    """
    # Its own warm-up would read the whole prompt.
    prompts = f"{WARM_UP},{length}"
    options = ["-t", threads, "-p", prompts, "-n", 0, "-r", 1, "--no-warmup", "-fa", flash, "-o", "json"]
    command = [str(word) for word in (program, "-m", model, *options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return float(json.loads(done.stdout)[-1]["avg_ns"]) / 1e9


def page(prompts: Sequence[Prompt]) -> str:
    """Return a table of tokens per second, and of the fastest way of ours over the fastest of llama.cpp."""
    lines = []
    for (model, length), own in groups(prompts, lambda prompt: (prompt.model, prompt.length)).items():
        rates = {
            way: length / statistics.median(prompt.seconds for prompt in runs)
            for way, runs in groups(own, lambda prompt: prompt.way).items()
        }
        ours = max((rate for way, rate in rates.items() if way not in LLAMA), default=None)
        theirs = max((rate for way, rate in rates.items() if way in LLAMA), default=None)
        ratio = ours / theirs if ours and theirs else None
        lines += [[model, str(length), way, number(rate, ".0f"), ""] for way, rate in rates.items()]
        lines.append([model, str(length), "fastest over llama.cpp's fastest", "", number(ratio)])
    repeats = median(len(own) for own in groups(prompts, lambda p: (p.model, p.length, p.way)).values())
    header = ["Model", "Tokens of the prompt", "Way", "Tokens/s", "Ratio"]
    return f"Medians of {number(repeats, '.0f')} interleaved runs.\n\n{table(header, lines, 3)}\n"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    quick = {"lengths": "256", "kv_dtypes": "bfloat16", "repeats": 1}
    out = ROOT / "build" / "prompts"
    parser = Parser(__doc__, prog="python -m benchmarks.prompts", out=out, quick=quick, resumes=True, threads=CORES)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--lengths", type=listed(int), default="2048,8192,20480", help="of prompts, in tokens")
    parser.add_argument("--kv-dtypes", type=listed(), default="bfloat16,int8", help="of our keys and values")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse(words)


def run(args: argparse.Namespace) -> None:
    keep_settings(args.out, {"threads": args.threads}, args.anew)
    prompts = Records(Prompt, args.out / "prompts.csv")
    ways = [OURS + dtype for dtype in args.kv_dtypes]
    if LLAMA_BENCH.exists():
        ways += LLAMA
    else:
        tell("llama-bench is not built; `python -m benchmarks.peers.environments llama_bench` builds it.")
    tasks = [(model, length) for model in args.models for length in args.lengths]
    for repeat, (model, length), way in interleaved(tasks, ways, args.repeats):
        if (model.stem, way, length, repeat) in prompts.had:
            continue
        if way in LLAMA:
            seconds = read_theirs(model, LLAMA[way], length, args.threads)
        else:
            log = args.out / "logs" / f"{model.stem}-{way.removeprefix(OURS)}.log"
            seconds = read_ours(model, way.removeprefix(OURS), length, args.threads, log)
        tell(f"{model.stem}, {length} tokens, {way}: {length / seconds:.0f} tokens/s")
        prompts.add(Prompt(model.stem, way, length, repeat, seconds))
    text = page(prompts.all)
    write_files(args.out, {"prompts.md": text})
    print(text)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[-1]))
        return
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
