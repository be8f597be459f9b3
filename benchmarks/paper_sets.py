"""Write the prompt sets of the DFlash paper (arXiv 2602.06036) as files for `blockdraft bench --prompts`.

    python -m benchmarks.paper_sets build/paper
    blockdraft bench --target MODEL --drafter DRAFTER --prompts build/paper/gsm8k.jsonl --methods none,chain

Sets, prompts, their order and numbers are those of the authors' benchmark (z-lab/dflash, `model/utils.py` and
`run_benchmark.sh` of its first release). `blockdraft bench` asks the first turn of MT-Bench only, and leaves
repetitive outputs out of tau and speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets  # type: ignore[import-untyped]
import numpy

Record = Mapping[str, Any]
SEED = 0  # of the order of a set, whose first prompts are used
STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
LIVE_CODE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
LIVE_CODE_FILES = tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6))


class PaperSet(NamedTuple):
    """A set of prompts.

    Attributes:
        hub: Name of the dataset on the hub.
        split: Its split.
        turns: Returns the user's turns of a record.
        count: Maximum number of prompts.
        subset: Its subset, if there are several.
        files: Files of a dataset that the `datasets` library cannot open by name.
    """

    hub: str
    split: str
    turns: Callable[[Record], Sequence[str]]
    count: int = 128
    subset: str | None = None
    files: tuple[str, ...] = ()

    def load(self) -> Iterable[Record]:
        if self.files:
            files = [f"hf://datasets/{self.hub}/{file}" for file in self.files]
            return datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        return datasets.load_dataset(self.hub, self.subset, split=self.split, streaming=True)

    def prompts(self, records: Iterable[Record]) -> list[Sequence[str]]:
        """Return the turns of the prompts to measure: shuffled as by `datasets`, unless all are taken."""
        prompts = [self.turns(record) for record in records]
        if len(prompts) <= self.count:
            return prompts
        return [prompts[i] for i in numpy.random.default_rng(SEED).permutation(len(prompts))[: self.count]]


def _live_code(record: Record) -> Sequence[str]:
    starter = record.get("starter_code")
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        LIVE_CODE,
        f"### Question:\n{record['question_content']}",
        f"### Format: {how}\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


def _human_eval(record: Record) -> Sequence[str]:
    request = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{request}\n```python\n{record['prompt']}\n```"]


def _alpaca(record: Record) -> Sequence[str]:
    given = record.get("input")
    return [f"{record['instruction']}\n\nInput:\n{given}" if given else record["instruction"]]


def _problem(record: Record) -> Sequence[str]:
    return [f"{record['problem']}\n{STEPS}"]


SETS = {
    "gsm8k": PaperSet("openai/gsm8k", "test", lambda record: [f"{record['question']}\n{STEPS}"], subset="main"),
    "math500": PaperSet("HuggingFaceH4/MATH-500", "test", _problem),
    "aime24": PaperSet("HuggingFaceH4/aime_2024", "train", _problem, 30),
    "aime25": PaperSet("MathArena/aime_2025", "train", _problem, 30),
    "humaneval": PaperSet("openai/openai_humaneval", "test", _human_eval, 164),
    "mbpp": PaperSet("google-research-datasets/mbpp", "test", lambda record: [record["prompt"]], subset="sanitized"),
    "livecodebench": PaperSet("livecodebench/code_generation_lite", "test", _live_code, files=LIVE_CODE_FILES),
    "mt-bench": PaperSet("HuggingFaceH4/mt_bench_prompts", "train", lambda record: record["prompt"], 80),
    "alpaca": PaperSet("tatsu-lab/alpaca", "train", _alpaca),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the files, one for each set")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.sets:
        prompts = SETS[name].prompts(SETS[name].load())
        lines = [json.dumps({"turns": list(turns)}, ensure_ascii=False) + "\n" for turns in prompts]
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
