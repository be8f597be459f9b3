"""Turn prompts and responses into data folders for `blockdraft train` and `blockdraft hidden-states`.

One task in fifty goes to `validation/`, the others to `data/`. Run it again to add what has come since.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from chats import ChatTokens
from prompts import read_lines
from shards import read_shards

from blockdraft import load_target
from blockdraft.targets.fingerprint import target_fingerprint
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

VALIDATION = 50  # one task of so many
COPIES = ("edit", "repair")  # kinds whose responses repeat their prompts, which prompt lookup drafts
FEW = 4  # `--dense` keeps one task of so many of these, and of those with long prompts


def is_validation(task: str) -> bool:
    """Return whether the task with this id is held out."""
    return record_number(task) % VALIDATION == 0


def record_number(task: str) -> int:
    return int(task[:15], 16)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--prompts", type=Path, default=Path("build/qwen2.5-coder/prompts.jsonl"))
    parser.add_argument("--responses", type=Path, default=Path("build/qwen2.5-coder/responses"))
    parser.add_argument("--out", type=Path, default=Path("build/qwen2.5-coder"))
    parser.add_argument(
        "--dense",
        action="store_true",
        help="leave out most copies, and most responses that are shorter than their prompts, to train in less time",
    )
    args = parser.parse_args(words)

    target = load_target(args.target)
    assert target.tokenizer is not None
    chats = ChatTokens(target.tokenizer)
    tasks = {task["id"]: task for task in read_lines(args.prompts)}
    lines = [line for line in read_shards(args.responses) if "turns" in line and line["id"] in tasks]
    written_by = {"writer": "target", "author": target_fingerprint(target), "mode": "greedy, some sampled"}
    identity = {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": written_by}
    for name, validation in (("data", False), ("validation", True)):
        writer = DataWriter(args.out / name, identity)
        writer.begin()
        for line in lines:
            record = record_number(line["id"])
            if is_validation(line["id"]) != validation or record in writer.done:
                continue
            document = chats.document(tasks[line["id"]], line)
            short = 2 * int(document.supervised.sum()) < len(document.tokens)
            few = args.dense and not validation and (short or line["kind"] in COPIES)
            if not (few and record // VALIDATION % FEW):
                writer.add(record, [document])
        print(name, writer.finish()["counts"])


if __name__ == "__main__":
    main()
