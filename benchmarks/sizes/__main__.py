"""Decoding speed by the size of the model: `python -m benchmarks.sizes --prompts FILE`, or `make bench-sizes`.

The bundled pair, made 1, 2, 4 and 8 times as wide (`widen.py`), says the same words at every size, so tau is that of a
trained pair and the cost is that of the size. For each width and dtype `blockdraft bench` decodes the prompts with each
method in turns. A size that is done is kept, and a run that was interrupted goes on with the next; `--anew` forgets
them. It fails where a pair does not run compiled.

Written to --out: a folder for each size, figures.csv with every repeat, sizes.md and sizes.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.sizes.widen import DRAFTER, TARGET, widen

ROOT = Path(__file__).parents[2]
PLAIN = "none"


@dataclass(frozen=True)
class Size:
    """One pair and what was measured of it.

    Attributes:
        parameters: Of the target.
        methods: By name, as in the `results.json` of `blockdraft bench`.
    """

    width: int
    dtype: str
    parameters: int
    methods: dict[str, dict[str, Any]]


def parameters(folder: Path) -> int:
    """How many numbers a folder's weights are."""
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def measure(width: int, dtype: str, arguments: argparse.Namespace) -> Size:
    """Measure one size, unless it has been."""
    out: Path = arguments.out / f"{width}-{dtype}"
    with tempfile.TemporaryDirectory() as folder:
        wide = [widen(source, Path(folder) / source.name, width) for source in (TARGET, DRAFTER)]
        count = parameters(wide[0])
        if not (out / "results.json").is_file():
            command = [sys.executable, "-m", "blockdraft", "bench", "--prompts", str(arguments.prompts)]
            command += ["--target", str(wide[0]), "--drafter", str(wide[1]), "--dtype", dtype, "--compile", "on"]
            command += ["--methods", arguments.methods, "--limit", str(arguments.limit), "--no-pictures"]
            command += ["--max-new-tokens", str(arguments.tokens), "--repeats", str(arguments.repeats)]
            print(f"{width} times as wide, {count / 1e6:.0f} M parameters, {dtype}", file=sys.stderr, flush=True)
            subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for name, found in results["methods"].items():
        if found["identical"] < 1:
            raise RuntimeError(f"{name} at width {width} in {dtype} changes tokens; its speed says nothing.")
    return Size(width, dtype, count, results["methods"])


def table(sizes: list[Size]) -> str:
    """What was found, as Markdown."""
    names = [name for name in sizes[0].methods if name != PLAIN]
    lines = [
        f"| parameters | dtype | plain, tokens/s | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for size in sizes:
        plain = size.methods[PLAIN]["tokens_per_second"]
        cells = [
            f"{size.methods[name]['tokens_per_second']:.0f} ({size.methods[name]['speedup']:.2f} times, "
            f"tau {size.methods[name]['tau']:.2f})"
            for name in names
        ]
        lines.append(f"| {size.parameters / 1e6:.0f} M | {size.dtype} | {plain:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_figures(sizes: list[Size], path: Path) -> None:
    """Every repeat of every method, a line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["width", "parameters", "dtype", "method", "repeat", "tokens_per_second", "speedup", "tau"])
        for size in sizes:
            for name, found in size.methods.items():
                each = zip(found["tokens_per_second_by_repeat"], found["speedup_by_repeat"], strict=True)
                for repeat, (speed, speedup) in enumerate(each):
                    row = [size.width, size.parameters, size.dtype, name, repeat, speed, speedup, found["tau"]]
                    lines.writerow(row)


def draw(sizes: list[Size], path: Path) -> None:
    """Speed-up over plain decoding by size, with the range of the repeats, and tokens/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for dtype in dict.fromkeys(size.dtype for size in sizes):
        own = [size for size in sizes if size.dtype == dtype]
        label = "" if len({size.dtype for size in sizes}) == 1 else f", {dtype}"
        across = [size.parameters / 1e6 for size in own]
        for name in own[0].methods:
            found = [size.methods[name] for size in own]
            right.plot(across, [each["tokens_per_second"] for each in found], "o-", label=name + label)
            if name == PLAIN:
                left.axhline(1, color="black", linewidth=1, linestyle=":")
                left.plot([], [])  # the same colours on both sides
                continue
            middle = [statistics.median(each["speedup_by_repeat"]) for each in found]
            low = [m - min(each["speedup_by_repeat"]) for m, each in zip(middle, found, strict=True)]
            high = [max(each["speedup_by_repeat"]) - m for m, each in zip(middle, found, strict=True)]
            left.errorbar(across, middle, (low, high), fmt="o-", capsize=3, label=name + label)
    for axes, title in ((left, "speed-up over plain decoding"), (right, "tokens/s")):
        axes.set_xscale("log")
        axes.set_xticks(across, [f"{x:.0f} M" for x in across])
        axes.minorticks_off()
        axes.set_xlabel("parameters of the target")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    parser.add_argument("--widths", default="1,2,4,8", help="powers of two (1,2,4,8)")
    parser.add_argument("--dtypes", default="bfloat16", help="of float32,bfloat16 (bfloat16)")
    parser.add_argument("--methods", default="none,dflash:4,dflash:auto,ddtree:auto", help="as in blockdraft bench")
    parser.add_argument("--limit", type=int, default=8, help="prompts (8)")
    parser.add_argument("--tokens", type=int, default=96, help="most new tokens of an answer (96)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two widths, two prompts, one repeat")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sizes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.widths, arguments.limit, arguments.repeats = "1,2", 2, 1
    if arguments.anew and arguments.out.exists():
        shutil.rmtree(arguments.out)
    pairs = [(int(width), dtype) for dtype in arguments.dtypes.split(",") for width in arguments.widths.split(",")]
    sizes = [measure(width, dtype, arguments) for width, dtype in pairs]
    write_figures(sizes, arguments.out / "figures.csv")
    (arguments.out / "sizes.md").write_text(table(sizes) + "\n", encoding="utf-8")
    draw(sizes, arguments.out / "sizes.png")
    print(table(sizes))


if __name__ == "__main__":
    main()
