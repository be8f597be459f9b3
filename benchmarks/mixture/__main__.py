"""Benchmark the shapes of mixtures, hybrids and others, beside llama.cpp: `python -m benchmarks.mixture`.

    python -m benchmarks.peers.environments llama_bench
    python -m benchmarks.mixture --shapes qwen3.5-0.8b,granite-4-h-1b

It writes a GGUF file for each shape of a known model, with few layers (--layers) and random weights, in types much as
in published files. For ours and for llama.cpp (llama-bench) it measures, interleaved: plain decoding behind 256 tokens,
forward passes of 4 and 8 tokens there, as in a step that verifies draft tokens, prompts of 512 tokens, and the largest
resident set; of ours also decoding behind --far tokens. The same command continues an interrupted run; --anew starts
over. Results go to runs.csv and table.md of --out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from benchmarks.harness.command import CORES, ROOT, Parser, in_words, keep_settings, listed, tell
from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.harness.records import Records
from benchmarks.harness.report import number, table, write_files
from benchmarks.mixture.shapes import SHAPES, write_model
from benchmarks.peers import environments

from blockdraft.decode.proposal import chain_parents
from blockdraft.machine import cache_folder
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, load_target

OURS, THEIRS = "blockdraft", "llama.cpp"
NEAR, PROMPT = 256, 512  # tokens
SPARE = 512  # KV slots for all tokens that are decoded behind a text
DECODED = 32  # tokens of which the mean counts
PASSES = 5  # forward passes of which the median counts
PIECE = 512  # tokens of a text that are read at once
PATIENCE = 3600.0  # seconds of the longest answer
LLAMA_BENCH = environments.folder("llama_cpp") / "build" / "bin" / "llama-bench"


@dataclass(frozen=True)
class Figure:
    """A figure of one system.

    Attributes:
        what: "start" in seconds, "peak" in bytes, "far" and "1", "4", "8" in seconds per forward pass of as many tokens
            behind a long and a short text, or "prompt" in seconds.
    """

    KEY: ClassVar[tuple[str, ...]] = ("shape", "system", "what", "repeat")

    shape: str
    system: str
    what: str
    repeat: int
    value: float


class OurModel:
    """The model in this process, with a text in each of its caches.

    Args:
        settings: `model`, `threads`, `far` and `kv_dtype`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.target: Target = load_target(
            settings["model"],
            device="cpu",
            compile="on",
            threads=settings["threads"],
            kv_dtype=settings["kv_dtype"],
            max_context=settings["far"] + SPARE,
        )
        self._draws, self._caches = random.Random(1), dict[int, KVCache]()

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.tensor([[self._draws.randrange(self.target.vocab_size) for _ in range(count)]])

    def _new_cache(self, tokens: int) -> KVCache:
        return self.target.new_cache(1, self.target.row_slots(tokens))

    def _read(self, cache: KVCache, count: int) -> None:
        """Append random tokens to a text."""
        for begin in range(0, count, PIECE):
            size = min(PIECE, count - begin)
            last = torch.tensor([size - 1])
            self.target.forward(self._tokens(size), chain_parents(1, size), cache, logits_at=last)
            cache.commit([list(range(size))])

    def _behind(self, depth: int) -> KVCache:
        """Return the cache of a text of about `depth` tokens."""
        if depth not in self._caches:
            self._caches[depth] = self._new_cache(depth + SPARE)
            self._read(self._caches[depth], depth)
        return self._caches[depth]

    def prompt(self, tokens: int) -> float:
        """Return the seconds in which a prompt is read."""
        cache = self._new_cache(tokens)
        began = time.perf_counter()
        self._read(cache, tokens)
        return time.perf_counter() - began

    def decode(self, depth: int) -> float:
        """Return the seconds per token of plain decoding."""
        cache, parents, began = self._behind(depth), chain_parents(1, 1), 0.0
        for step in range(DECODED + 1):
            if step == 1:
                began = time.perf_counter()
            # As the engine decodes: a token of a prompt, whose logits are named, would keep copies of recurrent states.
            self.target.forward(self._tokens(1), parents, cache)
            cache.commit([[0]])
        return (time.perf_counter() - began) / DECODED

    def verify(self, depth: int, tokens: int) -> float:
        """Return the seconds of a forward pass with the logits of all its tokens."""
        cache, seconds = self._behind(depth), []
        for _ in range(PASSES + 1):
            nodes = self._tokens(tokens)
            began = time.perf_counter()
            self.target.forward(nodes, chain_parents(1, tokens), cache)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])


def serve(settings: dict[str, Any]) -> None:
    """Load the model and answer requests: {"prompt": {"tokens": n}}, "decode" and "verify"."""
    model = OurModel(settings)
    print(json.dumps({"ready": {"running": model.target.running}}), flush=True)
    for line in sys.stdin:
        [(name, request)] = json.loads(line).items()
        print(json.dumps({"seconds": getattr(model, name)(**request)}), flush=True)


def llama_bench(model: Path, threads: int, *options: object, program: Path = LLAMA_BENCH) -> tuple[list[Any], int]:
    """Return the results of llama-bench in the order of its options, and its largest resident set in bytes.

    The system counts this process's own size when it starts the other, so models should be larger than that.

    Raises:
        PeerError: It fails.
    """
    command = [program, "-m", model, "-t", threads, "-r", 1, "-o", "json", *options]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        answer, errors = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise PeerError(f"llama-bench ended with {process.returncode}: {errors.decode().strip()[-300:]}")
    return json.loads(answer), usage.ru_maxrss * 1024


def measure_llama(model: Path, threads: int) -> dict[str, float]:
    """Return llama.cpp's figures of one repeat, without those behind a long text, which it reads for many minutes."""
    [prompt], _ = llama_bench(model, threads, "-p", PROMPT, "-n", 0)
    passes, peak = llama_bench(model, threads, "-p", "4,8", "-n", DECODED, "-d", NEAR)
    found = {"prompt": prompt["avg_ns"] / 1e9, "peak": float(peak)}
    for each in passes:
        found[str(each["n_prompt"] or 1)] = each["avg_ns"] / 1e9 / (each["n_gen"] or 1)
    return found


def measure_ours(process: PeerProcess, far: int, repeat: int) -> dict[str, float]:
    """Return our figures of one repeat. The largest resident set counts before the long text is read."""
    found = {"prompt": process.ask("prompt", {"tokens": PROMPT})["seconds"]}
    found["1"] = process.ask("decode", {"depth": NEAR})["seconds"]
    for tokens in (4, 8):
        found[str(tokens)] = process.ask("verify", {"depth": NEAR, "tokens": tokens})["seconds"]
    if repeat == 0:
        found |= {"start": process.start_seconds, "peak": float(process.peak_bytes())}
    if far:
        found["far"] = process.ask("decode", {"depth": far})["seconds"]
    return found


def page(figures: Sequence[Figure], far: int) -> str:
    """Return a table with a row for each system and shape."""
    lines = []
    for shape in dict.fromkeys(figure.shape for figure in figures):
        rates = dict[str, dict[str, float]]()
        for system in (OURS, THEIRS):
            own = [figure for figure in figures if (figure.shape, figure.system) == (shape, system)]
            found = {what: statistics.median(f.value for f in own if f.what == what) for what in {f.what for f in own}}
            if not found:
                continue
            rates[system] = found
            ratios = [found[tokens] / found["1"] for tokens in ("4", "8")]
            slower = found["far"] / found["1"] if "far" in found else None
            lines.append(
                [
                    f"`{shape}`" if system == OURS else "",
                    system,
                    number(found.get("start"), ".1f"),
                    f"{found['peak'] / 1e9:.2f}",
                    f"{1 / found['1']:.1f}",
                    *(f"{ratio:.2f}" for ratio in ratios),
                    f"{PROMPT / found['prompt']:.0f}",
                    number(slower),
                ]
            )
        if len(rates) == 2:
            ours, theirs = rates[OURS], rates[THEIRS]
            factors = [f"{theirs[what] / ours[what]:.2f}" for what in ("1", "prompt")]
            lines.append(["", "times as fast", "", "", factors[0], "", "", factors[1], ""])
    header = ["Shape", "", "start s", "peak GB", "tokens/s", "R(4)", "R(8)", f"prompt of {PROMPT}, tokens/s"]
    return table([*header, f"slower behind {far}"], lines, 2) + "\n"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    out = ROOT / "build" / "mixture"
    quick = {"shapes": "qwen3-0.6b", "layers": 2, "repeats": 1, "far": 512}
    parser = Parser(__doc__, prog="python -m benchmarks.mixture", out=out, quick=quick, resumes=True, threads=CORES)
    parser.add_argument("--shapes", type=listed(known=SHAPES), default=",".join(SHAPES), help="models to take them of")
    parser.add_argument("--layers", type=int, help="layers of each model (4 to 40, by its shape)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved measurements of each system (3)")
    parser.add_argument("--kv-dtype", help="of our keys and values: float32, bfloat16 (default) or int8")
    parser.add_argument("--far", type=int, default=16384, metavar="TOKENS", help="the long text; 0 for none (16384)")
    return parser.parse(words)


def written(shape: str, args: argparse.Namespace) -> Path:
    """Return the file of a shape, which is written once."""
    layers = args.layers or SHAPES[shape].default_layers
    model: Path = args.out / f"{shape}-{layers}.gguf"
    if not model.exists():
        tell(f"writing {model}")
        partial = model.with_suffix(".partial")
        write_model(partial, SHAPES[shape], layers)
        partial.replace(model)
    return model


def run(args: argparse.Namespace) -> None:
    settled = {name: getattr(args, name) for name in ("threads", "far", "layers", "kv_dtype")}
    keep_settings(args.out, settled, args.anew)
    figures = Records(Figure, args.out / "runs.csv")
    own, libraries = args.out / "cache", cache_folder() / "libraries"  # which are compiled once for all models
    for folder in (own, libraries):
        folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (own / "libraries").symlink_to(libraries)
    if not LLAMA_BENCH.exists():
        tell("llama-bench is not built; `python -m benchmarks.peers.environments llama_bench` builds it.")
    for shape in args.shapes:
        if (shape, OURS, "prompt", args.repeats - 1) in figures.had:
            continue
        model = written(shape, args)
        settings = {"model": str(model), "threads": args.threads, "far": args.far, "kv_dtype": args.kv_dtype}
        command, cached = [sys.executable, "-m", "benchmarks.mixture", "--serve"], {"BLOCKDRAFT_CACHE": str(own)}
        for log in ("first.log", "ours.log"):  # the first start packs the weights
            process = PeerProcess(command, settings, args.threads, args.out / log, PATIENCE, cached)
            if log == "first.log":
                process.close()
        with process:
            for repeat in range(args.repeats):
                found = {OURS: measure_ours(process, args.far, repeat)}
                if LLAMA_BENCH.exists():
                    found[THEIRS] = measure_llama(model, args.threads)
                for system, values in found.items():
                    figures.add(*(Figure(shape, system, what, repeat, value) for what, value in values.items()))
                tell(f"{shape}, {repeat + 1} of {args.repeats}: {found}")
        write_files(args.out, {"table.md": page(figures.all, args.far)})
    print(page(figures.all, args.far))


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[-1]))
        return
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
