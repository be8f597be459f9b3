"""Train drafters that differ from the recipe in one thing each, on the same data, and compare them.

experiments.py run --target GGUF --target-layers 6,14,22 --out build/experiments
experiments.py table --out build/experiments

`run` learns from `OUT/data` (mix.py) and its hidden states in `OUT/hidden-states`. It trains what is not trained yet,
so it can be stopped and run again; start it with `chrt -i 0` to use idle time only. `table` prints what held-out
documents gave: the accepted length, and the share of draft tokens that are right by position, given that all tokens
before them are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from blockdraft import load_target
from blockdraft.drafters import drafter_files

RECIPE = Path(__file__).parent / "drafter.toml"
# Of a single pass. Steps are few, so held-out documents are measured at the end alone.
SHARED = ["--epochs", "1", "--batch", "2", "--eval-every", "0", "--eval-prompts", "0", "--save-minutes", "2"]
# Of an experiment that continues a drafter, unless it has others.
CONTINUED = {"--alone": "0", "--schedule": "linear", "--learning-rate": "2.5e-4", "--muon-learning-rate": "0.006"}
BUNDLED, WHOLE = "bundled", "whole"
TV = "decay=0.1,total_variation=0.9"
# What each changes; `init` is the drafter that it continues, that of an experiment or the one in the package.
EXPERIMENTS: dict[str, dict[str, str]] = {
    "continued": {"init": BUNDLED},
    "continued, half the rates": {"init": BUNDLED, "--learning-rate": "1.25e-4", "--muon-learning-rate": "0.003"},
    "continued, AdamW at 5e-4": {"init": BUNDLED, "--learning-rate": "5e-4"},
    "continued, 1e-3 and 0.02": {"init": BUNDLED, "--learning-rate": "1e-3", "--muon-learning-rate": "0.02"},
    "continued, whole MLP": {"init": BUNDLED, "--intermediate-size": WHOLE},
    "continued, whole MLP, TV": {"init": BUNDLED, "--intermediate-size": WHOLE, "--objective": TV},
    "continued, LK": {"init": BUNDLED, "--objective": "lk_hybrid=1.0"},
    "continued, normed output": {"init": BUNDLED, "--norm-output": "true"},
    "recipe": {},
    "frozen head": {"--head": "frozen"},
    "normed output": {"--norm-output": "true"},
    "whole MLP": {"--intermediate-size": WHOLE},
    "fc norm": {"--fc-norm": "true"},
    "both norms": {"--norm-output": "true", "--fc-norm": "true"},
    "alone 0": {"--alone": "0"},
    "steps weigh the same": {"--gamma": "0"},
    "recipe, then TV": {"init": "recipe", "--seed": "1", "--objective": TV},
}


def run(args: argparse.Namespace) -> None:
    for name in args.only or EXPERIMENTS:
        out, change = folder(args.out, name), dict(EXPERIMENTS[name])
        if (out / "config.json").exists():
            continue
        init = change.pop("init", None)
        if init is not None:
            change = CONTINUED | change
            change["--init"] = str(drafter_files(BUNDLED, args.target) if init == BUNDLED else folder(args.out, init))
        if change.get("--intermediate-size") == WHOLE:
            change["--intermediate-size"] = str(load_target(args.target).shape["intermediate_size"])
        words = [f"{flag}={value}" for flag, value in change.items()] + [f"--target-layers={args.target_layers}"]
        data = ["--data", str(args.out / "data"), "--hidden-states", str(args.out / "hidden-states")]
        blockdraft("train", "eagle3", RECIPE, "--target", args.target, *data, *SHARED, *words, "--out", out)


def folder(out: Path, name: str) -> Path:
    return out / name.replace(", ", "-").replace(" ", "-")


def table(args: argparse.Namespace) -> None:
    print("| change | accepted length | right at 1, 2, ..., % | loss |\n|---|---|---|---|")
    for name in EXPERIMENTS:
        out = folder(args.out, name)
        log = out.with_name(f"{out.name}.run") / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for line in [line for line in lines if "held_out_loss" in line][-1:]:
            right = ", ".join(f"{100 * share:.1f}" for share in line["held_out_accuracy"])
            print(f"| {name} | {line['held_out_accepted_length']:.3f} | {right} | {line['held_out_loss']:.3f} |")


def blockdraft(*words: object) -> None:
    command = [sys.executable, "-m", "blockdraft", *map(str, words)]
    print("$", *command[2:], flush=True)
    subprocess.run(command, check=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--target", help="the GGUF file")
    parser.add_argument("--target-layers", default="6,14,22")
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), metavar="NAME", help="experiments to run")
    parser.add_argument("--out", type=Path, default=Path("build/experiments"))
    args = parser.parse_args(words)
    {"run": run, "table": table}[args.action](args)


if __name__ == "__main__":
    main()
