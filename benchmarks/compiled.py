"""Benchmark the compiled kernels.

`products` times quantized and bfloat16 matrix products by number of rows, `contexts` forward passes behind long
contexts, `mapped` forward passes with weights mapped from the cache folder and with weights in memory, and `drafts`
what drafters with random weights take to draft and to observe four tokens. `ceilings` prints how fast the machine reads
memory, and how fast it multiplies codes in its nearest cache.

    python -m benchmarks.compiled products [--processors native,x86-64-v3] [--bits 4|8|16] [--group 128] [--rows 1,4,8]
    python -m benchmarks.compiled ceilings [--processors native,x86-64-v3]
    python -m benchmarks.compiled contexts [--contexts 256,8192] [--nodes 1,4,8] [--width 4]
    python -m benchmarks.compiled contexts --target MODEL [--processors native,x86-64-v3] [--contexts 256] [--nodes 1,5]
        [--kv-dtypes float32,bfloat16,int8]
    python -m benchmarks.compiled mapped [--contexts 256] [--nodes 1,4] [--width 8]
    python -m benchmarks.compiled drafts [--contexts 256] [--width 4]

Runs are interleaved; times are in milliseconds, minimum / median.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from benchmarks.harness.command import Parser, in_words, listed
from benchmarks.harness.interleaving import time_interleaved
from benchmarks.harness.models import forward_calls
from benchmarks.sizes.widen import TARGET, widen

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import drafter_of
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.kernels.cpu import build
from blockdraft.kernels.cpu.build import begun
from blockdraft.kernels.cpu.library import Library, Pool
from blockdraft.kernels.cpu.sources import PARALLEL, SOURCE, VECTORS, command, defines
from blockdraft.kernels.cpu.weight_cache import SWITCH
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets import Target, load_target
from blockdraft.types import LoadOptions, SamplingParams

HIDDEN, INNER, LAYERS = 1536, 4608, 8
SHAPES = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))  # inputs, outputs
CEILINGS = Path(__file__).with_name("ceilings.c")
READ_BYTES = 1 << 29
Calls: TypeAlias = dict[tuple[str, str], Callable[[], Any]]


def compiled(folder: Path, processor: str, dtype: torch.dtype = torch.float32, source: Path = SOURCE) -> Path:
    """Compile a source for a processor, and return the path of the library."""
    out, chosen = folder / f"{processor}.so", defines(dtype, dtype, dtype, 16, True)
    options = [f"-march={processor}", f"-I{SOURCE.parent}", *VECTORS, *PARALLEL, *chosen]
    words = command("gcc", out, *options)
    subprocess.run([str(source) if word == str(SOURCE) else word for word in words], check=True)
    return out


def ceilings(options: argparse.Namespace, folder: Path) -> Calls:
    memory, times = torch.ones(READ_BYTES, dtype=torch.uint8), 1 << 14
    for processor in options.processors:
        library = ctypes.CDLL(str(compiled(folder, processor, source=CEILINGS)))
        for function in (library.read_memory, library.multiply_memory):
            function.argtypes, function.restype = (c_void_p, c_void_p, c_int64), c_int64
        pool = Pool(library, options.threads)
        at = pool.address, memory.data_ptr()
        products = library.multiply_memory(*at, times)
        read = partial(library.read_memory, *at, READ_BYTES)
        multiplied = partial(library.multiply_memory, *at, times)
        seconds = time_interleaved({"read": read, "multiplied": multiplied}, options.rounds)
        rates = READ_BYTES / min(seconds["read"]) / 1e9, products / min(seconds["multiplied"]) / 1e9
        pool.close()
        print(f"{processor:24} reads {rates[0]:.1f} GB/s, multiplies {rates[1]:.0f} GMAC/s")
    return {}


def products(options: argparse.Namespace, folder: Path) -> Calls:
    calls: Calls = {}
    dtype = torch.bfloat16 if options.bits == 16 else torch.float32
    for processor in options.processors:
        library, layers = Library(compiled(folder, processor, dtype)), []
        for inputs, outputs in SHAPES * LAYERS:
            weight: torch.Tensor | QuantizedWeight = torch.randn(outputs, inputs, dtype=dtype)
            if options.bits < 16:
                codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
                scale = torch.rand(outputs, inputs // options.group).half() / 100
                weight = QuantizedWeight(codes, scale, None, options.bits)
            layer = PackedLinear(weight)
            layers.append((layer.pack(library), layer))
        for rows in options.rows:
            given = [(torch.randn(rows, i), torch.empty(rows, o)) for i, o in SHAPES * LAYERS]

            def run(layers: Any = layers, given: Any = given) -> None:
                for (product, _), (x, out) in zip(layers, given, strict=True):
                    product(x, out)

            calls[processor, f"{rows} rows"] = run
    weights = LAYERS * sum(i * o for i, o in SHAPES)
    kind = "in bfloat16" if options.bits == 16 else f"of {options.bits} bits in groups of {options.group}"
    print(f"{weights / 1e6:.0f} M weights {kind}, ms")
    return calls


def forwards(way: str, path: Path, options: argparse.Namespace, quantize: str | None, **how: Any) -> Calls:
    loading = LoadOptions(dtype="bfloat16", device="cpu", backend="native", compile="on", quantize=quantize)
    return forwards_of(way, load_target(path, loading, **how), options)


def forwards_of(way: str, target: Target, options: argparse.Namespace) -> Calls:
    return {
        (way, f"{nodes} behind {context}"): call
        for context in options.contexts
        for nodes, call in forward_calls(target, context, options.nodes).items()
    }


def contexts(options: argparse.Namespace, folder: Path) -> Calls:
    calls: Calls = {}
    for processor in options.processors if options.target else ():
        begun.cache_clear()  # it knows one processor
        with patch.object(build, "NATIVE", f"-march={processor}"):
            for name in options.kv_dtypes:
                target = load_target(options.target, compile="on", kv_dtype=name)
                calls |= forwards_of(f"{processor}, {name}", target, options)
    if options.target:
        return calls
    path = widen(TARGET, folder / "target", options.width)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    for quantize in (None, "int4"):
        for kv_dtype in (None, "int8"):
            way = (quantize or "bfloat16") + (", int8 cache" if kv_dtype else "")
            calls |= forwards(way, path, options, quantize, kv_dtype=kv_dtype)
    return calls


def mapped(options: argparse.Namespace, folder: Path) -> Calls:
    path, calls = widen(TARGET, folder / "target", options.width), dict[tuple[str, str], Callable[[], Any]]()
    for quantize in (None, "int8", "int4"):
        for way, switch in (("mapped", "1"), ("in memory", "0")):
            with patch.dict(os.environ, {SWITCH: switch}):
                calls |= forwards(f"{quantize or 'bfloat16'}, {way}", path, options, quantize)
    return calls


def drafts(options: argparse.Namespace, folder: Path) -> Calls:
    path, calls = widen(TARGET, folder / "target", options.width), dict[tuple[str, str], Callable[[], Any]]()
    for quantize in (None, "int4"):
        target = load_target(path, dtype="bfloat16", device="cpu", compile="on", quantize=quantize)
        for name, network in draft_networks(target).items():
            drafter, (context, *_) = drafter_of(network, target), options.contexts
            state, plan = drafter.new_state(1, context + 128), ChainPlan(5, [SamplingParams()])
            tokens, size = torch.ones(1, context, dtype=torch.int64), len(drafter.target_layers) * target.hidden_size
            hidden_states = torch.randn(1, context, size).to(target.dtype)
            drafter.observe(state, tokens, hidden_states, [context])
            way = f"{quantize or 'bfloat16'}, {name}"
            calls[way, "draft 4"] = partial(drafter.propose, state, torch.tensor([9]), plan)
            calls[way, "observe 4"] = partial(drafter.observe, state, tokens[:, :4], hidden_states[:, :4], [0])
    return calls


def draft_networks(target: Target) -> dict[str, Any]:
    """Return networks of the target's width: three layers of DFlash, one of EAGLE-3 and one of MTP."""
    width, layers = target.hidden_size, target.num_layers
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    shape |= {"num_key_value_heads": max(width // 128, 1), "head_dim": 64, "vocab_size": target.vocab_size}
    shape |= {"num_target_layers": layers, "block_size": 5, "rope_theta": 1e4}
    several = {"target_layers": (0, 1, 2)}
    block = {"num_hidden_layers": 3, "mask_token_id": 1, "layers": (LayerAttention(False, None),) * 3}
    return {
        "DFlash": DFlashNetwork(DraftConfig(**shape, **several, **block)),
        "EAGLE-3": Eagle3Network(Eagle3Config(**shape, **several, draft_vocab_size=target.vocab_size // 2)),
        "MTP": MTPNetwork(MTPConfig(**shape)),
    }


@torch.no_grad()
def main() -> None:
    parser = Parser(__doc__, threads=2)
    add, numbers = parser.add_argument, listed(int)
    add("what", choices=("products", "ceilings", "contexts", "mapped", "drafts"))
    add("--processors", type=listed(), default="native,x86-64-v3", help="as gcc calls them")
    add("--bits", type=int, default=4, choices=(4, 8, 16), help="16: bfloat16, inputs too")
    add("--group", type=int, default=128)
    add("--rows", type=numbers, default="1,4,6,8,64")
    add("--contexts", type=numbers, default="256,8192")
    add("--nodes", type=numbers, default="1,4,8")
    add("--width", type=int, default=4, help="of the bundled target")
    add("--target", metavar="MODEL", help="of `contexts`: a folder, a GGUF file or a name, as `load_target` loads it")
    add("--kv-dtypes", type=listed(), default="float32", help="of --target's keys and values: float32, bfloat16, int8")
    add("--rounds", type=int, default=7)
    options = parser.parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, in_words():
        ways = {"products": products, "ceilings": ceilings, "contexts": contexts, "mapped": mapped, "drafts": drafts}
        calls = ways[options.what](options, Path(folder))
        for (way, what), seconds in time_interleaved(calls, options.rounds).items():
            print(f"{way:24} {what:20} {1e3 * min(seconds):8.2f} / {1e3 * median(seconds):.2f}")


if __name__ == "__main__":
    main()
