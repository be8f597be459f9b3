"""How near decoding comes to what a device can do, at the shapes of real models with random weights.

For each context: plain decoding as a share of the memory bandwidth, the cost R of cycles with blocks and trees, where
their time goes, and the tokens per second that published acceptance would give.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import PARAMS, copy_bandwidth, cycle, forced_rate, idle_share
from benchmarks.gpu.shapes import SHAPES, Shape, build, bytes_per_token
from blockdraft.decode.proposal import Plan
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine.adaptive.calibrate import Probe
from blockdraft.evaluation.results import hardware
from blockdraft.targets import Target

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defaults:
    shapes: str = "qwen3-8b,qwen3-30b-a3b"
    contexts: str = "512,4096,16384"
    blocks: str = "8,16"
    trees: str = "16,32,64,128,256"
    device: str = "cuda"
    dtype: str = "bfloat16"
    backend: str = "hf,native,captured"
    repeats: int = 20
    cycles: int = 24
    out: Path = ROOT / "benchmarks"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    default = Defaults()
    for name in ("shapes", "contexts", "blocks", "trees", "backend"):
        parser.add_argument(f"--{name}", default=getattr(default, name), metavar="A,B,...", help="default: %(default)s")
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--dtype", default=default.dtype, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=default.repeats, help="cycles of each kind")
    parser.add_argument("--cycles", type=int, default=default.cycles, help="with a forced acceptance")
    parser.add_argument("--out", type=Path, default=default.out, metavar="DIR", help="for gpu.md and gpu.json")
    found = parser.parse_args()
    for name, known in (("shapes", SHAPES), ("backend", Defaults.backend.split(","))):
        unknown = set(getattr(found, name).split(",")) - set(known)
        if unknown:
            parser.error(f"unknown {name}: {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    if torch.device(found.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --shapes tiny tries the benchmark out.")
    return found


def at_context(
    target: Target, drafter: DFlashDrafter, shape: Shape, context: int, bandwidth: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Everything about one context."""
    alone, drafted = Probe(target, NoDrafter()), Probe(target, drafter)
    plain = cycle(alone, context, Plan(1, [PARAMS]), args.repeats)
    least = bytes_per_token(target, shape.target, context) / bandwidth
    plans = {f"block {n}": Plan(n, [PARAMS]) for n in _numbers(args.blocks) if n <= drafter.block_size}
    plans |= {f"tree {n}": Plan(drafter.block_size, [PARAMS], n) for n in _numbers(args.trees)}
    cycles = {"plain": plain} | {name: cycle(drafted, context, plan, args.repeats) for name, plan in plans.items()}
    forced = []
    for method, task, tau, source in shape.taus:
        rate, reached = forced_rate(target, drafter, context, tau, args.cycles)
        forced.append({"method": method, "task": task, "tau": tau, "source": source, "reached": reached, "rate": rate})
    whole = Plan(drafter.block_size, [PARAMS])
    return {
        "context": context,
        "plain_tokens_per_second": 1 / plain.total,
        "share_of_roofline": least / plain.total,
        "cycles": {name: asdict(one) | {"R": one.total / plain.total} for name, one in cycles.items()},
        "forced": forced,
        "idle": {
            "plain": idle_share(alone, context, Plan(1, [PARAMS])),
            f"block {drafter.block_size}": idle_share(drafted, context, whole),
        },
    }


def page(found: dict[str, Any], command: str) -> str:
    """The results as Markdown."""
    machine = found["hardware"]["gpu"] or found["hardware"]["cpu"]
    parts = [
        "# Decoding against the limits of the device",
        f"{machine}, {found['dtype']}, random weights, one request; copies run at {found['bandwidth'] / 1e9:.0f} GB/s. "
        f"torch {torch.__version__}. Command: `{command}`.",
        "R: time of a cycle over that of a plain step. Draft, verify and host: where its milliseconds go if each part "
        "is waited for, so that they may add up to more than the cycle. Captured: native, with CUDA graphs. Roofline: "
        "bytes that a plain step must read over this bandwidth. Idle: share of the time in which no kernel ran.",
    ]
    for one in found["runs"]:
        parts.append(f"## {one['shape']}, {one['backend']}")
        for each in one.get("contexts", []):
            idle = ", ".join(f"{k} {100 * v:.0f} %" for k, v in each["idle"].items() if v is not None) or "not measured"
            parts.append(
                f"Context {each['context']}: plain {each['plain_tokens_per_second']:.1f} tokens/s, "
                f"{100 * each['share_of_roofline']:.0f} % of the roofline; idle: {idle}."
            )
            rows = [("cycle", "ms", "R", "draft", "verify", "host"), ("---", *("---:",) * 5)]
            for name, c in each["cycles"].items():
                times = (f"{1000 * c[part]:.2f}" for part in ("draft", "verify", "host"))
                rows.append((name, f"{1000 * c['total']:.2f}", f"{c['R']:.2f}", *times))
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
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
    for name in args.shapes.split(","):
        for backend in args.backend.split(","):
            print(f"{name}, {backend}: building", file=sys.stderr, flush=True)
            one: dict[str, Any] = {"shape": name, "backend": backend, "contexts": []}
            runs.append(one)
            try:
                target, drafter = build(SHAPES[name], backend, dtype, device)
            except (ValueError, torch.OutOfMemoryError) as error:
                one["missing"] = str(error).splitlines()[0]
                continue
            for context in _numbers(args.contexts):
                print(f"{name}, {backend}: context {context}", file=sys.stderr, flush=True)
                one["contexts"].append(at_context(target, drafter, SHAPES[name], context, bandwidth, args))
            del target, drafter
            if device.type == "cuda":
                torch.cuda.empty_cache()
    found = {"dtype": args.dtype, "bandwidth": bandwidth, "hardware": hardware(device), "runs": runs}
    told = [Path(word).name if "/" in word else word for word in sys.argv[1:]]  # of a path its name only
    command = shlex.join(["python", "-m", "benchmarks.gpu", *told])
    args.out.mkdir(parents=True, exist_ok=True)
    for file, text in (("gpu.json", json.dumps(found, indent=1) + "\n"), ("gpu.md", page(found, command))):
        unfinished = args.out / f"{file}.tmp"
        unfinished.write_text(text)
        unfinished.replace(args.out / file)
    print(page(found, command))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    run(arguments())
