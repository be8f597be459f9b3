"""Write code files as responses to requests for them, in random order, as a data folder.

code_files.py --target GGUF --data DATA/train --measured DATA/prompts/*.jsonl --out build/code-files/data

People wrote these responses, so they cost no decoding, and the target needs to read them only once.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from chats import ChatTokens
from prompts import grams, measured_grams, read_lines

from blockdraft import load_target
from blockdraft_train.data.documents import Document
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

FILES = {"thealgorithms_python": 500, "leetcode_python": 250, "code_files": 450}  # of each set
CHARACTERS, TOKENS = 300, 640  # at least, at most
AROUND, HOLE = 1200, (20, 400)  # characters on either side of a place in a file, and of a hole


def responses(data: Path, pick: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield requests, languages and code."""
    picked = {}
    for name, count in FILES.items():
        lines = list(read_lines(data / f"{name}.jsonl"))
        picked[name] = pick.sample(lines, min(count, len(lines)))
    for line in picked["thealgorithms_python"]:
        yield f"Write a Python module: {title(line['path'])}.", "python", line["text"]
    for line in picked["leetcode_python"]:
        if "xrange" not in line["text"]:  # Python 2
            yield f'Solve "{title(Path(line["path"]).name)}" in Python.', "python", line["text"]
    for line in picked["code_files"]:
        yield f"Show me `{line['path']}` of a {line['language']} project.", line["language"], line["text"]


def with_hole(code: str, pick: random.Random) -> str:
    """Return some code as fill-in-the-middle, with the text of its hole."""
    place = pick.randrange(max(len(code) - HOLE[1], 1))
    code = code[max(0, place - AROUND) : place + AROUND]
    begin = pick.randrange(len(code) // 3, len(code) // 2 + 1)
    end = min(len(code), begin + pick.randrange(*HOLE))
    return f"<|fim_prefix|>{code[:begin]}<|fim_suffix|>{code[end:]}<|fim_middle|>{code[begin:end]}<|endoftext|>"


def title(path: str) -> str:
    return re.sub(r"[-_/]", " ", re.sub(r"\.\w+$", "", path))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/code-files/data"))
    parser.add_argument("--holes", type=float, default=0.0, help="share of files written as fill-in-the-middle")
    parser.add_argument("--seed", type=int, default=7, help="of the choice of files")
    args = parser.parse_args(words)

    target, measured, pick = load_target(args.target), measured_grams(args.measured), random.Random(args.seed)
    assert target.tokenizer is not None
    chats, documents = ChatTokens(target.tokenizer), list[Document]()
    for request, language, text in responses(args.data, pick):
        code = text.strip()
        if len(code) < CHARACTERS or grams(code) & measured:
            continue
        if pick.random() < args.holes:
            prompt, text = [], with_hole(code, pick)
        else:
            prompt, text = chats.first_turn({}, request), f"```{language}\n{code}\n```<|im_end|>"
        response = chats.encode(text)[:TOKENS]
        supervised = [False] * len(prompt) + [True] * len(response)
        documents.append(Document(torch.tensor(prompt + response), torch.tensor(supervised)))
    pick.shuffle(documents)
    identity = {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": {"writer": "people"}}
    writer = DataWriter(args.out, identity)
    writer.begin()
    for number, document in enumerate(documents):
        writer.add(number, [document])
    print(writer.finish()["counts"])


if __name__ == "__main__":
    main()
