"""Prepare what `on_gpu.py` needs: documents and prompts as tokens, and the target's file in parts that can be carried.

gpu_inputs.py --target GGUF --data DATA/train --measured DATA/prompts/*.jsonl --out build/gpu

- `documents.npz`: responses of `responses.py`, and code files as responses.
- `prompts.json.gz`: prompts without a response, in the order of the list, and openings that the target continues.
- `target.00.gz`, `target.01.gz`, ...: the GGUF file. Rows of its embedding and head whose tokens occur in none of the
  above are zero, so they are never drawn; `on_gpu.py` joins the parts.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from chats import ChatTokens
from code_files import title
from documents import COPIES, FEW, VALIDATION, is_validation, record_number
from prompts import grams, measured_grams, read_lines
from responses import FIM_TOKENS, RESPONSE_TOKENS
from shards import read_shards

from blockdraft.targets import load_target_text
from blockdraft_train.data.documents import Document

LONGEST = 1024  # tokens of a document
LONGEST_PROMPT = 600  # tokens
SHORTEST = 300  # characters of a code file
BLOCK = 1 << 24  # bytes that are compressed at a time
VOCABULARY = ("token_embd.weight", "output.weight")


def response_documents(chats: ChatTokens, tasks: dict[str, Any], responses: Path) -> Iterator[Document]:
    """Yield the documents that `documents.py --dense` writes, with the code around holes supervised."""
    for line in read_shards(responses):
        if "turns" not in line or line["id"] not in tasks or is_validation(line["id"]):
            continue
        document = chats.document(tasks[line["id"]], line)
        if "text" in tasks[line["id"]]:
            document.supervised[:] = True
        short = 2 * int(document.supervised.sum()) < len(document.tokens)
        if not (short or line["kind"] in COPIES) or record_number(line["id"]) // VALIDATION % FEW == 0:
            yield document


def code_documents(chats: ChatTokens, data: Path, measured: set[tuple[str, ...]]) -> Iterator[Document]:
    """Yield code files as responses to a request. What does not fit follows as documents without a request."""
    requests = {
        "thealgorithms_python": lambda line: (f"Write a Python module: {title(line['path'])}.", "python"),
        "leetcode_python": lambda line: (f'Solve "{title(Path(line["path"]).name)}" in Python.', "python"),
        "code_files": lambda line: (f"Show me `{line['path']}` of a {line['language']} project.", line["language"]),
    }
    for name, request in requests.items():
        for line in read_lines(data / f"{name}.jsonl"):
            code = line["text"].strip()
            if len(code) < SHORTEST or "xrange" in code or grams(code) & measured:
                continue
            text, language = request(line)
            prompt = chats.first_turn({}, text)
            tokens = prompt + chats.encode(f"```{language}\n{code}\n```<|im_end|>")
            for begin in range(0, len(tokens), LONGEST):
                part = torch.tensor(tokens[begin : begin + LONGEST])
                if len(part) > 64:
                    supervised = torch.ones(len(part), dtype=torch.bool)
                    supervised[: max(len(prompt) - begin, 0)] = False
                    yield Document(part, supervised)


def open_prompts(chats: ChatTokens, tasks: Sequence[dict[str, Any]], done: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the first turns of tasks without a response: `ids` to go on from, and what `on_gpu.py` does with it."""
    for task in tasks:
        if task["id"] in done or task["kind"] in COPIES or is_validation(task["id"]):
            continue
        entry = {"id": task["id"], "temperature": task.get("temperature", 0.0)}
        if "text" in task:
            entry |= {"ids": chats.encode(task["text"]), "tokens": FIM_TOKENS, "fim": True}
        elif "text" in task["turns"][0]:
            entry |= {"ids": chats.first_turn(task, task["turns"][0]["text"]), "tokens": RESPONSE_TOKENS}
        else:
            turn = task["turns"][0]
            entry |= {"ids": chats.opening(turn, []), "tokens": RESPONSE_TOKENS, "opening": turn["opening"]}
            entry |= {"stop": turn.get("stop", "\n\n"), "system": task.get("system"), "tools": task.get("tools")}
        if len(entry["ids"]) <= LONGEST_PROMPT:
            yield entry


def write_parts(target: Path, used: np.ndarray, out: Path, size: int) -> None:
    """Write the file in parts of at most `size` bytes, compressed, with unused rows of the vocabulary set to 0.

    Args:
        used: `[V]` bool; tokens of padding may be missing at its end.
    """
    contents = np.fromfile(target, dtype=np.uint8)
    for tensor in gguf.GGUFReader(target).tensors:
        if tensor.name in VOCABULARY:
            rows = contents[tensor.data_offset : tensor.data_offset + tensor.n_bytes].reshape(int(tensor.shape[1]), -1)
            rows[: len(used)][~used] = 0
            rows[len(used) :] = 0
    for file in out.glob("target.*.gz"):
        file.unlink()
    compressor = zlib.compressobj(1, wbits=31)
    compressed = bytearray()
    for begin in range(0, len(contents), BLOCK):
        compressed += compressor.compress(contents[begin : begin + BLOCK].tobytes())
    compressed += compressor.flush()
    for number, begin in enumerate(range(0, len(compressed), size)):
        (out / f"target.{number:02}.gz").write_bytes(compressed[begin : begin + size])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, type=Path, help="the GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--prompts", type=Path, default=Path("build/qwen2.5-coder/prompts.jsonl"))
    parser.add_argument("--responses", type=Path, default=Path("build/qwen2.5-coder/responses"))
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--most", type=int, default=20_000, help="most prompts")
    parser.add_argument("--part", type=int, default=60 << 20, help="most bytes of a part of the target's file")
    args = parser.parse_args(words)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_target_text(args.target).tokenizer
    assert tokenizer is not None
    chats, measured, tasks = ChatTokens(tokenizer), measured_grams(args.measured), read_lines(args.prompts)
    done = {line["id"] for line in read_shards(args.responses)}
    documents = list(response_documents(chats, {task["id"]: task for task in tasks}, args.responses))
    written = len(documents)
    documents += code_documents(chats, args.data, measured)
    prompts = list(itertools.islice(open_prompts(chats, tasks, done), args.most))
    random.Random(0).shuffle(documents)
    np.savez_compressed(
        args.out / "documents.npz",
        tokens=torch.cat([document.tokens for document in documents]).numpy().astype(np.int32),
        supervised=torch.cat([document.supervised for document in documents]).numpy(),
        lengths=np.array([len(document.tokens) for document in documents], dtype=np.int32),
    )
    with gzip.open(args.out / "prompts.json.gz", "wt", encoding="utf-8") as file:
        json.dump(prompts, file)
    used = np.zeros(len(tokenizer), dtype=bool)
    used[[token for token in tokenizer.all_special_ids if token < len(used)]] = True
    for ids in (*(document.tokens.numpy() for document in documents), *(prompt["ids"] for prompt in prompts)):
        used[ids] = True
    if args.target.is_file():
        write_parts(args.target, used, args.out, args.part)
    tokens = sum(len(document.tokens) for document in documents)
    print(
        f"{len(documents)} documents ({written} responses), {tokens} tokens; {len(prompts)} prompts; {used.sum()} rows"
    )


if __name__ == "__main__":
    main()
