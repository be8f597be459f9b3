"""Hidden states of responses, kept while they are decoded, so that training needs no second pass over them.

recording.py --target GGUF --recorded build/qwen2.5-coder/recorded --out build/recorded

Run `responses.py --record DIR` first. This command packs what it recorded into `OUT/data` and `OUT/hidden-states`, for
`--data` and `--hidden-states` of `blockdraft train`. `--also DIR` adds the documents of `DIR/data` with the states in
`DIR/hidden-states`.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft import load_target
from blockdraft.engine import Request
from blockdraft.engine.request import Recorder
from blockdraft.targets import Target, target_fingerprint
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.hidden_states import plan_hidden_states, read_hidden_states
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

FILE_TOKENS = 8192
CLOSED = 64  # ended requests that are kept until their task ends


class SequenceRecorder(Recorder):
    """Keeps the tokens and hidden states of the last requests that ended.

    Attributes:
        closed: Tokens `[S]` int32 and hidden states `[S, m * H]` of each. The last token of an answer is left out, as
            nothing was decoded behind it.
    """

    def __init__(self, target_layers: Sequence[int]) -> None:
        self.target_layers = tuple(target_layers)
        self.closed: deque[tuple[Tensor, Tensor]] = deque(maxlen=CLOSED)

    def record(self, request: Request, hidden_states: Tensor | None) -> None:
        assert hidden_states is not None
        tokens = torch.tensor([*request.prompt, *request.token_ids[:-1]], dtype=torch.int32)
        self.closed.append((tokens, hidden_states[: len(tokens)].clone()))


class DocumentWriter:
    """Joins the documents of finished tasks with their recorded sequences, and writes them to files.

    Args:
        folder: Folder of the files.
        name: Beginning of their names, which no other process uses.
    """

    def __init__(self, recorder: SequenceRecorder, folder: Path, name: str) -> None:
        self._recorder, self._folder, self._name = recorder, folder, name
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{name}-*.safetensors")]
        self._number = max(numbers, default=-1) + 1
        self._waiting: list[Document] = []
        self._done: list[tuple[Document, Tensor]] = []

    def add(self, document: Document) -> None:
        """Add a finished task, whose sequence may end a little later."""
        self._waiting.append(document)
        self._join_waiting()
        if sum(len(document.tokens) for document, _ in self._done) >= FILE_TOKENS:
            self._write()

    def finish(self) -> None:
        """Write the rest, after all sequences have ended."""
        self._join_waiting()
        if self._done:
            self._write()

    def _join_waiting(self) -> None:
        closed = list(self._recorder.closed)
        self._waiting = [document for document in self._waiting[-CLOSED:] if not self._join(document, closed)]

    def _join(self, document: Document, closed: list[tuple[Tensor, Tensor]]) -> bool:
        for tokens, hidden_states in closed:
            length = min(len(tokens), len(document.tokens))
            # The last token of a sequence has no hidden states, as nothing was decoded behind it.
            if length >= len(document.tokens) - 1 and bool((document.tokens[:length] == tokens[:length]).all()):
                cut = Document(document.tokens[:length], document.supervised[:length])
                self._done.append((cut, hidden_states[:length]))
                return True
        return False

    def _write(self) -> None:
        documents, hidden_states = zip(*self._done, strict=True)
        path = self._folder / f"{self._name}-{self._number:05}.safetensors"
        tensors = {
            "lengths": torch.tensor([len(document.tokens) for document in documents]),
            "tokens": torch.cat([document.tokens for document in documents]),
            "supervised": torch.cat([document.supervised for document in documents]),
            "hidden_states": torch.cat(hidden_states),
        }
        save_file(tensors, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        self._number, self._done = self._number + 1, []


def read_recorded(paths: Sequence[Path]) -> Iterator[tuple[Document, Tensor]]:
    """Yield the document and the hidden states `[S, m * H]` of each recorded task."""
    for path in paths:
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        parts = (tensors[name].split(lengths) for name in ("tokens", "supervised", "hidden_states"))
        for tokens, supervised, hidden_states in zip(*parts, strict=True):
            yield Document(tokens, supervised), hidden_states


def read_packed(folder: Path) -> Iterator[tuple[Document, Tensor]]:
    """Yield the documents of `folder/data` with their hidden states of `folder/hidden-states`."""
    yield from zip(read_data(folder / "data"), read_hidden_states(folder / "hidden-states"), strict=True)


def pack(
    target: Target, target_layers: Sequence[int], paths: Sequence[Path], also: Sequence[Path], out: Path
) -> dict[str, Any]:
    """Write recorded tasks, and further documents, as a data folder and its hidden states. Return its counts."""

    def documents() -> Iterator[tuple[Document, Tensor]]:
        return chain(read_recorded(paths), *map(read_packed, also))

    assert target.tokenizer is not None
    written_by = {"writer": "target", "author": target_fingerprint(target), "mode": "greedy, some sampled"}
    identity = {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": written_by}
    writer = DataWriter(out / "data", identity)
    writer.begin()
    for number, (document, _) in enumerate(documents()):
        writer.add(number, [document])
    counts: dict[str, Any] = writer.finish()["counts"]
    data = read_data(out / "data")
    cache = plan_hidden_states(out / "hidden-states", target, data, target_layers, HiddenStateSettings())
    cache.write_from(hidden_states for _, hidden_states in documents())
    return counts


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--recorded", type=Path, default=Path("build/qwen2.5-coder/recorded"))
    parser.add_argument("--also", type=Path, nargs="*", default=[], metavar="DIR", help="folders of further documents")
    parser.add_argument("--target-layers", default="7,16,26,28")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    layers = [int(layer) for layer in args.target_layers.split(",")]
    recorded = sorted(args.recorded.glob("*.safetensors"))
    print(pack(load_target(args.target), layers, recorded, args.also, args.out))


if __name__ == "__main__":
    main()
