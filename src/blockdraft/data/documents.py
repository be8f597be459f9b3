"""Training data on disk: shards of tokens, mapped into memory when read, and their manifest `data.json`. `writer.py`
makes them.

A shard is a safetensors file that appears whole or not at all. It holds the documents of some source rows, and says
which rows these are and which were left out; so it records both the data and how far their making is.

    tokens, supervised   [T]      all documents one behind the other, int32 and bool
    offsets              [D + 1]  where each document begins, and the end
    rows, cut            [D]      the source row of each document; whether it was cut to the longest length allowed
    left_out             [K, 2]   rows that gave no document, and why: an index into `REASONS`

Each state that the folder has been in, one a shard and one whenever it was finished, has a fingerprint. The manifest
keeps them with their counts, so that who has read an earlier one can tell how much has come since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockdraft.data.folder import fingerprint, read_manifest
from blockdraft.errors import UsageError

FORMAT = 1
MANIFEST = "data.json"
LOOPS = "answer loops"
REASONS = ("no supervised token", LOOPS, "prompt too long")
SHARD_SECONDS = 120.0  # of work that a killed process loses at most


@dataclass(frozen=True)
class Document:
    """One conversation or text.

    Attributes:
        tokens: `[S]` int64.
        supervised: `[S]` bool; tokens that the drafter may learn to guess.
        cut: Whether it goes on in its source past the longest length allowed.
    """

    tokens: Tensor
    supervised: Tensor
    cut: bool = False


class TokenData(Sequence[Document]):
    """The documents of a data folder, in the order of their source, as they were when it was opened. From `read_data`.

    Attributes:
        folder: Where they lie.
        fingerprint: Of the documents and the tokenizer; the same whatever the shards are, if the data are finished.
        finished: Whether they are; else these are the documents of the shards there were.
        tokenizer: Fingerprint of the tokenizer that made the tokens; see `tokenizer_fingerprint`.
        lengths: Tokens of each document.
        manifest: What `data.json` holds.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[dict[str, Tensor]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint: str = manifest["fingerprint"] or ""
        self.finished: bool = manifest["finished"]
        self.tokenizer: str = manifest["tokenizer"]
        self._shards = shards
        # Rows come to an end in another order than they began in where the target answers many at a time.
        rows = torch.cat([shard["rows"] for shard in shards] or [torch.zeros(0, dtype=torch.int64)])
        places = [(number, i) for number, shard in enumerate(shards) for i in range(len(shard["rows"]))]
        self._places = [places[i] for i in rows.argsort(stable=True).tolist()]
        lengths = [shard["offsets"].diff().tolist() for shard in shards]
        self.lengths: list[int] = [lengths[number][i] for number, i in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, i = self._places[index]
        shard = self._shards[number]
        begin, end = shard["offsets"][i : i + 2].tolist()
        tokens, supervised = shard["tokens"][begin:end].long(), shard["supervised"][begin:end].clone()
        return Document(tokens, supervised, bool(shard["cut"][i]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.folder, self.manifest)  # another process maps the same files anew

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raises ValueError where the tokens are those of another tokenizer; None, of a target without one, passes."""
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.tokenizer:
            raise UsageError(
                f"{self.folder} was made with the tokenizer {self.tokenizer} and the target's is "
                f"{tokenizer_fingerprint(tokenizer)}; make the data anew with this target."
            )


def read_data(folder: str | Path, unfinished: bool = False) -> TokenData:
    """Open a data folder. Documents are read from disk when they are asked for.

    Args:
        unfinished: Take data that are still being made as well: the documents of the shards that there are now, which
            stay as they are when others come.

    Raises:
        ValueError: The folder is absent, unfinished or broken, or holds no supervised token.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    if manifest is None:
        raise UsageError(f"{folder / MANIFEST} does not exist; give a folder made by `blockdraft data`.")
    if not manifest["finished"] and not unfinished:
        raise UsageError(f"{folder} is unfinished; run the `blockdraft data` command that began it again.")
    if not manifest["finished"] and not manifest["counts"].get("supervised"):
        raise UsageError(
            f"{folder} is unfinished and holds nothing to learn from yet; wait until `blockdraft data` has written the "
            f"first documents, about {SHARD_SECONDS:.0f} s after it has begun to make some."
        )
    if not manifest["counts"]["supervised"]:
        raise UsageError(f"{folder} holds no supervised token, so there is nothing to learn; make it from other rows.")
    return _open(folder, manifest)


def _open(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """The documents that a manifest names."""
    shards = read_shards(folder)
    if not manifest["finished"]:  # others may have come since
        shards = {name: shard for name, shard in shards.items() if name in manifest["shards"]}
    found = rows_of(shards)
    if found != manifest["shards"]:
        raise UsageError(f"{folder} holds the shards {found} and should hold {manifest['shards']}; copy it again.")
    return TokenData(folder, manifest, list(shards.values()))


def read_state(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """Open a folder as it was when its manifest was this one, although it may have grown since. Raises ValueError where
    shards of then are gone."""
    return _open(folder, {**manifest, "finished": False})


def grown_since(data: TokenData, fingerprint: str) -> tuple[int, int] | None:
    """How many documents and tokens have come since the data had this fingerprint, finished or not; None if they never
    had it. They hold what they held then, but what was read unfinished may have others in between."""
    states = states_of(data.manifest)
    then = next((state for state in states if state["fingerprint"] == fingerprint), None)
    if then is None:
        return None
    return states[-1]["documents"] - then["documents"], states[-1]["tokens"] - then["tokens"]


def states_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What a folder has held one after the other, the present last."""
    states: list[dict[str, Any]] = list(manifest.get("states") or [])
    if manifest.get("fingerprint") and (not states or states[-1]["fingerprint"] != manifest["fingerprint"]):
        counts = {name: manifest["counts"][name] for name in ("documents", "tokens")}
        states.append({"fingerprint": manifest["fingerprint"], **counts})
    return states


def rows_of(shards: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    """Documents of each shard."""
    return {name: len(shard["rows"]) for name, shard in shards.items()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary: what each token id stands for."""
    return fingerprint(sorted(tokenizer.get_vocab().items()))


def read_shards(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Map the finished shards of a folder, by name. Raises ValueError for a broken one."""
    shards = {}
    for path in sorted(folder.glob("tokens-*.safetensors")):
        try:
            shard = load_file(path)
            whole = int(shard["offsets"][-1]) == len(shard["tokens"]) == len(shard["supervised"])
            if not whole or len(shard["offsets"]) != len(shard["rows"]) + 1:
                raise UsageError("its tensors do not fit together")
        except (OSError, SafetensorError, LookupError, ValueError) as error:
            raise UsageError(f"{path} is broken ({error}); delete it, and make the data again.") from error
        shards[path.name] = shard
    return shards
