"""Step 6: measure the pair on prompts that it was never trained on, plain and drafted, and write the figures down.

For each prompt set: tau over the answers that do not loop, acceptance by position, the share of answers that end by
themselves and that loop, whether drafted and plain tokens are the same, and tokens per second of both, one prompt after
the other and each decoded in turns.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from blockdraft import Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine import Stats, loops, merge
from blockdraft.types import CPU_BLOCK_SIZE, Backend, Drafting

# What is timed, and in blocks of which size (None: the drafter's own): as `blockdraft generate` does by default.
BACKENDS: dict[Backend, int | None] = {"native": CPU_BLOCK_SIZE, "hf": None}


def answer_of(text: str) -> str | None:
    """The number in the last box of an answer."""
    _, box, rest = text.rpartition("\\boxed{")
    return rest.partition("}")[0].replace(",", "").replace("$", "") if box else None


def speeds(engines: Sequence[Engine], prompts: list[str], params: SamplingParams, repeats: int) -> list[float]:
    """Median over `repeats` of each engine's tokens per second over all prompts, first tokens left out."""
    rates: list[list[float]] = [[] for _ in engines]
    for _ in range(repeats):
        stats: list[list[Stats]] = [[] for _ in engines]
        for prompt in prompts:
            for engine, own in zip(engines, stats, strict=True):
                own.append(engine.generate([prompt], params)[0].stats)
        for rate, own in zip(rates, stats, strict=True):
            rate.append(sum(sum(s.committed) for s in own) / sum(s.total_seconds for s in own))
    return [median(rate) for rate in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/*.jsonl")
    parser.add_argument("--target", type=Path, default=None, help="default: the bundled target")
    parser.add_argument("--drafter", type=Path, default=None, help="default: the bundled drafter")
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=None, help="only so many prompts of each set")
    parser.add_argument("--skip-plain", action="store_true", help="do not decode all prompts plainly as well")
    parser.add_argument("--speed", type=int, default=20, help="sound prompts to measure speed on")
    parser.add_argument("--repeats", type=int, default=3, help="of the measurement of speed")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    args = parser.parse_args()

    # The first backend answers, both are timed.
    loaded = [load_target(args.target, backend=backend, threads="auto") for backend in BACKENDS]
    drafters = [load_drafter(args.drafter, target=target) for target in loaded]
    pairs = [
        (
            Engine(target, drafter, drafting=Drafting(block_size)),
            Engine(target, load_drafter("none", target=target), max_batch_size=64),
        )
        for target, drafter, block_size in zip(loaded, drafters, BACKENDS.values(), strict=True)
    ]
    drafted, plain = Engine(loaded[0], drafters[0]), pairs[0][1]
    params = SamplingParams(args.max_new_tokens)
    figures = {}
    for name in args.sets:
        with (args.data / f"prompts/{name}.jsonl").open(encoding="utf-8") as file:
            prompts = [json.loads(line)["turns"][0] for line in file][: args.limit]
        began = time.time()
        completions = [drafted.generate([prompt], params)[0] for prompt in prompts]
        sound = [c.stats for c in completions if not loops(c.token_ids)]
        together = merge(sound)
        figure = {
            "prompts": len(prompts),
            "tau": round(together.tau, 3),
            "tau_mean_over_answers": round(sum(s.tau for s in sound) / len(sound), 3),
            "acceptance_by_position": [round(share, 3) for share in together.acceptance_by_position],
            "ended_by_themselves": round(sum(c.finish_reason == "stop" for c in completions) / len(prompts), 4),
            "looping": round(1 - len(sound) / len(prompts), 4),
            "mean_tokens": round(sum(len(c.token_ids) for c in completions) / len(prompts), 1),
            "seconds": round(time.time() - began, 1),
        }
        if not args.skip_plain:
            reference = plain.generate(prompts, params)
            same = sum(a.token_ids == b.token_ids for a, b in zip(completions, reference, strict=True))
            figure["identical_to_plain"] = same
        if args.speed:
            chosen = [p for p, c in zip(prompts, completions, strict=True) if not loops(c.token_ids)][: args.speed]
            figure["speed_prompts"], figure["repeats"] = len(chosen), args.repeats
            rates = speeds([engine for pair in pairs for engine in pair], chosen, params, args.repeats)
            for backend, drafted_rate, plain_rate in zip(BACKENDS, rates[::2], rates[1::2], strict=True):
                figure[backend] = {
                    "tokens_per_second_plain": round(plain_rate, 1),
                    "tokens_per_second_drafted": round(drafted_rate, 1),
                    "speedup": round(drafted_rate / plain_rate, 2),
                }
        answers = args.data / f"prompts/{name}_test_with_answers.jsonl"
        if answers.is_file():
            with answers.open(encoding="utf-8") as file:
                gold = [json.loads(line)["answer"].split("####")[-1].strip().replace(",", "") for line in file]
            right = sum(answer_of(c.text) == g for c, g in zip(completions, gold, strict=False))
            figure["right_answers"] = round(right / len(prompts), 4)
        figures[name] = figure
        print(name, json.dumps(figure, indent=2), flush=True)
        for prompt, completion in list(zip(prompts, completions, strict=True))[:3]:
            print(f"--- {prompt}\n>>> {completion.text}  [tau {completion.tau:.2f}, {completion.finish_reason}]")
    if args.out:
        report = {"max_new_tokens": args.max_new_tokens, "sets": figures}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
