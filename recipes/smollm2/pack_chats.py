"""Pack responses as training data: the decoded tokens, in folders that `blockdraft train` reads.

One task in fifty goes to `validation/`, the others to `data/`. Further responses are appended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from chats import documents
from prompts import PublicPrompts

from blockdraft import load_target
from blockdraft.targets.fingerprint import target_fingerprint
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

VALIDATION = 50  # of so many tasks one is for validation


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--answers", type=Path, default=Path("build/smollm2/answers.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"))
    args = parser.parse_args(words)

    target = load_target(args.target)
    tokenizer = target.tokenizer
    public = PublicPrompts(args.prompts)
    rows = [json.loads(line) for line in args.answers.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    written_by = {"writer": "target", "author": target_fingerprint(target), "mode": "greedy, sampled where it loops"}
    identity = {"tokenizer": tokenizer_fingerprint(tokenizer), "written_by": written_by}
    for name, validation in (("data", False), ("validation", True)):
        writer = DataWriter(args.out / name, identity)
        writer.begin()
        for row in rows:
            task = row["task"]
            if "turns" not in row or (task % VALIDATION == 0) != validation or task in writer.done:
                continue
            first = public.text(row["source"], row["line"]) if "sha" in row else None
            writer.add(task, list(documents(tokenizer, row, first)))
        print(name, writer.finish()["counts"])


if __name__ == "__main__":
    main()
