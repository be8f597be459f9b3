"""Step 6: the target's answers as training data. Token ids are kept as they were decoded."""

import argparse
import fileinput
import json
from pathlib import Path

import torch

from blockdraft import load_target
from blockdraft_train.data.documents import Document
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

MIN_TOKENS = 4  # of an answer that is kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, nargs="+", default=[Path("build/tiny/answers.jsonl")])
    parser.add_argument("--target", type=Path, default=Path("build/tiny/target"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/data"))
    args = parser.parse_args()

    tokenizer = load_target(args.target).tokenizer
    assert tokenizer is not None
    origin = {"tokenizer": tokenizer_fingerprint(tokenizer), "answers": [file.name for file in args.answers]}
    writer = DataWriter(args.out, origin)
    writer.begin()
    with fileinput.input(args.answers, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            if number in writer.done or len(row.get("ids", ())) < MIN_TOKENS:
                continue
            chat = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            tokens = torch.tensor(prompt + row["ids"])
            writer.add(number, [Document(tokens, torch.arange(len(tokens)) >= len(prompt))])
    print(writer.finish()["counts"])


if __name__ == "__main__":
    main()
