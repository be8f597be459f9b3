"""Decoding against the limits of a device, at the shapes of real models with random weights.

For each context: plain decoding as a share of the memory bandwidth, the cost R of steps with blocks and trees, where
their time goes, and the tokens per second that published acceptance would give. With --smoke instead: whether tokens
are right, in five minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.gpu import smoke
from benchmarks.gpu.measure import PARAMS, copy_bandwidth, forced_rate, profile_kernels, time_step
from benchmarks.gpu.shapes import SHAPES, Shape, build, bytes_per_token
from benchmarks.harness.command import ROOT, Parser, command_line, listed, tell
from benchmarks.harness.report import table, write_files

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.targets import Target
from blockdraft_bench.results import hardware

BACKENDS = ("hf", "native", "captured", "compiled")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.gpu", out=ROOT / "build" / "gpu")
    for name, default, read in (
        ("shapes", "qwen3-8b,qwen3-30b-a3b", listed(known=SHAPES)),
        ("contexts", "512,4096,16384", listed(int)),
        ("blocks", "8,16", listed(int)),
        ("trees", "16,32,64,128,256", listed(int)),
        ("backend", ",".join(BACKENDS), listed(known=BACKENDS)),
    ):
        parser.add_argument(f"--{name}", type=read, default=default, metavar="A,B,...", help="default: %(default)s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--smoke", action="store_true", help="only check tokens, and one step's time; 1 if one is wrong"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20, help="steps of each kind")
    parser.add_argument("--steps", type=int, default=24, help="with a forced acceptance")
    given = parser.parse(words)
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --shapes tiny tries the benchmark out.")
    return given


def at_context(
    target: Target, drafter: DFlashDrafter, shape: Shape, context: int, bandwidth: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one context."""
    alone, drafted = Probe(target, NoDrafter()), Probe(target, drafter)
    whole, one = ChainPlan(drafter.block_size, [PARAMS]), ChainPlan(1, [PARAMS])
    plans = {f"block {n}": ChainPlan(n, [PARAMS]) for n in args.blocks if n <= drafter.block_size}
    plans |= {f"tree {n}": ChainPlan(drafter.block_size, [PARAMS]).as_tree(n) for n in args.trees}
    plain = time_step(alone, context, one, args.repeats)
    steps = {"plain": plain} | {name: time_step(drafted, context, plan, args.repeats) for name, plan in plans.items()}
    forced = []
    for method, task, tau, source in shape.taus:
        rate, reached = forced_rate(target, drafter, context, tau, args.steps)
        forced.append({"method": method, "task": task, "tau": tau, "source": source, "reached": reached, "rate": rate})
    kernels = {
        "plain": profile_kernels(alone, context, one),
        f"block {drafter.block_size}": profile_kernels(drafted, context, whole),
    }
    return {
        "context": context,
        "plain_tokens_per_second": 1 / plain.total,
        "share_of_roofline": bytes_per_token(target, shape.target, context) / bandwidth / plain.total,
        "steps": {name: asdict(each) | {"R": each.total / plain.total} for name, each in steps.items()},
        "forced": forced,
        "kernels": kernels,
    }


def page(found: dict[str, Any], command: str) -> str:
    """Return all results as Markdown."""
    machine = found["hardware"]["gpu"] or found["hardware"]["cpu"]
    parts = [
        "# Decoding against the limits of the device",
        f"{machine}, {found['dtype']}, random weights, one request; copies run at {found['bandwidth'] / 1e9:.0f} GB/s. "
        f"torch {torch.__version__}. Command: `{command}`.",
        "R: time of a step over that of a plain step. Draft, verify and host: where its milliseconds go if each part "
        "is waited for, so that they may add up to more than the step. Captured: native, with CUDA graphs. Compiled: "
        "also by torch.compile. Roofline: bytes that a plain step must read over this bandwidth. Idle: share of the "
        "time in which no kernel ran.",
    ]
    for one in found["runs"]:
        parts.append(f"## {one['shape']}, {one['backend']}")
        for each in one["contexts"]:
            profiled = {name: kernels for name, kernels in each["kernels"].items() if kernels is not None}
            counts = [f"{name} {count:.0f}, idle {100 * idle:.0f} %" for name, (count, idle) in profiled.items()]
            parts.append(
                f"Context {each['context']}: plain {each['plain_tokens_per_second']:.1f} tokens/s, "
                f"{100 * each['share_of_roofline']:.0f} % of the roofline; kernels a step: "
                f"{'; '.join(counts) or 'not measured'}."
            )
            lines = [
                [name, f"{1000 * c['total']:.2f}", f"{c['R']:.2f}"]
                + [f"{1000 * c[part]:.2f}" for part in ("draft", "verify", "host")]
                for name, c in each["steps"].items()
            ]
            parts.append(table(["step", "ms", "R", "draft", "verify", "host"], lines, left=1))
            for f in each["forced"]:
                over = f["rate"] / each["plain_tokens_per_second"]
                parts.append(
                    f"- {f['method']} at tau {f['tau']} ({f['task']}; {f['source']}): {f['rate']:.1f} tokens/s, "
                    f"{over:.2f} times plain; tau reached {f['reached']:.2f}"
                )
        if "missing" in one:
            parts.append(f"Missing: {one['missing']}")
    return "\n\n".join(parts) + "\n"


def run(args: argparse.Namespace) -> None:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    bandwidth = copy_bandwidth(device, args.repeats)
    runs: list[dict[str, Any]] = []
    for name, backend in ((name, backend) for name in args.shapes for backend in args.backend):
        tell(f"{name}, {backend}: building")
        one: dict[str, Any] = {"shape": name, "backend": backend, "contexts": []}
        runs.append(one)
        try:
            target, drafter = build(SHAPES[name], backend, dtype, device)
        except (ValueError, torch.OutOfMemoryError) as error:
            one["missing"] = str(error).splitlines()[0]
            continue
        for context in args.contexts:
            tell(f"{name}, {backend}: context {context}")
            one["contexts"].append(at_context(target, drafter, SHAPES[name], context, bandwidth, args))
        del target, drafter
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found = {"dtype": args.dtype, "bandwidth": bandwidth, "hardware": hardware(device), "runs": runs}
    text = page(found, command_line("benchmarks.gpu"))
    write_files(args.out, {"gpu.json": found, "gpu.md": text})
    print(text)


if __name__ == "__main__":
    given = arguments()
    if given.smoke:
        sys.exit(not smoke.run(torch.device(given.device)))
    run(given)
