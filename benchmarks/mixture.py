"""Benchmark GGUF files of mixtures and hybrids, beside llama.cpp: `python -m benchmarks.mixture --shape gpt-oss-20b`.

It writes a file with the shapes of a known model (--shape), few layers (--layers) and random weights, in types much as
in published files. It prints seconds to load it for the first time and again, the largest resident set, tokens per
second of plain decoding, and the time of forward passes of 1, 2, 4 and 8 random tokens with logits of the last one:
medians of interleaved runs. A forward pass is measured when it runs the second time in a row, since llama.cpp makes a
new graph for another number of tokens. With --llama PROGRAM (the `llama_peer` that `make bench-peers` builds) llama.cpp
reads the same file in between.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from benchmarks.harness.command import CORES, Parser, tell
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.report import table
from gguf import GGMLQuantizationType

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats.gguf import open_gguf
from blockdraft.machine import cache_folder
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

CONTEXT = 512
TOKENS = (1, 2, 4, 8)  # of a forward pass
READ, WRITTEN = 16, 96  # tokens of a request
# Bytes to set in each block: the place, and the factor that makes weights of about 0.02.
SCALES: dict[str, dict[int, np.ndarray]] = {
    "Q4_K": {0: np.array([1e-4], "<f2"), 2: np.array([6e-4], "<f2")},
    "Q5_K": {0: np.array([5e-5], "<f2"), 2: np.array([6e-4], "<f2")},
    "Q6_K": {208: np.array([2e-5], "<f2")},
    "Q8_0": {0: np.array([3e-4], "<f2")},
    "MXFP4": {0: np.array([120], "<u1")},
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # types and shapes by names


@dataclass(frozen=True)
class Shape:
    """Shapes of a known model.

    Args:
        architecture: As in llama.cpp.
        metadata: Keys without the architecture; floats are stored as float32, integers as uint32.
        tensors: Tensors outside of the layers.
        layer: Returns the tensors of a layer by its number, without `blk.N.`.
        default_layers: Layers to write, unless others are asked for.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: Tensors
    layer: Callable[[int], Tensors]
    default_layers: int


def attention(kind: str, hidden: int, heads: int, kv_heads: int, head_dim: int, kind_of_values: str = "") -> Tensors:
    return {
        "attn_q.weight": (kind, (heads * head_dim, hidden)),
        "attn_k.weight": (kind, (kv_heads * head_dim, hidden)),
        "attn_v.weight": (kind_of_values or kind, (kv_heads * head_dim, hidden)),
        "attn_output.weight": (kind, (hidden, heads * head_dim)),
    }


def vectors(*sizes: tuple[str, int]) -> Tensors:
    return {name: ("F32", (size,)) for name, size in sizes}


def qwen3_layer(layer: int) -> Tensors:
    hidden, experts, inner = 2048, 128, 768
    return {
        **attention("Q4_K", hidden, 32, 4, 128, "Q6_K"),
        **vectors(("attn_norm.weight", hidden), ("ffn_norm.weight", hidden)),
        **vectors(("attn_q_norm.weight", 128), ("attn_k_norm.weight", 128)),
        "ffn_gate_inp.weight": ("F32", (experts, hidden)),
        "ffn_gate_exps.weight": ("Q4_K", (experts, inner, hidden)),
        "ffn_up_exps.weight": ("Q4_K", (experts, inner, hidden)),
        "ffn_down_exps.weight": ("Q6_K", (experts, hidden, inner)),
    }


def gpt_oss_layer(layer: int) -> Tensors:
    hidden, heads, kv_heads, size, experts = 2880, 64, 8, 64, 32
    biases = {"attn_q": heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size, "attn_output": hidden}
    parts = ("gate", "up", "down")
    return {
        **attention("Q8_0", hidden, heads, kv_heads, size),
        **vectors(*((f"{name}.bias", count) for name, count in biases.items())),
        **vectors(("attn_norm.weight", hidden), ("post_attention_norm.weight", hidden), ("attn_sinks.weight", heads)),
        "ffn_gate_inp.weight": ("F32", (experts, hidden)),
        "ffn_gate_inp.bias": ("F32", (experts,)),
        **{f"ffn_{part}_exps.weight": ("MXFP4", (experts, hidden, hidden)) for part in parts},
        **{f"ffn_{part}_exps.bias": ("F32", (experts, hidden)) for part in parts},
    }


LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)  # layers of LFM2-1.2B with attention


def lfm2_layer(layer: int) -> Tensors:
    hidden, inner = 2048, 8192
    tensors = vectors(("attn_norm.weight", hidden), ("ffn_norm.weight", hidden)) | {
        "ffn_gate.weight": ("Q4_K", (inner, hidden)),
        "ffn_up.weight": ("Q4_K", (inner, hidden)),
        "ffn_down.weight": ("Q6_K", (hidden, inner)),
    }
    if layer in LFM2_ATTENTION:
        norms = vectors(("attn_q_norm.weight", 64), ("attn_k_norm.weight", 64))
        return tensors | norms | attention("Q4_K", hidden, 32, 8, 64, "Q6_K")
    return tensors | {
        "shortconv.conv.weight": ("F32", (hidden, 3)),
        "shortconv.in_proj.weight": ("Q4_K", (3 * hidden, hidden)),
        "shortconv.out_proj.weight": ("Q4_K", (hidden, hidden)),
    }


def mlp(hidden: int, inner: int) -> Tensors:
    norms = vectors(("attn_norm.weight", hidden), ("post_attention_norm.weight", hidden))
    up = {f"ffn_{part}.weight": ("Q4_K", (inner, hidden)) for part in ("gate", "up")}
    return {**norms, **up, "ffn_down.weight": ("Q6_K", (hidden, inner))}


def qwen3_5_layer(hidden: int, inner: int, heads: int, kv_heads: int, value_heads: int) -> Callable[[int], Tensors]:
    """Return the layers of Qwen3.5: three gated delta nets, then one with attention."""
    values, channels = value_heads * 128, 2 * 16 * 128 + value_heads * 128

    def layer(number: int) -> Tensors:
        if number % 4 == 3:
            own = attention("Q4_K", hidden, heads, kv_heads, 256, "Q6_K")
            own["attn_q.weight"] = ("Q4_K", (2 * heads * 256, hidden))  # with gates
            return {**mlp(hidden, inner), **own, **vectors(("attn_q_norm.weight", 256), ("attn_k_norm.weight", 256))}
        return {
            **mlp(hidden, inner),
            "attn_qkv.weight": ("Q5_K", (channels, hidden)),
            "attn_gate.weight": ("Q4_K", (values, hidden)),
            **{f"ssm_{part}.weight": ("Q8_0", (value_heads, hidden)) for part in ("alpha", "beta")},
            "ssm_conv1d.weight": ("F32", (channels, 4)),
            **vectors(("ssm_dt.bias", value_heads), ("ssm_a", value_heads), ("ssm_norm.weight", 128)),
            "ssm_out.weight": ("Q4_K", (hidden, values)),
        }

    return layer


def qwen3_5_sizes(hidden: int, inner: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    return sizes(hidden, heads, kv_heads, 256) | {
        "context_length": 32768,
        "feed_forward_length": inner,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * 128,
        "full_attention_interval": 4,
    }


QWEN3_5_08B, QWEN3_5_4B = (1024, 3584, 8, 2, 16), (2560, 9216, 16, 4, 32)
SMALL_VOCABULARY = 8192  # so that the layers take nearly all of the time


def qwen3_layer_of_06b(layer: int) -> Tensors:
    return {
        **{name: own for name, own in mlp(1024, 3072).items() if name != "post_attention_norm.weight"},
        **attention("Q4_K", 1024, 16, 8, 128, "Q6_K"),
        "ffn_norm.weight": ("F32", (1024,)),
        **vectors(("attn_q_norm.weight", 128), ("attn_k_norm.weight", 128)),
    }


GRANITE_ATTENTION = (5, 15, 25, 35)  # layers of Granite 4-H-1B with attention


def granite_hybrid_layer(layer: int) -> Tensors:
    hidden, inner, heads, values, state = 1536, 4096, 48, 3072, 128
    tensors = {name: own for name, own in mlp(hidden, inner).items() if name != "post_attention_norm.weight"}
    tensors |= vectors(("ffn_norm.weight", hidden))
    if layer in GRANITE_ATTENTION:
        return tensors | attention("Q4_K", hidden, 12, 4, 128, "Q6_K")
    channels = values + 2 * state
    return tensors | {
        "ssm_in.weight": ("Q4_K", (values + channels + heads, hidden)),
        "ssm_out.weight": ("Q4_K", (hidden, values)),
        "ssm_conv1d.weight": ("F32", (channels, 4)),
        **vectors(("ssm_conv1d.bias", channels), ("ssm_dt.bias", heads)),
        **{f"ssm_{part}": ("F32", (heads, 1)) for part in "ad"},
        "ssm_norm.weight": ("F32", (1, values)),
    }


def sizes(hidden: int, heads: int, kv_heads: int | list[int], head_dim: int, **others: Any) -> dict[str, Any]:
    return {
        "context_length": 4096,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **others,
    }


def tables(kinds: tuple[str, str], vocabulary: int, hidden: int) -> Tensors:
    names = ("token_embd.weight", "output.weight")
    return {name: (kind, (vocabulary, hidden)) for name, kind in zip(names, kinds, strict=True)}


SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        sizes(2048, 32, 4, 128)
        | {"feed_forward_length": 768, "expert_feed_forward_length": 768, "expert_count": 128, "expert_used_count": 8}
        | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6},
        tables(("Q4_K", "Q6_K"), 151936, 2048) | vectors(("output_norm.weight", 2048)),
        qwen3_layer,
        4,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        sizes(2880, 64, 8, 64)
        | {"feed_forward_length": 2880, "expert_feed_forward_length": 2880, "expert_count": 32, "expert_used_count": 4}
        | {"rope.freq_base": 150000.0, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128}
        | {
            "context_length": 131072,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        tables(("Q8_0", "Q8_0"), 201088, 2880) | vectors(("output_norm.weight", 2880)),
        gpt_oss_layer,
        12,
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        sizes(2048, 32, [8 if layer in LFM2_ATTENTION else 0 for layer in range(16)], 64)
        | {"feed_forward_length": 8192, "shortconv.l_cache": 3, "vocab_size": 65536}
        | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5},
        {"token_embd.weight": ("Q6_K", (65536, 2048)), **vectors(("token_embd_norm.weight", 2048))},
        lfm2_layer,
        16,
    ),
    "qwen3.5-0.8b": Shape(
        "qwen35",
        qwen3_5_sizes(*QWEN3_5_08B),
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1024)), **vectors(("output_norm.weight", 1024))},
        qwen3_5_layer(*QWEN3_5_08B),
        24,
    ),
    "qwen3.5-4b": Shape(
        "qwen35",
        qwen3_5_sizes(*QWEN3_5_4B),
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 2560)), **vectors(("output_norm.weight", 2560))},
        qwen3_5_layer(*QWEN3_5_4B),
        8,
    ),
    "granite-4-h-1b": Shape(
        "granitehybrid",
        sizes(1536, 12, [4 if layer in GRANITE_ATTENTION else 0 for layer in range(40)], 128)
        | {"context_length": 32768, "feed_forward_length": 4096, "expert_shared_feed_forward_length": 4096}
        | {"rope.dimension_count": 128, "rope.scaling.finetuned": False, "attention.layer_norm_rms_epsilon": 1e-5}
        | {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1}
        | {"ssm.time_step_rank": 48, "ssm.inner_size": 3072},
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1536)), **vectors(("output_norm.weight", 1536))},
        granite_hybrid_layer,
        40,
    ),
    "qwen3-0.6b": Shape(
        "qwen3",
        sizes(1024, 16, 8, 128)
        | {"context_length": 32768, "feed_forward_length": 3072, "rope.freq_base": 1e6}
        | {"attention.layer_norm_rms_epsilon": 1e-6},
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1024)), **vectors(("output_norm.weight", 1024))},
        qwen3_layer_of_06b,
        28,
    ),
}


def random_values(kind: str, shape: tuple[int, ...], numbers: np.random.Generator) -> np.ndarray:
    """Return random weights, quantized ones as bytes `[..., out, bytes]` uint8."""
    if kind == "F32":
        is_vector = max(shape) == math.prod(shape)
        return numbers.standard_normal(shape, dtype=np.float32) / 20 + (1 if is_vector else 0)
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.frombuffer(numbers.bytes(math.prod(shape) // values * size), np.uint8).copy()
    blocks = blocks.reshape(*shape[:-1], shape[-1] // values, size)
    for place, scale in SCALES[kind].items():
        blocks[..., place : place + scale.itemsize] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_model(path: Path, shape: Shape, layers: int) -> None:
    """Write a model of random weights, of which one tensor at a time is in memory."""
    writer, numbers = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(1)
    writer.add_tokenizer_model("no_vocab")
    vocabulary = {"vocab_size": shape.tensors["token_embd.weight"][1][0]}
    for name, value in {"block_count": layers, **vocabulary, **shape.metadata}.items():
        key, kind = f"{shape.architecture}.{name}", type(value)
        if kind is list:
            writer.add_array(key, value[:layers] if len(value) >= layers else value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[kind](key, value)
    tensors = dict(shape.tensors)
    for layer in range(layers):
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in shape.layer(layer).items()}
    for name, (kind, own) in tensors.items():
        number = GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[number]
        row = own if kind == "F32" else (*own[:-1], own[-1] // values * size)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, row, dtype, math.prod(row) * dtype.itemsize, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (kind, own) in tensors.items():
        values = random_values(kind, own, numbers)
        writer.write_tensor_data(-values if name.endswith("ssm_a") else values)
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
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b", help="model whose shapes to take")
    parser.add_argument("--layers", type=int, help="layers of the model (4 to 28, by --shape)")
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
    shape = SHAPES[args.shape]
    layers = args.layers or shape.default_layers
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / f"{args.shape}-{layers}.gguf"
        if not model.exists():
            tell(f"writing {model}")
            partial = model.with_suffix(".partial")
            write_model(partial, shape, layers)
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
