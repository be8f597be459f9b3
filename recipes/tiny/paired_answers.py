"""Data of benchmarks/train_ablations.py: the same prompts with the target's answers and with their original ones.

The first answer of each GSM8K and TheAlgorithms prompt of the corpus is taken, greedy or sampled. Both files have
records {"prompt", "response"}, in the same order.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blockdraft import load_target

KINDS = ("gsm8k", "algorithms")


def pairs(corpus: Iterable[str], answers: Iterable[str]) -> Iterator[tuple[str, list[int], str]]:
    """Yield prompt, token ids of the target's answer, and the original answer, given the lines of both files."""
    originals: dict[str, str] = {}
    for line in corpus:
        row: dict[str, Any] = json.loads(line)
        if row["kind"] in KINDS:
            prompt, answer = (message["content"] for message in row["messages"])
            originals.setdefault(prompt, answer)
    for line in answers:
        row = json.loads(line)
        if "ids" in row and row["prompt"] in originals:  # absent where all answers looped
            yield row["prompt"], row["ids"], originals.pop(row["prompt"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/tiny/corpus.jsonl"))
    parser.add_argument("--answers", type=Path, default=Path("build/tiny/answers.jsonl"))
    parser.add_argument("--target", type=Path, default=Path("build/tiny/target"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny"), help="for written.jsonl and original.jsonl")
    args = parser.parse_args()

    tokenizer = load_target(args.target).tokenizer
    assert tokenizer is not None
    args.out.mkdir(parents=True, exist_ok=True)
    count = 0
    with (
        args.corpus.open(encoding="utf-8") as corpus,
        args.answers.open(encoding="utf-8") as answers,
        (args.out / "written.jsonl").open("w", encoding="utf-8") as written,
        (args.out / "original.jsonl").open("w", encoding="utf-8") as original,
    ):
        for prompt, ids, came_with in pairs(corpus, answers):
            for file, response in ((written, tokenizer.decode(ids, skip_special_tokens=True)), (original, came_with)):
                file.write(json.dumps({"prompt": prompt, "response": response}, ensure_ascii=False) + "\n")
            count += 1
    print(f"{count} prompts in {args.out}/written.jsonl and original.jsonl")


if __name__ == "__main__":
    main()
