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

RECIPE = Path(__file__).parent / "drafter.toml"
# Of a single pass. Steps are few, so held-out documents are measured at the end alone.
SHARED = ["--epochs", "1", "--batch", "2", "--eval-every", "0", "--eval-prompts", "0", "--save-minutes", "2"]
ALONE_ENDS = ["--alone", "0", "--schedule", "linear", "--learning-rate", "5e-4", "--muon-learning-rate", "0.012"]
# What each changes; `init` is the experiment whose drafter it continues.
EXPERIMENTS: dict[str, dict[str, str]] = {
    "recipe": {},
    "norm-output": {"--norm-output": "true"},
    "fc-norm": {"--fc-norm": "true"},
    "both-norms": {"--norm-output": "true", "--fc-norm": "true"},
    "whole-mlp": {"--intermediate-size": "whole"},
    "frozen-head": {"--head": "frozen"},
    "alone-0": {"--alone": "0"},
    "steps-weigh-the-same": {"--gamma": "0"},
    "then-kl": {"init": "recipe", "--seed": "1"},
    "then-tv": {"init": "recipe", "--seed": "1", "--objective": "decay=0.1,total_variation=0.9"},
    "then-lk": {"init": "recipe", "--seed": "1", "--objective": "lk_hybrid=1.0"},
}


def run(args: argparse.Namespace) -> None:
    for name in args.only or EXPERIMENTS:
        out, change = args.out / name, dict(EXPERIMENTS[name])
        if (out / "config.json").exists():
            continue
        init = change.pop("init", None)
        if change.get("--intermediate-size") == "whole":
            change["--intermediate-size"] = str(load_target(args.target).shape["intermediate_size"])
        words = [f"{flag}={value}" for flag, value in change.items()]
        if init is None:
            words += ["--target-layers", args.target_layers]
        else:
            words += [*ALONE_ENDS, "--init", str(args.out / init), "--steps", str(args.further_steps)]
            words.append(f"--target-layers={args.target_layers}")
        data = ["--data", str(args.out / "data"), "--hidden-states", str(args.out / "hidden-states")]
        blockdraft("train", "eagle3", RECIPE, "--target", args.target, *data, *SHARED, *words, "--out", out)


def table(args: argparse.Namespace) -> None:
    print("| change | accepted length | right at 1, 2, ..., % | loss |\n|---|---|---|---|")
    for name in EXPERIMENTS:
        log = args.out / f"{name}.run" / "log.jsonl"
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
    parser.add_argument("--further-steps", type=int, default=30, help="of experiments that continue a drafter")
    parser.add_argument("--out", type=Path, default=Path("build/experiments"))
    args = parser.parse_args(words)
    {"run": run, "table": table}[args.action](args)


if __name__ == "__main__":
    main()
