"""Step 8: measure the pair on prompts that it was not trained on, plain and drafted, and write the figures down.

For each prompt set: right answers, and the shares of answers that end by themselves and that loop. For each drafter, in
turns prompt by prompt, over answers that do not loop: tau of chains, of trees and of chains at temperature 1,
acceptance by position, whether tokens are those of plain decoding, and tokens per second. And how many generated
problems the target solves.

`--wide` compares the speed of drafters on a pair of 75 M parameters that says the same words, since the small pair
costs so little that draft tokens hardly pay.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from making import digest
from solve import answer_of, solved

from blockdraft import Completion, Engine, SamplingParams, load_drafter, load_target
from blockdraft.drafters import TINY_DRAFTER
from blockdraft.engine import Stats, loops, merge
from blockdraft.types import CPU_BLOCK_SIZE, Backend, Drafting

# Timed backends and their block sizes (None: the drafter's own).
BACKENDS: dict[Backend, int | None] = {"native": CPU_BLOCK_SIZE, "hf": None}
TREE_BUDGET, TEMPERATURE = 32, 1.0
# Each drafter of a wide pair is judged by the fastest of these.
WIDE_WAYS = {"auto": Drafting("auto"), "blocks of 4": Drafting(4), "blocks of 8": Drafting(8)}
PLAIN = "plain"


def speeds(
    engines: Mapping[str, Engine], prompts: Sequence[str], params: SamplingParams, repeats: int
) -> dict[str, float]:
    """Return the median tokens per second of each engine over all prompts, without first tokens."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        stats: dict[str, list[Stats]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                stats[name].append(engine.generate([prompt], params)[0].stats)
        for name, own in stats.items():
            rates[name].append(sum(sum(s.committed) for s in own) / sum(s.total_seconds for s in own))
    return {name: round(median(rate), 1) for name, rate in rates.items()}


def drafted(completions: Sequence[Completion]) -> tuple[Stats, dict[str, float]]:
    """Return the merged statistics of outputs that are not repetitive, and their figures."""
    sound = [c.stats for c in completions if not loops(c.token_ids)]
    together = merge(sound)
    return together, {
        "tau": round(together.tau, 3),
        "tau_mean_over_answers": round(sum(s.tau for s in sound) / max(len(sound), 1), 3),
        "repetitive": round(1 - len(sound) / len(completions), 4),
    }


def over_first(rates: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the speed of each further drafter over the first one's, each with its fastest method.

    Args:
        rates: Tokens per second by "NAME, WAY".
        names: Names of the drafters.
    """
    best = {name: max(rates[f"{name}, {way}"] for way in WIDE_WAYS) for name in names}
    return {name: round(best[name] / best[names[0]], 3) for name in names[1:]}


def measure_wide(
    folder: Path, names: Sequence[str], prompts: Sequence[str], params: SamplingParams, repeats: int
) -> dict[str, Any]:
    """Measure a wide target, plain and with each of its drafters, interleaved.

    Args:
        folder: Holds `target` and these drafters, as `benchmarks/sizes/widen.py` wrote them.
    """
    target = load_target(folder / "target", threads="auto")
    engines = {PLAIN: Engine(target)}
    for name in names:
        drafter = load_drafter(folder / name, target=target)
        engines |= {f"{name}, {way}": Engine(target, drafter, drafting=how) for way, how in WIDE_WAYS.items()}
    rates = speeds(engines, prompts, params, repeats)
    return {
        "running": target.running,
        "parameters": sum(weight.numel() for _, weight in target.named_weights()),
        "prompts": len(prompts),
        "repeats": repeats,
        "tokens_per_second": rates,
        "over_first": over_first(rates, names),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/*.jsonl")
    parser.add_argument("--target", type=Path, default=None, help="default: the bundled target")
    parser.add_argument("--drafters", type=Path, nargs="+", default=None, help="default: the bundled one")
    parser.add_argument("--wide", type=Path, default=None, help="folder with the widened target and drafters")
    parser.add_argument("--corpus", type=Path, default=None, help="corpus whose problems are left out")
    parser.add_argument("--problems", type=int, default=500, help="number of generated problems to solve")
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=None, help="most prompts of each set")
    parser.add_argument("--skip-plain", action="store_true", help="do not compare with plain decoding")
    parser.add_argument("--speed", type=int, default=20, help="number of prompts to measure speed on")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the measurement of speed")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    args = parser.parse_args(words)
    if args.wide and not args.speed:
        parser.error("--wide needs prompts to be timed on; --speed is 0")

    folders = args.drafters or [TINY_DRAFTER]
    names = [folder.name for folder in folders]
    # The first backend answers, both are timed.
    targets = {backend: load_target(args.target, backend=backend, threads="auto") for backend in BACKENDS}
    timed: dict[str, Engine] = {}
    for backend, block_size in BACKENDS.items():
        target = targets[backend]
        timed[f"{backend}, {PLAIN}"] = Engine(target, max_batch_size=64)
        for name, folder in zip(names, folders, strict=True):
            timed[f"{backend}, {name}"] = Engine(
                target, load_drafter(folder, target=target), drafting=Drafting(block_size)
            )
    target, plain = targets["native"], timed[f"native, {PLAIN}"]
    greedy, ways = SamplingParams(args.max_new_tokens), {}
    for name in names:
        drafter = timed[f"native, {name}"].drafter
        chains, trees = (
            Engine(target, drafter, drafting=Drafting(None)),
            Engine(target, drafter, drafting=Drafting(tree_budget=TREE_BUDGET)),
        )
        ways |= {(name, "chain"): (chains, 0.0), (name, "tree"): (trees, 0.0), (name, "sampled"): (chains, TEMPERATURE)}
    figures, to_time = {}, list[str]()
    for set_name in args.sets:
        with (args.data / f"prompts/{set_name}.jsonl").open(encoding="utf-8") as file:
            prompts = [json.loads(line)["turns"][0] for line in file][: args.limit]
        began = time.time()
        said: dict[tuple[str, str], list[Completion]] = {way: [] for way in ways}
        for seed, prompt in enumerate(prompts):
            for way, (engine, temperature) in ways.items():
                params = SamplingParams(args.max_new_tokens, temperature, seed=seed)
                said[way] += engine.generate([prompt], params)
        answers = said[names[0], "chain"]  # greedy ones are the same with every drafter
        figure: dict[str, Any] = {
            "prompts": len(prompts),
            "ended_by_themselves": round(sum(c.finish_reason == "stop" for c in answers) / len(prompts), 4),
            "repetitive": drafted(answers)[1]["repetitive"],
            "mean_tokens": round(sum(len(c.token_ids) for c in answers) / len(prompts), 1),
            "seconds": round(time.time() - began, 1),
            "tree_budget": TREE_BUDGET,
            "temperature": TEMPERATURE,
            "drafters": {},
        }
        reference = None if args.skip_plain else plain.generate(prompts, greedy)
        for name in names:
            together, own = drafted(said[name, "chain"])
            own |= {"tree": drafted(said[name, "tree"])[1], "sampled": drafted(said[name, "sampled"])[1]}
            own["acceptance_by_position"] = [round(share, 3) for share in together.acceptance_by_position]
            if reference is not None:
                pairs = zip(said[name, "chain"], reference, strict=True)
                own["identical_to_plain"] = sum(a.token_ids == b.token_ids for a, b in pairs)
            figure["drafters"][name] = own
        if args.speed:
            chosen = [p for p, c in zip(prompts, answers, strict=True) if not loops(c.token_ids)][: args.speed]
            to_time += chosen[: args.speed // len(args.sets)]
            figure["speed_prompts"], figure["repeats"] = len(chosen), args.repeats
            figure["tokens_per_second"] = speeds(timed, chosen, greedy, args.repeats)
        gold_file = args.data / f"prompts/{set_name}_test_with_answers.jsonl"
        if gold_file.is_file():
            with gold_file.open(encoding="utf-8") as file:
                gold = [json.loads(line)["answer"].split("####")[-1].strip().replace(",", "") for line in file]
            right = sum(answer_of(c.text) == g for c, g in zip(answers, gold, strict=False))
            figure["right_answers"] = round(right / len(prompts), 4)
        figures[set_name] = figure
        print(set_name, json.dumps(figure, indent=2), flush=True)
        for prompt, completion in list(zip(prompts, answers, strict=True))[:3]:
            print(f"--- {prompt}\n>>> {completion.text}  [tau {completion.tau:.2f}, {completion.finish_reason}]")
    assert target.path is not None
    report: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sets": figures}
    report["weights"] = {folder.name: digest(folder) for folder in (Path(target.path), *folders)}
    report["problems"] = solved(target, args.problems, args.corpus)
    if args.wide:
        report["wide"] = measure_wide(args.wide, names, to_time, greedy, args.repeats)
    print(json.dumps({name: report[name] for name in report if name != "sets"}, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
