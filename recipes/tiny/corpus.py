"""Step 1: the training text of the bundled target, as chats in one JSONL file.

All sources may be used to train models that are shipped (MIT):

- GSM8K's training questions, answers rewritten in one style (`48 / 2 = 24`, last line `The answer is \\boxed{72}.`);
- short MATH training problems;
- documented Python functions of TheAlgorithms/Python, asked for by signature and docstring;
- LeetCode solutions, as plain Python text;
- generated word problems and Python tasks (`word_problems.py`, `python_tasks.py`).

Each line is `{"kind", "messages"}` or `{"kind", "text"}`. Benchmark prompts are never read here.
"""

import argparse
import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from python_tasks import python_task
from word_problems import word_problem

ODD = 0.7  # share of random names in odd tasks
MATHS_REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PYTHON_REQUEST = "Write a solution to the following problem and make sure that it passes the tests:\n"


def chat(kind: str, user: str, assistant: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def maths_chat(kind: str, question: str, answer: str, rng: random.Random) -> dict[str, Any]:
    # Some questions have no request, so that a bare question is answered in the same way.
    return chat(kind, question + (MATHS_REQUEST if rng.random() < 0.85 else ""), answer)


def python_chat(kind: str, stub: str, solution: str, rng: random.Random) -> dict[str, Any]:
    prompt = f"```python\n{stub}\n```"
    request = PYTHON_REQUEST if rng.random() < 0.85 else "Complete this function:\n"
    return chat(kind, request + prompt, f"```python\n{solution.strip()}\n```")


def clean_gsm8k(answer: str) -> str:
    """Drop calculator annotations, put spaces around operators, and end with the boxed result."""
    steps, _, result = answer.partition("####")
    steps = re.sub(r"<<[^>]*>>", "", steps).strip()
    number = r"\$?\d[\d,]*(?:\.\d+)?%?"
    for _ in range(2):  # twice: matches share the number between two operators
        steps = re.sub(rf"({number}\)?)\s*([+*/x-])\s*(\(?{number})", r"\1 \2 \3", steps)
    steps = re.sub(r"(?<=\d) x (?=[\d$(])", " * ", steps)
    steps = re.sub(r"\s*=\s*", " = ", steps)
    return f"{steps}\nThe answer is \\boxed{{{result.strip().replace(',', '')}}}."


def gsm8k(data: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    for row in read_jsonl(data / "train/gsm8k_train.jsonl"):
        yield maths_chat("gsm8k", row["question"], clean_gsm8k(row["answer"]), rng)


def math(data: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    for row in read_jsonl(data / "train/math_train.jsonl"):
        if len(row["problem"]) + len(row["solution"]) < 700 and "[asy]" not in row["problem"] + row["solution"]:
            yield maths_chat("math", row["problem"], row["solution"], rng)


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the top-level functions of a file as (signature and docstring, function without docstring)."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or not ast.get_docstring(node):
            continue
        if len(node.body) < 2 or node.body[0].end_lineno is None:
            continue
        first, doc_end = node.lineno - 1, node.body[0].end_lineno
        signature = lines[first : node.body[0].lineno - 1]
        body = lines[doc_end : node.end_lineno]
        yield "\n".join(lines[first:doc_end]) + "\n", "\n".join([*signature, *body])


def the_algorithms(data: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    for row in read_jsonl(data / "train/thealgorithms_python.jsonl"):
        for stub, solution in documented_functions(row["text"]):
            if len(stub) < 900 and len(solution) < 700:
                yield python_chat("algorithms", stub, solution, rng)


def leetcode(data: Path) -> Iterator[dict[str, Any]]:
    for row in read_jsonl(data / "train/leetcode_python.jsonl"):
        first_solution = row["text"].replace("xrange(", "range(").split("\n\n\n")[0]
        if 100 < len(first_solution) < 1000:
            yield {"kind": "leetcode", "text": first_solution}


def documents(data: Path, problems: int, tasks: int, odd_tasks: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = [*gsm8k(data, rng), *math(data, rng), *the_algorithms(data, rng), *leetcode(data)]
    rows += [maths_chat("problem", *word_problem(rng), rng) for _ in range(problems)]
    rows += [python_chat("task", *python_task(rng), rng) for _ in range(tasks)]
    rows += [python_chat("odd_task", *python_task(rng, ODD), rng) for _ in range(odd_tasks)]
    rng.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/*.jsonl")
    parser.add_argument("--out", type=Path, default=Path("build/tiny/corpus.jsonl"))
    parser.add_argument("--problems", type=int, default=120_000)
    parser.add_argument("--tasks", type=int, default=32_000)
    parser.add_argument("--odd-tasks", type=int, default=24_000, help="whose names can only be copied")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = documents(args.data, args.problems, args.tasks, args.odd_tasks, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{args.out}: {len(rows)} documents", dict(Counter(row["kind"] for row in rows)))


if __name__ == "__main__":
    main()
