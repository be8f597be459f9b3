"""Time of the target's forward by number of nodes: compiled against uncompiled, dtypes, int8, numbers of threads.

    python benchmarks/forwards.py [--shape pair|120m] [--threads 1,2] [--ways off,on,int8] [--dtype float32]

The shape of 120 M parameters has random weights. Ways take turns; medians and minima in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.proposal import chain
from blockdraft.targets import BUNDLED, Target, load_target

NODES = (1, 2, 4, 8, 16, 32)
CONTEXT = 200


def random_120m(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=15,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def seconds(target: Target, cache: object, count: int, repeats: int) -> list[float]:
    nodes = chain(torch.arange(count)[None] + 10)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.forward(nodes.tokens, nodes.parents, cache)  # type: ignore[arg-type]
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="pair")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--ways", default="off,on,int8")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = BUNDLED if options.shape == "pair" else random_120m(Path(folder))
        targets = {}
        for way in options.ways.split(","):
            dtype, how = ("float32", "on") if way == "int8" else (options.dtype, way)
            quantize = "int8" if way == "int8" else None
            targets[way] = load_target(path, dtype, "cpu", "native", how, quantize, threads=1)  # type: ignore[arg-type]
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for way, target in targets.items():
                cache = target.new_cache(1, 256)
                prompt = chain(torch.arange(CONTEXT)[None] + 5)
                target.forward(prompt.tokens, prompt.parents, cache)
                cache.commit([range(CONTEXT)])
                for count in NODES:
                    found.setdefault((way, count), []).extend(seconds(target, cache, count, 8))
        for way in targets:
            cells = [(min(times), statistics.median(times)) for count in NODES if (times := found[way, count])]
            print(f"{options.shape} {options.dtype} {way:5} {threads} threads, nodes {NODES}:", end=" ")
            print("  ".join(f"{1000 * low:.2f}/{1000 * middle:.2f}" for low, middle in cells), flush=True)


if __name__ == "__main__":
    main()
