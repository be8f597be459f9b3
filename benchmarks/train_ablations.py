"""Which parts of the training recipe pay: drafters of the bundled target on equal tokens, tau of each, several seeds.

    python recipes/tiny/paired_answers.py --out data     # from what recipes/tiny/make_pair.sh has made
    blockdraft data data/written.jsonl --limit 2300 --out data/written     # {"prompt", "response"}, by the target
    blockdraft data data/original.jsonl --limit 2300 --out data/original   # the same prompts, original responses
    blockdraft features --data data/written --taps 5 --out features/written-5  # likewise written-1 and original-5
    blockdraft features --data data/written --taps 1,2,3,4,5,8 --out features/written-teacher  # 8 taps the last layer
    python benchmarks/train_ablations.py recipes/tiny/ablation.toml --written data/written --original data/original \
        --features features --prompts gsm8k.jsonl --prompts humaneval.jsonl --out build/ablations

Every arm changes one thing of the base recipe. Each seed of an arm is one `blockdraft train` run; what is finished is
kept, so the command goes on where it stopped. It writes results.json, results.md and results.png. A direction counts as
found if every seed has it on every prompt set.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdraft import Engine, SamplingParams, Target, load_drafter, load_target
from blockdraft.engine import loops, merge
from blockdraft.evaluation.prompts import PromptSet, read_prompt_sets
from blockdraft.settings import read_settings
from blockdraft.training.variants.dflash import DFlashRecipe

BASE = "base"
# Arm: what it changes, and whether the base is expected to accept more than it (None: no direction is claimed).
ARMS: dict[str, tuple[dict[str, str], bool | None]] = {
    BASE: ({}, None),
    "original text": ({"data": "original"}, True),
    "fixed blocks": ({"anchor_placement": "fixed"}, True),
    "1 tap": ({"taps": "1"}, True),
    "no decay": ({"gamma": "0"}, True),
    "D-PACE": ({"objective": "dpace=1"}, False),
    "half forward KL": ({"objective": "decay=0.5,forward_kl=0.5", "stored": "teacher"}, None),
    "DFlash2": ({"variant": "dflash2"}, False),
    # The codebooks of the selector are most of what DFlash2 adds; with these it has about as many weights as the base.
    "small DFlash2": ({"variant": "dflash2", "selector_rank": "16"}, False),
    "1 layer": ({"layers": "1"}, True),
    "3 layers": ({"layers": "3"}, False),
    "block 8": ({"block_size": "8"}, True),
}


def arguments(recipe: Path, data: dict[str, Path], features: Path | None, arm: str) -> list[str]:
    """Those of `blockdraft train` for this arm."""
    changes = dict(ARMS[arm][0])
    variant, kind = changes.pop("variant", "dflash"), changes.pop("data", "written")
    stored = changes.pop("stored", changes.get("taps", "5"))
    found = [variant, str(recipe), "--data", str(data[kind])]
    if features is not None:
        found += ["--features", str(features / f"{kind}-{stored}")]
    for name, value in changes.items():
        found += [f"--{name.replace('_', '-')}", value]
    return found


def measure(drafter: str, target: Target, sets: Sequence[PromptSet], tokens: int) -> dict[str, float]:
    """tau on each prompt set, greedily, answers that loop left out."""
    engine = Engine(target, load_drafter(drafter, target=target), max_batch_size=16)
    found = {}
    for one in sets:
        completions = engine.generate(list(one.prompts), SamplingParams(max_new_tokens=tokens))
        sound = [completion.stats for completion in completions if not loops(completion.token_ids)]
        found[one.name] = merge(sound).tau
    return found


def table(results: dict[str, dict[str, dict[str, float]]], names: Sequence[str]) -> str:
    """A row for each arm: mean, lowest and highest tau of its seeds, and the ratio to the base on the same seeds."""
    lines = [f"| | seeds | {' | '.join(f'{name}: tau | against base' for name in names)} | expected | found |"]
    lines.append("|---" * (4 + 2 * len(names)) + "|")
    for arm, runs in results.items():
        cells, ratios = [], []
        for name in names:
            taus = [run[name] for run in runs.values()]
            shared = [(run[name], results[BASE][seed][name]) for seed, run in runs.items() if seed in results[BASE]]
            ratios += [mine / base for mine, base in shared]
            ratio = statistics.mean(mine / base for mine, base in shared) if shared else float("nan")
            cells += [f"{statistics.mean(taus):.2f} ({min(taus):.2f} to {max(taus):.2f})", f"{ratio:.2f}"]
        worse = ARMS[arm][1]
        expected = {None: "", True: "less", False: "more"}[worse]
        found = "less" if max(ratios, default=1) < 1 else "more" if min(ratios, default=1) > 1 else "neither"
        found = "" if arm == BASE else found
        lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} | {expected} | {found} |")
    return "\n".join(lines) + "\n"


def picture(results: dict[str, dict[str, dict[str, float]]], names: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 4.5), sharey=True, squeeze=False)
    arms = list(results)[::-1]
    for axis, name in zip(axes[0], names, strict=True):
        for place, arm in enumerate(arms):
            taus = [run[name] for run in results[arm].values()]
            axis.barh(place, statistics.mean(taus), color="tab:gray" if arm == BASE else "tab:blue", alpha=0.6)
            axis.plot(taus, [place] * len(taus), "k.", markersize=5)
        axis.set_yticks(range(len(arms)), arms)
        axis.set_xlim(left=1)
        axis.set_xlabel("tau (tokens per target forward)")
        axis.set_title(name)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="the base recipe")
    parser.add_argument("--written", type=Path, required=True, help="token data that the target wrote")
    parser.add_argument("--original", type=Path, required=True, help="token data of the same prompts, original text")
    parser.add_argument(
        "--features", type=Path, help="folder of stored features, DATA-TAPS each, instead of the target"
    )
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="prompt set; may be repeated")
    parser.add_argument("--steps", type=int, help="of each run, instead of the recipe's")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of: {', '.join(ARMS)}")
    args = parser.parse_args()
    arms = [arm.strip() for arm in args.arms.split(",")]
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arms {unknown}; there are {', '.join(ARMS)}")

    sets = read_prompt_sets(args.prompts, args.limit)
    names = [one.name for one in sets]
    target = load_target()
    steps = args.steps or read_settings(DFlashRecipe, args.recipe).steps
    args.out.mkdir(parents=True, exist_ok=True)
    header = (
        f"tau at temperature 0 on {args.limit} prompts of each set, answers of up to {args.max_new_tokens} tokens, "
        f"those that loop left out, after {steps} steps: mean of the seeds (lowest to highest). Written by "
        "benchmarks/train_ablations.py.\n\n"
    )
    data = {"written": args.written, "original": args.original}
    # Seed after seed, so that an interrupted comparison has seen every arm equally often.
    for seed in range(args.seeds):
        for arm in arms:
            folder = args.out / f"{arm.replace(' ', '_')}-{seed}"
            found = folder.with_suffix(".tau.json")
            if not found.exists():
                print(f"seed {seed}: {arm}", flush=True)
                command = [sys.executable, "-m", "blockdraft", "train"]
                command += arguments(args.recipe, data, args.features, arm)
                command += ["--out", str(folder), "--seed", str(seed), "--steps", str(steps)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found.write_text(json.dumps(measure(str(folder), target, sets, args.max_new_tokens)))
                print(f"  tau {json.loads(found.read_text())}", flush=True)
            write(args.out, names, header)


def write(out: Path, names: Sequence[str], header: str) -> None:
    results: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        files = sorted(out.glob(f"{arm.replace(' ', '_')}-*.tau.json"))
        if files:
            results[arm] = {file.name.split(".")[0].rpartition("-")[2]: json.loads(file.read_text()) for file in files}
    if BASE in results:
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (out / "results.md").write_text(header + table(results, names))
        picture(results, names, out / "results.png")


if __name__ == "__main__":
    main()
