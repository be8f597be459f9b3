"""Steps 4 to 6: the target's own answers to training prompts. Resumes where it stopped.

Each prompt is answered greedily, and some once more by sampling. A repetitive output is replaced by the first sampled
one that does not repeat; the target later learns from that one and unlearns the other. If all repeat, the prompt has no
response. GSM8K and TheAlgorithms prompts are those of the corpus; word problems and Python tasks are generated anew.

`--hard` takes only GSM8K and TheAlgorithms prompts, whose answers are hard to predict: as they are, with sampling,
since the target knows their greedy answers by heart, and with other numbers, which makes new prompts of them.
"""

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from corpus import ODD, maths_chat, python_chat
from python_tasks import python_task
from word_problems import word_problem

from blockdraft import Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine import Chunk, Request, loops

FROM_CORPUS = {"gsm8k": 7500, "algorithms": 800}
DRAWN = {"problem": 6000, "task": 4000, "odd_task": 2000}
WITH_OTHER_NUMBERS = {"gsm8k": 1, "algorithms": 3}  # variants of each prompt
NUMBER = re.compile(r"(?<![\w.,])[1-9]\d*(?![\w.,]*\d)")  # not part of a name, a fraction or a number with commas


def with_other_numbers(prompt: str, rng: random.Random) -> str:
    """Replace each integer n of a prompt by a random one between n // 2 and 2 n + 3."""
    return NUMBER.sub(lambda found: str(rng.randint(max(1, int(found[0]) // 2), 2 * int(found[0]) + 3)), prompt)


def hard_prompts(corpus: Path, seed: int, sampled_share: float) -> list[tuple[str, str, bool]]:
    """Yield prompts as `training_prompts` does, of the kinds whose answers are hard to predict."""
    rng = random.Random(seed)
    prompts, asked = list[tuple[str, str, bool]](), set[str]()
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["kind"] not in WITH_OTHER_NUMBERS:
                continue
            kind, prompt = row["kind"], row["messages"][0]["content"]
            prompts.append((kind, prompt, True))
            for _ in range(WITH_OTHER_NUMBERS[kind]):
                other = with_other_numbers(prompt, rng)
                if other in asked:  # a prompt without numbers has no variants
                    continue
                asked.add(other)
                prompts.append((f"{kind}_other", other, False))
                if rng.random() < sampled_share:
                    prompts.append((f"{kind}_other", other, True))
    rng.shuffle(prompts)
    return prompts


def training_prompts(corpus: Path, seed: int, sampled_share: float) -> list[tuple[str, str, bool]]:
    """Yield (kind, user message, whether to sample) in a fixed random order."""
    rng = random.Random(seed)
    prompts, taken = [], Counter[str]()
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if taken[row["kind"]] < FROM_CORPUS.get(row["kind"], 0):
                taken[row["kind"]] += 1
                prompts.append((row["kind"], row["messages"][0]["content"]))
    makers = (
        ("problem", word_problem, maths_chat),
        ("task", python_task, python_chat),
        ("odd_task", partial(python_task, odd=ODD), python_chat),
    )
    for kind, make, chat in makers:
        for _ in range(DRAWN[kind]):
            prompts.append((kind, chat(kind, *make(rng), rng)["messages"][0]["content"]))
    all_prompts = [(kind, prompt, False) for kind, prompt in prompts]
    all_prompts += [(kind, prompt, True) for kind, prompt in prompts if rng.random() < sampled_share]
    rng.shuffle(all_prompts)
    return all_prompts


def answers(
    engine: Engine, prompts: dict[int, str], params: Callable[[int, int], SamplingParams], again: int
) -> Iterator[tuple[int, list[int], list[list[int]]]]:
    """Answers as they come. All prompts are submitted at once, and those whose output is repetitive again.

    Args:
        prompts: Prompts by number.
        params: Function of a prompt's number and its number of earlier answers.
        again: Most times that a prompt is asked again.

    Yields:
        Number of a prompt, tokens of its last answer, which may loop, and tokens of the earlier ones, which do.
    """
    ended: SimpleQueue[int] = SimpleQueue()
    requests: dict[int, Request] = {}
    before: dict[int, list[list[int]]] = {number: [] for number in prompts}

    def ask(number: int) -> None:
        def listen(chunk: Chunk) -> None:
            if chunk.finish_reason is not None:
                ended.put(number)

        requests[number] = engine.submit(prompts[number], params(number, len(before[number])), listen)

    for number in prompts:
        ask(number)
    while requests:
        number = ended.get()
        ids = requests.pop(number).result().checked().token_ids
        if loops(ids) and len(before[number]) < again:
            before[number].append(ids)
            ask(number)
        else:
            yield number, ids, before[number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/tiny/corpus.jsonl"))
    parser.add_argument("--target", type=Path, default=Path("build/tiny/target"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/answers.jsonl"))
    parser.add_argument("--max-new-tokens", type=int, default=176)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--sampled-share", type=float, default=0.5, help="share of the prompts that are answered once more"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--hard", action="store_true", help="only prompts whose answers are hard to predict")
    parser.add_argument("--again", type=int, default=4, help="most times to ask again where an output repeats")
    parser.add_argument("--limit", type=int, default=None, help="most prompts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    target = load_target(args.target)
    engine = Engine(target, load_drafter("none", target=target), max_batch_size=args.batch)
    prompts = (hard_prompts if args.hard else training_prompts)(args.corpus, args.seed, args.sampled_share)
    if args.limit is not None and args.limit > len(prompts):
        parser.error(
            f"--limit is {args.limit}, and there are {len(prompts)} prompts; lower it, or generate more (DRAWN)"
        )
    prompts = prompts[: args.limit]
    done: set[int] = set()
    if args.out.exists():  # an interrupted run may have cut the last line
        whole = args.out.read_bytes().rpartition(b"\n")[0].splitlines(keepends=True)
        args.out.write_bytes(b"".join(whole).rstrip(b"\n") + b"\n" if whole else b"")
        done = {json.loads(line)["number"] for line in whole}
    began, tokens, looping, mended = time.time(), 0, 0, 0
    left = {number: prompts[number][1] for number in sorted(set(range(len(prompts))) - done)}

    def params(number: int, before: int) -> SamplingParams:
        temperature = args.temperature if prompts[number][2] or before else 0.0
        return SamplingParams(args.max_new_tokens, temperature, seed=(args.seed + 100 * before) * 1_000_003 + number)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with engine, args.out.open("a", encoding="utf-8") as file:
        for answered, (number, ids, before) in enumerate(answers(engine, left, params, args.again), 1):
            tokens += len(ids)
            kind, prompt, _ = prompts[number]
            row: dict[str, object] = {"number": number, "kind": kind, "prompt": prompt}
            if before:
                row["looped"] = before[0]  # the stage `unlearn` reads it
            if loops(ids):
                looping += 1
            else:
                row |= {"temperature": params(number, len(before)).temperature, "ids": ids}
                mended += bool(before)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if answered % 100 == 0:
                file.flush()
                spent = time.time() - began
                seconds = spent / answered * (len(left) - answered)
                print(
                    f"{len(done) + answered}/{len(prompts)} answers, {tokens} tokens, {tokens / spent:.0f} tokens/s, "
                    f"{looping} looping, {mended} not looping when asked again, {seconds / 60:.0f} min left",
                    flush=True,
                )


if __name__ == "__main__":
    main()
