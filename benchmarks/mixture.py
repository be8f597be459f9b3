"""Benchmark a mixture of experts at the shapes of Qwen3-30B-A3B, beside llama.cpp: `python -m benchmarks.mixture`.

It writes a GGUF file with few layers of random weights, in types much as in Q4_K_M, and prints seconds to load it for
the first time and again, the largest resident set, tokens per second of plain decoding, and the time of forward passes
of 1, 2, 4 and 8 random tokens with logits of the last one: medians of interleaved runs. A forward pass is measured when
it runs the second time in a row, since llama.cpp makes a new graph for another number of tokens. With --llama PROGRAM
(the `llama_peer` that `make bench-peers` builds) llama.cpp reads the same file in between.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from benchmarks.harness.command import CORES, Parser, tell
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.report import table
from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats.gguf import open_gguf
from blockdraft.machine import cache_folder
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

ARCHITECTURE = "qwen3moe"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, CHOSEN, INNER, VOCABULARY = 128, 8, 768, 151936
CONTEXT = 512
TOKENS = (1, 2, 4, 8)  # of a forward pass
READ, WRITTEN = 16, 96  # tokens of a request
SCALES = {"Q4_K": ((0, 1e-4), (2, 6e-4)), "Q6_K": ((208, 2e-5),)}  # places and sizes of factors in a block
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
LAYER = {  # types and shapes of matrices
    "attn_q": ("Q4_K", (QUERIES, HIDDEN)),
    "attn_k": ("Q4_K", (KEYS, HIDDEN)),
    "attn_v": ("Q6_K", (KEYS, HIDDEN)),
    "attn_output": ("Q4_K", (HIDDEN, QUERIES)),
    "ffn_gate_exps": ("Q4_K", (EXPERTS, INNER, HIDDEN)),
    "ffn_up_exps": ("Q4_K", (EXPERTS, INNER, HIDDEN)),
    "ffn_down_exps": ("Q6_K", (EXPERTS, HIDDEN, INNER)),
}
NORMS = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}


def write_model(path: Path, layers: int) -> None:
    """Write a model of random weights."""
    writer, numbers = gguf.GGUFWriter(path, ARCHITECTURE, use_temp_file=True), np.random.default_rng(1)
    writer.add_tokenizer_model("no_vocab")
    for name, value in {
        "vocab_size": VOCABULARY,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "block_count": layers,
        "feed_forward_length": INNER,
        "expert_feed_forward_length": INNER,
        "expert_count": EXPERTS,
        "expert_used_count": CHOSEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", value)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", 1e6)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", 1e-6)

    def add(name: str, kind: str, shape: tuple[int, ...]) -> None:
        number = GGMLQuantizationType[kind]
        if kind == "F32":
            data = numbers.standard_normal(shape, dtype=np.float32) / 20 + (1 if len(shape) == 1 else 0)
            writer.add_tensor(f"{name}.weight", data)
            return
        values, size = gguf.GGML_QUANT_SIZES[number]
        blocks = numbers.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
        for place, scale in SCALES[kind]:
            blocks[..., place : place + 2] = np.array([scale], "<f2").view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=number)

    add("token_embd", "Q4_K", (VOCABULARY, HIDDEN))
    add("output", "Q6_K", (VOCABULARY, HIDDEN))
    add("output_norm", "F32", (HIDDEN,))
    for layer in range(layers):
        for name, (kind, shape) in LAYER.items():
            add(f"blk.{layer}.{name}", kind, shape)
        add(f"blk.{layer}.ffn_gate_inp", "F32", (EXPERTS, HIDDEN))
        for name, size in NORMS.items():
            add(f"blk.{layer}.{name}", "F32", (size,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(settings: dict[str, Any]) -> None:
    """Load the model and answer requests, as `llama_peer` does."""
    target = load_target(settings["model"], device="cpu", threads=settings["threads"], max_context=CONTEXT)
    engine, cache = Engine(target, load_drafter("none", target=target)), target.new_cache(1, CONTEXT)
    print(json.dumps({"ready": {"running": target.running}, "answers": ["decode"]}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)["decode"]
        tokens = torch.tensor([request["prompt"]])
        began = time.perf_counter()
        if request["max_new_tokens"] == 1:
            target.forward(
                tokens, chain_parents(1, tokens.size(1)), cache, logits_at=torch.tensor([tokens.size(1) - 1])
            )
            print(json.dumps({"prefill_seconds": time.perf_counter() - began}), flush=True)
            continue
        [done] = engine.generate([request["prompt"]], SamplingParams(request["max_new_tokens"], ignore_eos=True))
        seconds = time.perf_counter() - began - done.stats.prefill_seconds
        print(json.dumps({"decode_seconds": seconds}), flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.mixture", threads=CORES)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (4); each takes 0.4 GB")
    parser.add_argument("--repeats", type=int, default=9, help="forward passes of each size (9)")
    parser.add_argument(
        "--model",
        type=Path,
        help="file to read, or to write first, with packed weights beside it; without it a temporary one",
    )
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama_peer, to measure it, too")
    return parser.parse(words)


def measure(model: Path, folder: Path, args: argparse.Namespace) -> None:
    """Print start times, memory and forward passes."""
    given = {"model": str(model), "threads": args.threads, "max_length": CONTEXT, "type": "f32"}
    ours = [sys.executable, "-m", "benchmarks.mixture", "--serve"]
    commands = {"ours, first start": ours, "ours": ours}
    if args.llama is not None:
        commands["llama.cpp"] = [str(args.llama)]
    peers, rows, draws = dict[str, PeerProcess](), [], random.Random(1)
    times, vocabulary = defaultdict[tuple[str, int], list[float]](list), open_gguf(model).tensors["token_embd.weight"]
    with ExitStack() as running:
        for name, command in commands.items():
            log, own = folder / f"{len(peers)}.log", {"BLOCKDRAFT_CACHE": str(folder)}
            peers[name] = PeerProcess(command, given, args.threads, log, 600, own)
            running.callback(peers[name].close)
            if name.endswith("first start"):
                peers[name].close()
        interleaved = [name for name in commands if not name.endswith("first start")]
        for repeat in range(args.repeats + 2):  # the first two warm up
            for count in (*TOKENS, READ):
                prompt, written = (
                    [draws.randrange(vocabulary.shape[0]) for _ in range(count)],
                    1 if count in TOKENS else WRITTEN,
                )
                for name in interleaved if repeat % 2 else interleaved[::-1]:
                    if written == 1:
                        peers[name].ask("decode", {"prompt": prompt, "max_new_tokens": 1, "stops": []})
                    answer = peers[name].ask("decode", {"prompt": prompt, "max_new_tokens": written, "stops": []})
                    own = answer["prefill_seconds"] * 1000 if written == 1 else (written - 1) / answer["decode_seconds"]
                    if repeat >= 2:
                        times[name, count].append(own)
        for name, peer in peers.items():
            peak = f"{peer.peak_bytes() / 1e9:.2f}" if name in interleaved else ""
            counts = (READ, *TOKENS)
            passes = [f"{statistics.median(times[name, n]):.1f}" if name in interleaved else "" for n in counts]
            rows.append([name, f"{peer.start_seconds:.1f}", peak, *passes])
    print(table(["", "start s", "peak GB", "tokens/s", *(f"{count} tokens, ms" for count in TOKENS)], rows, 1))
    if "llama.cpp" in peers:
        pairs = zip(times["ours", READ], times["llama.cpp", READ], strict=True)
        print(f"tokens/s over llama.cpp's, median of pairs: {statistics.median(a / b for a, b in pairs):.3f}")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[-1]))
        return
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / f"qwen3moe-{args.layers}.gguf"
        if not model.exists():
            tell(f"writing {model}")
            partial = model.with_suffix(".partial")
            write_model(partial, args.layers)
            partial.replace(model)
        tell(f"{model.stat().st_size / 1e9:.2f} GB")
        own, libraries = Path(folder), cache_folder() / "libraries"  # which are compiled once for all models
        if args.model is not None:
            own = model.with_suffix(".cache")
            own.mkdir(exist_ok=True)
        libraries.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (own / "libraries").symlink_to(libraries)
        measure(model, own, args)


if __name__ == "__main__":
    main()
