"""How many generated problems a target solves, by number of steps. Their seed is that of no corpus.

A problem is solved where the box at the end of the greedy answer holds its result. `--drafter` adds the drafter's tau
on these problems. `--tasks` adds the share of generated Python tasks, with usual names and with random ones, that the
target writes exactly as their solution.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import MATHS_REQUEST, ODD, python_chat
from python_tasks import python_task
from word_problems import word_problem

from blockdraft import Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine import loops, merge
from blockdraft.targets import Target
from blockdraft.types import Drafting

SEED = 20_000_003


def answer_of(text: str) -> str | None:
    """Return the number in the last box of a response."""
    _, box, rest = text.rpartition("\\boxed{")
    return rest.partition("}")[0].replace(",", "").replace("$", "") if box else None


def problems(count: int, known: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Return distinct new problems with their solutions."""
    rng, seen, found = random.Random(SEED), set(known), list[tuple[str, str]]()
    while len(found) < count:
        question, answer = word_problem(rng)
        if question not in seen:
            seen.add(question)
            found.append((question, answer))
    return found


def read_questions(corpus: Path) -> frozenset[str]:
    with corpus.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    questions = (row["messages"][0]["content"] for row in rows if row["kind"] == "problem")
    return frozenset(question.removesuffix(MATHS_REQUEST) for question in questions)


def solved(target: Target, count: int, corpus: Path | None) -> dict[str, Any]:
    """Return the shares of problems that the target solves greedily, without problems of the corpus."""
    asked = problems(count, read_questions(corpus) if corpus else frozenset())
    with Engine(target, max_batch_size=32) as engine:
        said = engine.generate([question + MATHS_REQUEST for question, _ in asked], SamplingParams(200))
    total, right = Counter[str](), Counter[str]()
    for (_, answer), completion in zip(asked, said, strict=True):
        steps = str(len(answer.splitlines()) - 1)
        total[steps] += 1
        right[steps] += answer_of(completion.text) == answer_of(answer)
    easy = sum(right[steps] for steps in "12") / sum(total[steps] for steps in "12")
    return {
        "problems": len(asked),
        "solved": {steps: round(right[steps] / total[steps], 3) for steps in sorted(total)},
        "solved_of_one_or_two_steps": round(easy, 3),
        "repetitive": round(sum(loops(completion.token_ids) for completion in said) / len(said), 4),
    }


def tau(target: Target, drafter: str, count: int, corpus: Path | None) -> float:
    """Return tau of a drafter on the same problems."""
    asked = problems(count, read_questions(corpus) if corpus else frozenset())
    with Engine(target, load_drafter(drafter, target=target), 16, Drafting(None)) as engine:
        said = engine.generate([question + MATHS_REQUEST for question, _ in asked], SamplingParams(200))
    return merge(completion.stats for completion in said).tau


def python_tasks(count: int, odd: float, corpus: Path | None) -> list[tuple[str, str]]:
    """Return distinct Python tasks with their solutions, without tasks of the corpus.

    Args:
        odd: Share of names that are random.
    """
    known, asked = set[str](), list[tuple[str, str]]()
    if corpus:
        with corpus.open(encoding="utf-8") as file:
            rows = (json.loads(line) for line in file)
            known = {row["messages"][0]["content"] for row in rows if row["kind"] in ("task", "odd_task")}
    rng = random.Random(SEED)
    while len(asked) < count:
        task, solution = (
            message["content"] for message in python_chat("task", *python_task(rng, odd), rng)["messages"]
        )
        if task not in known:
            known.add(task)
            asked.append((task, solution))
    return asked


def written(engine: Engine, asked: Sequence[tuple[str, str]]) -> float:
    """Return the share of Python tasks whose greedy response is their solution."""
    said = engine.generate([task for task, _ in asked], SamplingParams(200))
    same = (completion.text.strip() == solution for completion, (_, solution) in zip(said, asked, strict=True))
    return sum(same) / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=None, help="default: the bundled target")
    parser.add_argument("--corpus", type=Path, default=None, help="corpus whose problems are left out")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--drafter", default=None, help="drafter whose tau is measured too; bundled is the bundled one")
    parser.add_argument("--tasks", type=int, default=0, help="number of Python tasks of each sort to ask as well")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    args = parser.parse_args()
    target = load_target(args.target, threads="auto")
    figures = solved(target, args.count, args.corpus)
    if args.drafter:
        figures["tau"] = round(tau(target, args.drafter, args.count, args.corpus), 2)
    if args.tasks:
        with Engine(target, max_batch_size=32) as engine:
            shares = [round(written(engine, python_tasks(args.tasks, odd, args.corpus)), 3) for odd in (0.0, ODD)]
        figures["tasks_as_their_solution"] = dict(zip(("usual names", "odd names"), shares, strict=True))
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
