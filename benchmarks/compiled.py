"""Times of the compiled kernels: products of weights of few bits by rows, and forwards behind long contexts, or with
weights that are mapped from the cache folder against those that are not.

    python -m benchmarks.compiled products [--processors native,x86-64-v3] [--bits 4] [--group 128] [--rows 1,4,8]
    python -m benchmarks.compiled contexts [--contexts 256,8192] [--nodes 1,4,8] [--width 4]
    python -m benchmarks.compiled mapped [--contexts 256] [--nodes 1,4] [--width 8]

Ways take turns; milliseconds, minimum / median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.sizes.widen import TARGET, widen
from blockdraft.cpu.library import Library
from blockdraft.cpu.sources import PARALLEL, VECTORS, command, defines
from blockdraft.cpu.weight_cache import SWITCH
from blockdraft.decode.proposal import chain_parents
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantized import QuantizedWeight
from blockdraft.targets import Target, load_target

HIDDEN, INNER, LAYERS = 1536, 4608, 8
SHAPES = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))  # inputs, outputs


def show(found: dict[tuple[str, str], list[float]]) -> None:
    for way, what in found:
        times = found[way, what]
        print(f"{way:24} {what:20} {min(times):8.2f} / {statistics.median(times):.2f}")


def timed(calls: dict[tuple[str, str], Callable[[], object]], rounds: int) -> None:
    found: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            began = time.perf_counter()
            call()
            found[key].append(1e3 * (time.perf_counter() - began))
    show(found)


def products(options: argparse.Namespace) -> None:
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for processor in options.processors.split(","):
            out = Path(folder) / f"{processor}.so"
            chosen = defines(torch.float32, torch.float32, 16, True)
            march = f"-march={processor}"
            subprocess.run(command("gcc", out, march, *VECTORS, *PARALLEL, *chosen), check=True)
            library, layers = Library(out), []
            for inputs, outputs in SHAPES * LAYERS:
                codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
                scale = torch.rand(outputs, inputs // options.group).half() / 100
                layer = PackedLinear(QuantizedWeight(codes, scale, None, options.bits))
                layers.append((layer.pack(library), layer))
            for rows in map(int, options.rows.split(",")):
                given = [(torch.randn(rows, i), torch.empty(rows, o)) for i, o in SHAPES * LAYERS]

                def run(layers: object = layers, given: object = given) -> None:
                    for (product, _), (x, out) in zip(layers, given, strict=True):  # type: ignore[call-overload]
                        product(x, out)

                calls[processor, f"{rows} rows"] = run
        weights = LAYERS * sum(i * o for i, o in SHAPES)
        print(f"{weights / 1e6:.0f} M weights of {options.bits} bits in groups of {options.group}, ms")
        timed(calls, options.rounds)


def contexts(options: argparse.Namespace) -> None:
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = widen(TARGET, Path(folder) / "target", options.width)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
        for way, (quantize, kept) in {
            "bfloat16": (None, None),
            "bfloat16, int8 cache": (None, "int8"),
            "int4": ("int4", None),
            "int4, int8 cache": ("int4", "int8"),
        }.items():
            target = load_target(path, "bfloat16", "cpu", "native", "on", quantize, kv_dtype=kept)  # type: ignore[arg-type]
            for what, run in forwards(target, options):
                calls[way, what] = run
        timed(calls, options.rounds)


def forwards(target: Target, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forwards of some tokens, behind contexts of random text, for keys and values of an ordinary size."""
    for context in map(int, options.contexts.split(",")):
        cache = target.new_cache(1, context + 64)
        for begin in range(0, context, 512):
            count = min(512, context - begin)
            text = torch.randint(100, 1000, (1, count))
            target.forward(text, chain_parents(1, count), cache, (), torch.tensor([count - 1]))
            cache.commit([range(count)])
        for nodes in map(int, options.nodes.split(",")):
            tokens, parents = torch.zeros(1, nodes, dtype=torch.int64), chain_parents(1, nodes)
            yield f"{nodes} behind {context}", partial(target.forward, tokens, parents, cache)


def mapped(options: argparse.Namespace) -> None:
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = widen(TARGET, Path(folder) / "target", options.width)
        for quantize in (None, "int8", "int4"):
            for way, switch in (("mapped", "1"), ("in memory", "0")):
                with patch.dict(os.environ, {SWITCH: switch}):
                    target = load_target(path, "bfloat16", "cpu", "native", "on", quantize)
                for what, run in forwards(target, options):
                    calls[f"{quantize or 'bfloat16'}, {way}", what] = run
        timed(calls, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("products", "contexts", "mapped"))
    parser.add_argument("--processors", default="native,x86-64-v3", help="as gcc calls them")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rows", default="1,4,6,8,64")
    parser.add_argument("--contexts", default="256,8192")
    parser.add_argument("--nodes", default="1,4,8")
    parser.add_argument("--width", type=int, default=4, help="of the bundled target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"products": products, "contexts": contexts, "mapped": mapped}[options.what](options)


if __name__ == "__main__":
    main()
