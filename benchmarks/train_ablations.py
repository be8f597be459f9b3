"""Which parts of the training recipe pay: drafters of the bundled target on equal tokens, tau of each, several seeds.

    python recipes/tiny/paired_answers.py --out data     # from what recipes/tiny/make_pair.sh has made
    blockdraft data data/written.jsonl --limit 2300 --out data/written     # {"prompt", "response"}, by the target
    blockdraft data data/original.jsonl --limit 2300 --out data/original   # the same prompts, original responses
    blockdraft hidden-states --data data/written --target-layers 5 --out features/written-5  # also written-1
    blockdraft hidden-states --data data/written --target-layers 1,2,3,4,5,8 --out features/written-teacher 
    python benchmarks/train_ablations.py recipes/tiny/ablation.toml --written data/written --original data/original \
        --hidden-states features --prompts gsm8k.jsonl --prompts humaneval.jsonl --out build/ablations

Every arm changes one thing of the base recipe. Each seed of an arm is one `blockdraft train` run, or two of half the
steps each, of which the second begins with the drafter of the first. An interrupted command resumes. It writes
results.json, results.md and results.png. A direction counts as found if every seed has it on every prompt set, in the
first way of decoding. What trees gain from knowing which guess follows which:

    ... --arms base,DFlash2,DSpark --decoding chain,tree:32,path:32,draft:32
"""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

sys.path.append(str(Path(__file__).parents[1]))  # for those who start it as a script

from benchmarks.harness.command import Parser, listed
from benchmarks.harness.report import picture, table
from blockdraft import Drafter, Drafting, Engine, SamplingParams, Target, load_drafter, load_target
from blockdraft.decode.sampling import best_tokens
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.train import DFlashRecipe
from blockdraft.drafters.dflash2.drafter import walk
from blockdraft.engine import loops, merge
from blockdraft.evaluation.prompts import PromptSet, read_prompt_sets
from blockdraft.settings import read_settings

BASE = "base"


class Arm(NamedTuple):
    """A drafter beside the base.

    Attributes:
        changes: Fields of the base recipe that it changes.
        worse: Whether the base is expected to accept more; None where no direction is claimed.
        warm: Whether it begins with the base's drafter after half of the steps.
    """

    changes: dict[str, str]
    worse: bool | None = None
    warm: bool = False


def objective(name: str) -> dict[str, str]:
    return {"objective": name, "stored": "teacher"}


DSPARK = {"variant": "dspark", "stored": "teacher"}
ARMS = {
    BASE: Arm({}),
    "original text": Arm({"data": "original"}, True),
    "fixed blocks": Arm({"anchor_placement": "fixed"}, True),
    "1 tap": Arm({"target_layers": "1"}, True),
    "no decay": Arm({"gamma": "0"}, True),
    "D-PACE": Arm({"objective": "dpace=1"}, False),
    "half forward KL": Arm(objective("decay=0.5,forward_kl=0.5")),
    "DFlash2": Arm({"variant": "dflash2"}, False),
    # DFlash2's selector adds most of its weights; with this rank it has about as many as the base.
    "small DFlash2": Arm({"variant": "dflash2", "selector_rank": "16"}, False),
    "1 layer": Arm({"layers": "1"}, True),
    "3 layers": Arm({"layers": "3"}, False),
    "block 8": Arm({"block_size": "8"}, True),
    # Its blocks guess 7 tokens, as those of "block 8" do.
    "DSpark": Arm(DSPARK, False),
    # Control for warm arms, whose rates rise and fall twice.
    "DFlash from DFlash": Arm({}, warm=True),
    "DFlash2 from DFlash": Arm({"variant": "dflash2"}, False, warm=True),
    "DSpark from DFlash": Arm(DSPARK, False, warm=True),
    "total variation": Arm(objective("total_variation=1")),
    "LK hybrid": Arm(objective("lk_hybrid=1")),
    "block verification": Arm(objective("block_verification=1")),
    "block verification from DFlash": Arm(objective("block_verification=1"), warm=True),
}
FIRST_STAGE = 1000  # added to its seed, so that the second stage does not read the same rows in the same order

# Ways to decode; all but the last are greedy, and N bounds the guesses of trees. Trees of DFlash2 and DSpark know the
# distribution of each guess after each other one; "path" and "draft" trees do not, for comparison.
DECODINGS = {
    "chain": "the drafter's chains",
    "tree": "trees of so many guesses",
    "path": "trees in which each slot has one distribution, that on the way of the best chain",
    "draft": "trees in which each slot has one distribution, that of the draft pass without selector or Markov head",
    "sampled": "chains sampled from the drafter's distribution, at temperature 1, with block verification",
}
RENAMED = {"drawn": "sampled"}  # former names, in commands and results


def arguments(recipe: Path, data: dict[str, Path], hidden_states: Path | None, arm: str) -> list[str]:
    """Arguments of `blockdraft train` for an arm."""
    changes = dict(ARMS[arm].changes)
    variant, kind = changes.pop("variant", "dflash"), changes.pop("data", "written")
    stored = changes.pop("stored", changes.get("target_layers", "5"))
    found = [variant, str(recipe), "--data", str(data[kind])]
    if hidden_states is not None:
        found += ["--hidden-states", str(hidden_states / f"{kind}-{stored}")]
    for name, value in changes.items():
        found += [f"--{name.replace('_', '-')}", value]
    return found


def stages(
    arguments_of: Callable[[str], list[str]], arm: str, seed: int, steps: int, out: Path
) -> list[tuple[Path, list[str]]]:
    """Runs that make the drafter of an arm, in order: their folders and all arguments of `blockdraft train`."""

    def stage(arm: str, folder: Path, seed: int, steps: int, *more: str) -> tuple[Path, list[str]]:
        options = ["--out", str(folder), "--seed", str(seed), "--steps", str(steps), *more]
        return folder, [*arguments_of(arm), *options]

    folder = out / f"{arm.replace(' ', '_')}-{seed}"
    if not ARMS[arm].warm:
        return [stage(arm, folder, seed, steps)]
    first, half = out / f"first_half-{seed}", steps // 2
    return [
        stage(BASE, first, FIRST_STAGE + seed, half),
        stage(arm, folder, seed, steps - half, "--init", str(first)),
    ]


@cache  # arms share their first stage; `blockdraft train` itself sees what an earlier command has finished
def train(*options: str) -> None:
    subprocess.run([sys.executable, "-m", "blockdraft", "train", *options], check=True, stdout=subprocess.DEVNULL)


def read_decoding(text: str) -> tuple[str, Drafting, SamplingParams]:
    """A kind of `DECODINGS` and the engine's settings for it. Raises ValueError for an unknown one."""
    text = RENAMED.get(text, text)
    if not re.fullmatch("chain|sampled|(tree|path|draft):[1-9][0-9]*", text):
        raise ValueError(f"decoding is {text!r}; give chain, tree:N, path:N, draft:N or sampled, N guesses at most")
    kind, _, size = text.partition(":")
    params = SamplingParams(temperature=1.0, seed=0) if kind == "sampled" else SamplingParams()
    return kind, Drafting(None, tree_budget=int(size or 0), sampled=kind == "sampled"), params


def forget_pairs(drafter: Drafter, kind: str) -> None:
    """Make a drafter grow the trees of the kinds "path" and "draft"; one without a lattice grows them anyway."""
    if kind == "draft" and isinstance(drafter, DFlashDrafter):
        drafter._draft_token = MethodType(DFlashDrafter._draft_token, drafter)  # type: ignore[method-assign]
    if kind == "path":
        for holder, name in ((drafter, "_lattice"), (getattr(drafter, "network", None), "lattice")):
            if hasattr(holder, name):
                setattr(holder, name, partial(on_the_way, getattr(holder, name)))


def on_the_way(lattice: Callable[..., tuple[Tensor, Tensor]], *args: Any) -> tuple[Tensor, Tensor]:
    """A lattice whose slots have the same distribution after each guess: that after the best path up to there."""
    ids_BDK, values_BDKK = lattice(*args)
    before_BD = pad(walk(best_tokens(values_BDKK))[:, :-1], (1, 0))
    dist_BD1K = values_BDKK.gather(2, before_BD[:, :, None, None].expand_as(values_BDKK[:, :, :1]))
    return ids_BDK, dist_BD1K.expand_as(values_BDKK)


def name_of(prompts: str, decoding: str) -> str:
    return prompts if decoding == "chain" else f"{prompts}, {decoding}"


def read_taus(file: Path) -> dict[str, float]:
    """Results of `measure` for one run, under present names."""
    found = {}
    for name, tau in json.loads(file.read_text()).items():
        prompts, comma, decoding = name.rpartition(", ")
        found[prompts + comma + (RENAMED.get(decoding, decoding) if comma else decoding)] = tau
    return found


def measure(drafter: str, target: Target, sets: Sequence[PromptSet], tokens: int, decoding: str) -> dict[str, float]:
    """tau on each prompt set, answers that loop left out."""
    kind, drafting, params = read_decoding(decoding)
    loaded = load_drafter(drafter, target=target)
    forget_pairs(loaded, kind)
    engine = Engine(target, loaded, max_batch_size=16, drafting=drafting)
    found = {}
    for one in sets:
        completions = engine.generate(list(one.prompts), replace(params, max_new_tokens=tokens))
        sound = [completion.stats for completion in completions if not loops(completion.token_ids)]
        found[name_of(one.name, decoding)] = merge(sound).tau
    return found


def taus_table(results: dict[str, dict[str, dict[str, float]]], names: Sequence[str]) -> str:
    """A line for each arm: mean, lowest and highest tau of its seeds, and the ratio to the base on the same seeds."""
    lines = []
    for arm, runs in results.items():
        cells, deciding = [], []
        for name in names:
            taus = [run[name] for run in runs.values()]
            ratios = [run[name] / results[BASE][seed][name] for seed, run in runs.items() if seed in results[BASE]]
            if name.partition(", ")[2] == names[0].partition(", ")[2]:  # the first of the decodings decides
                deciding += ratios
            ratio = statistics.mean(ratios) if ratios else float("nan")
            cells += [f"{statistics.mean(taus):.2f} ({min(taus):.2f} to {max(taus):.2f})", f"{ratio:.2f}"]
        expected = {None: "", True: "less", False: "more"}[ARMS[arm].worse]
        found = "less" if max(deciding, default=1) < 1 else "more" if min(deciding, default=1) > 1 else "neither"
        lines.append([arm, str(len(runs)), *cells, expected, "" if arm == BASE else found])
    columns = [column for name in names for column in (f"{name}: tau", "against base")]
    return table(["", "seeds", *columns, "expected", "found"], lines) + "\n"


def draw(results: dict[str, dict[str, dict[str, float]]], names: Sequence[str], path: Path) -> None:
    size, arms = (5 * len(names), 0.375 * max(12, len(results))), list(results)[::-1]
    with picture(path, 1, len(names), figsize=size, sharey=True) as (_, panels):
        for axes, name in zip(panels[0], names, strict=True):
            for place, arm in enumerate(arms):
                taus = [run[name] for run in results[arm].values()]
                axes.barh(place, statistics.mean(taus), color="tab:gray" if arm == BASE else "tab:blue", alpha=0.6)
                axes.plot(taus, [place] * len(taus), "k.", markersize=5)
            axes.set_yticks(range(len(arms)), arms)
            axes.set(xlabel="tau (tokens per target forward)", title=name)
            axes.set_xlim(left=1)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("recipe", type=Path, help="the base recipe")
    add("--written", type=Path, required=True, help="token data that the target wrote")
    add("--original", type=Path, required=True, help="token data of the same prompts, original text")
    add("--hidden-states", type=Path, help="stored features, DATA-TAPS each, instead of the target")
    add("--prompts", type=Path, action="append", required=True, help="prompt set; may be repeated")
    add("--steps", type=int, help="of each run, instead of the recipe's")
    add("--limit", type=int, default=32, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128)
    add("--out", type=Path, required=True)
    add("--seeds", type=int, default=3)
    add("--arms", type=listed(known=ARMS), default=",".join(ARMS), help=f"of: {', '.join(ARMS)}")
    ways = "; ".join(f"{name}, {meaning}" for name, meaning in DECODINGS.items())
    wanted = f"chain, tree:N, path:N, draft:N, sampled; {ways}"
    add(
        "--decoding",
        type=listed(lambda text: read_decoding(text) and RENAMED.get(text, text)),
        default="chain",
        help=wanted,
    )
    args = parser.parse()
    sets, target = read_prompt_sets(args.prompts, args.limit), load_target("bundled")
    names = [name_of(one.name, decoding) for decoding in args.decoding for one in sets]
    steps = args.steps or read_settings(DFlashRecipe, args.recipe).steps
    args.out.mkdir(parents=True, exist_ok=True)
    header = (
        f"tau at temperature 0 on {args.limit} prompts of each set, answers of up to {args.max_new_tokens} tokens, "
        f"those that loop left out, after {steps} steps: mean of the seeds (lowest to highest). Written by "
        "benchmarks/train_ablations.py.\n\n"
    )
    if args.decoding != ["chain"]:
        kinds = dict.fromkeys(read_decoding(decoding)[0] for decoding in args.decoding)
        header += "".join(f"- {kind}: {DECODINGS[kind]}\n" for kind in kinds) + "\n"
    options_of = partial(
        arguments, args.recipe, {"written": args.written, "original": args.original}, args.hidden_states
    )
    # Seed after seed, so that an interrupted comparison has seen every arm equally often.
    for seed in range(args.seeds):
        for arm in args.arms:
            runs = stages(options_of, arm, seed, steps, args.out)
            folder = runs[-1][0]
            file = folder.with_suffix(".tau.json")
            found = read_taus(file) if file.exists() else {}
            for decoding in args.decoding:
                if all(name_of(one.name, decoding) in found for one in sets):
                    continue
                print(f"seed {seed}: {arm}, {decoding}", flush=True)
                for _, options in runs:
                    train(*options)
                taus = measure(str(folder), target, sets, args.max_new_tokens, decoding)
                file.write_text(json.dumps(found := {**found, **taus}))
                print(f"  tau {taus}", flush=True)
            write(args.out, names, header)


def write(out: Path, names: Sequence[str], header: str) -> None:
    """Write the results of all runs that have been measured in all these ways."""
    results: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        for file in sorted(out.glob(f"{arm.replace(' ', '_')}-*.tau.json")):
            found = read_taus(file)
            if all(name in found for name in names):
                seed = file.name.split(".")[0].rpartition("-")[2]
                results.setdefault(arm, {})[seed] = {name: found[name] for name in names}
    if BASE in results:
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (out / "results.md").write_text(header + taus_table(results, names))
        draw(results, names, out / "results.png")


if __name__ == "__main__":
    main()
