"""Mix documents of several data folders, in random order, as one data folder.

mix.py --target GGUF --data build/dense/data build/code/data --tokens 320000 80000 --out build/mixed/data
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from blockdraft import load_target
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter


def mix(folders: list[Path], tokens: list[int], seed: int) -> list[Document]:
    """Return whole documents of each folder, drawn until they have this number of tokens, in random order."""
    pick, documents = random.Random(seed), list[Document]()
    for folder, wanted in zip(folders, tokens, strict=True):
        data = read_data(folder)
        for index in pick.sample(range(len(data)), len(data)):
            if wanted > 0:
                documents.append(data[index])
                wanted -= len(data[index].tokens)
    pick.shuffle(documents)
    return documents


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR", help="data folders")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, metavar="N", help="of each folder")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)

    if len(args.tokens) != len(args.data):
        parser.error(f"--tokens needs a number for each folder of --data, {len(args.data)}, got {len(args.tokens)}")
    target = load_target(args.target)
    assert target.tokenizer is not None
    written_by = {"writer": "people"}  # some are not the target's own
    writer = DataWriter(args.out, {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": written_by})
    writer.begin()
    for number, document in enumerate(mix(args.data, args.tokens, args.seed)):
        writer.add(number, [document])
    print(writer.finish()["counts"])


if __name__ == "__main__":
    main()
