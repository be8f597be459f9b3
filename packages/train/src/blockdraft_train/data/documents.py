"""Training data on disk, mapped into memory when read: shards of tokens and their manifest `data.json`.

`writer.py` makes them. A shard is a safetensors file that appears whole or not at all. It holds the documents of some
source records, and the numbers of these records and of those that were left out. So it records both the data and the
progress of making them.

    tokens, supervised   [T]      all documents one after the other, int32 and bool
    offsets              [D + 1]  start of each document, and the end of the last one
    rows, cut            [D]      source record of each document; whether it was cut to the maximum length
    left_out             [K, 2]   records that gave no document, each with its reason, an index into `REASONS`

Records are numbered in the order in which the folder met them. `records.safetensors` holds the key of each, a hash of
its content, so that a record keeps its documents when others are changed. The manifest lists under `removed` the
records that the sources no longer hold; their documents are not read.

The folder passes through states: one after each shard, and one whenever it is finished. Each state has a fingerprint.
The manifest lists them with their counts, so a reader of an earlier state can count what was added since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft_train.data.manifest import read_manifest
from blockdraft_train.data.token_data import FORMAT, MANIFEST, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS = "records.safetensors"
LOOPS = "repetitive response"
REASONS = ("no supervised token", LOOPS, "prompt too long")
SHARD_SECONDS = 120.0  # time between shards, and so the most work that a killed process loses


@dataclass(frozen=True)
class Document:
    """One conversation or text.

    Attributes:
        tokens: `[S]` int64.
        supervised: `[S]` bool; tokens that the drafter may learn to propose.
        cut: Whether the source goes on beyond the maximum length.
    """

    tokens: Tensor
    supervised: Tensor
    cut: bool = False


class TokenData(Sequence[Document]):
    """Documents of a data folder as it was when it was opened, in the order of their source records. From `read_data`.

    Attributes:
        folder: Folder of the data.
        fingerprint: Fingerprint of documents and tokenizer. That of finished data does not depend on the shards.
        finished: Whether the data are finished; otherwise these are the documents of the shards that existed.
        tokenizer: Fingerprint of the tokenizer that made the tokens; see `tokenizer_fingerprint`.
        lengths: Number of tokens of each document.
        manifest: Content of `data.json`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[dict[str, Tensor]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint: str = manifest["fingerprint"] or ""
        self.finished: bool = manifest["finished"]
        self.tokenizer: str = manifest["tokenizer"]
        self._shards = shards
        removed = set(manifest.get("removed") or ())
        places = [
            (record, number, i)
            for number, shard in enumerate(shards)
            for i, record in enumerate(shard["rows"].tolist())
            if record not in removed
        ]
        # Documents are sorted, because responses are written many at a time and end in any order.
        self._places = [(number, i) for _, number, i in sorted(places)]
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
        return _open, (self.folder, self.manifest)  # another process maps the same files itself

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raise UsageError unless this tokenizer made the tokens. None, of a target without a tokenizer, passes."""
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.tokenizer:
            raise UsageError(
                f"{self.folder} was made with the tokenizer {self.tokenizer} and the target's is "
                f"{tokenizer_fingerprint(tokenizer)}; make the data again with this target."
            )


def read_data(folder: str | Path, unfinished: bool = False) -> TokenData:
    """Open a data folder. Documents are read from disk when they are accessed.

    Args:
        unfinished: Accept data that are still being made. The result has the documents of the shards that exist now,
            and does not change when others are added.

    Raises:
        UsageError: The folder is absent, unfinished or broken, or holds no supervised token.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    if manifest is None:
        raise UsageError(
            f"{folder / MANIFEST} does not exist; give a folder made by `blockdraft data` or by `blockdraft serve "
            "--record`."
        )
    if not manifest["finished"] and not unfinished:
        raise UsageError(f"{folder} is unfinished; run the `blockdraft data` command that began it again.")
    if not manifest["finished"] and not manifest["counts"].get("supervised"):
        raise UsageError(
            f"{folder} is unfinished and holds nothing to learn from yet; wait until `blockdraft data` has written its "
            f"first documents, about {SHARD_SECONDS:.0f} s after it starts."
        )
    if not manifest["counts"]["supervised"] and "recorded_target_layers" in manifest:
        raise UsageError(
            f"{folder} holds no whole conversation yet: they reach the data some minutes after their last turn, or "
            "when the server ends. End it, or try again later."
        )
    if not manifest["counts"]["supervised"]:
        raise UsageError(
            f"{folder} holds no supervised token, so there is nothing to learn; make it from other records."
        )
    return _open(folder, manifest)


def _open(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """Open the documents that a manifest names."""
    # Further shards may have come since, or were written by a process that was killed before it could name them here.
    shards = {name: shard for name, shard in read_shards(folder).items() if name in manifest["shards"]}
    sizes = shard_sizes(shards)
    if sizes != manifest["shards"]:
        raise UsageError(f"{folder} holds the shards {sizes} and should hold {manifest['shards']}; copy it again.")
    return TokenData(folder, manifest, list(shards.values()))


def read_state(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """Open a folder as it was when it had this manifest. Raise UsageError if shards of that state are missing."""
    return _open(folder, {**manifest, "finished": False})


def grown_since(data: TokenData, fingerprint: str) -> tuple[int, int] | None:
    """Return how many documents and tokens were added since the data had this fingerprint, or None if never.

    If the data were unfinished then, later documents may lie between the earlier ones.
    """
    states = states_of(data.manifest)
    then = next((state for state in states if state["fingerprint"] == fingerprint), None)
    if then is None:
        return None
    return states[-1]["documents"] - then["documents"], states[-1]["tokens"] - then["tokens"]


def states_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states that a folder has been in, the present one last, each with its fingerprint and counts."""
    states: list[dict[str, Any]] = list(manifest.get("states") or [])
    if manifest.get("fingerprint") and (not states or states[-1]["fingerprint"] != manifest["fingerprint"]):
        counts = {name: manifest["counts"][name] for name in ("documents", "tokens")}
        states.append({"fingerprint": manifest["fingerprint"], **counts})
    return states


def shard_sizes(shards: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    """Return the number of documents in each shard."""
    return {name: len(shard["rows"]) for name, shard in shards.items()}


def read_shards(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Map the shards of a folder into memory, by file name. Raise UsageError if one is broken."""
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
