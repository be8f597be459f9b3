"""Step 4: the target's own answers to training prompts, which the drafter learns from. Goes on where it stopped.

Most answers are greedy, some are sampled. Answers that fall into a loop are left out: a drafter gains nothing from
them. GSM8K and TheAlgorithms prompts are those of the corpus; word problems and Python tasks are drawn anew.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from corpus import maths_chat, python_chat
from measure import loops
from python_tasks import python_task
from word_problems import word_problem

from blockdraft import Engine, SamplingParams, load_drafter, load_target

FROM_CORPUS = {"gsm8k": 5000, "algorithms": 800}
DRAWN = {"problem": 500, "task": 1700}


def training_prompts(corpus: Path, seed: int) -> list[tuple[str, str]]:
    """(kind, user message) pairs in a fixed random order."""
    rng = random.Random(seed)
    prompts, taken = [], Counter[str]()
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if taken[row["kind"]] < FROM_CORPUS.get(row["kind"], 0):
                taken[row["kind"]] += 1
                prompts.append((row["kind"], row["messages"][0]["content"]))
    for kind, make, chat in (("problem", word_problem, maths_chat), ("task", python_task, python_chat)):
        for _ in range(DRAWN[kind]):
            prompts.append((kind, chat(kind, *make(rng), rng)["messages"][0]["content"]))
    rng.shuffle(prompts)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/tiny/corpus.jsonl"))
    parser.add_argument("--target", type=Path, default=Path("build/tiny/target"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/answers.jsonl"))
    parser.add_argument("--max-new-tokens", type=int, default=176)
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--sampled-share", type=float, default=0.15)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--limit", type=int, default=None, help="only so many prompts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    target = load_target(args.target)
    engine = Engine(target, load_drafter("none", target=target), max_batch_size=args.batch)
    prompts = training_prompts(args.corpus, args.seed)[: args.limit]
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    done = 0
    if args.out.exists():  # a batch ends with a line that names it; what follows the last one is an unfinished batch
        lines = args.out.read_text(encoding="utf-8").splitlines(keepends=True)
        ends = [i for i, line in enumerate(lines) if line.startswith('{"batch"')]
        done = len(ends)
        args.out.write_text("".join(lines[: ends[-1] + 1] if ends else []), encoding="utf-8")
    began, tokens, looping = time.time(), 0, 0
    for number in range(done, len(batches)):
        rng = random.Random(f"{args.seed}/{number}")
        params = [
            SamplingParams(
                args.max_new_tokens,
                temperature=args.temperature if rng.random() < args.sampled_share else 0.0,
                seed=rng.getrandbits(62),
            )
            for _ in batches[number]
        ]
        completions = engine.generate([prompt for _, prompt in batches[number]], params)
        with args.out.open("a", encoding="utf-8") as file:
            for (kind, prompt), param, completion in zip(batches[number], params, completions, strict=True):
                tokens += len(completion.token_ids)
                if loops(completion.token_ids):
                    looping += 1
                    continue
                row = {"kind": kind, "prompt": prompt, "temperature": param.temperature, "ids": completion.token_ids}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.write(json.dumps({"batch": number}) + "\n")
        spent = time.time() - began
        left = spent / (number + 1 - done) * (len(batches) - number - 1)
        print(
            f"batch {number + 1}/{len(batches)}: {tokens} tokens, {tokens / spent:.0f} tokens/s, "
            f"{looping} looping, {left / 60:.0f} min left",
            flush=True,
        )


if __name__ == "__main__":
    main()
