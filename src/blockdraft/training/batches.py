"""Batches of a run: documents packed into rows, with anchors.

Everything here follows from (seed, epoch, step) alone. Each process plans whole steps and takes its part of them, so
the number of processes changes nothing, and a run that resumes needs no state of a random generator.

Letters: B rows, S tokens of a row, A anchors of a row, K taught slots of a block, L = K + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.data.documents import Document
from blockdraft.errors import UsageError
from blockdraft.training.recipe import Recipe

OPEN_ROWS = 32  # rows that are filled at a time
ORDER, ANCHORS = range(1, 3)  # uses of random numbers, each with its own seeds


def generator(*key: int) -> torch.Generator:
    """Random generator that depends on these numbers alone."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class Rows(NamedTuple):
    """Rows of packed documents and their anchors, as a variant sees them.

    Attributes:
        tokens_BS, positions_BS: int64; positions begin at 0 in each document.
        documents_BS: int64; number of each token's document in its row, -1 after the last document.
        anchors_BA: int64; indices into the row, in ascending order, -1 for no block.
        tokens_BAL: int64; the anchor and the K tokens after it.
        taught_BAK: bool; which of these K tokens are taught, that is supervised and in the anchor's document.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    anchors_BA: Tensor
    tokens_BAL: Tensor
    taught_BAK: Tensor


def hidden_states_before(hidden_states_BSF: Tensor, rows: Rows) -> Tensor:
    """Features of the token before each anchor, `[B, A, F]`; 0 if the anchor is the first token of its document."""
    before_BA = (rows.anchors_BA - 1).clamp(min=0)
    first_BA = rows.positions_BS.gather(1, rows.anchors_BA.clamp(min=0)) == 0
    found = hidden_states_BSF.gather(1, before_BA.unsqueeze(-1).expand(-1, -1, hidden_states_BSF.size(2)))
    return found.masked_fill(first_BA.unsqueeze(-1), 0)


@dataclass(frozen=True)
class Batch:
    """Rows of a step.

    Attributes:
        tensors: Tensors of the rows, on the CPU.
        contents: Documents of each row, as indices into the data.
    """

    tensors: Rows
    contents: tuple[tuple[int, ...], ...]

    def rows(self, begin: int, end: int) -> Batch:
        return Batch(Rows(*(tensor[begin:end] for tensor in self.tensors)), self.contents[begin:end])

    def on(self, device: torch.device) -> Rows:
        return Rows(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))


class Documents:
    """Documents to train on, cut to the length of a row.

    Attributes:
        longest: Length of a row.
        usable: Indices of the documents with an eligible anchor.
        lengths: Number of tokens of every document, after cutting.
        cut: Number of documents that were cut.
        useless: Number of documents without two supervised tokens side by side.
        tokens, supervised: Number of tokens, and of supervised tokens, in the usable documents.
    """

    def __init__(self, data: Sequence[Document], length: int) -> None:
        self._data, self.longest = data, length
        self.usable: list[int] = []
        self.lengths: list[int] = []
        self.cut = self.tokens = self.supervised = 0
        for index in range(len(data)):
            document = self[index]
            self.lengths.append(len(document.tokens))
            self.cut += document.cut
            if bool(eligible(document.supervised).any()):
                self.usable.append(index)
                self.tokens += len(document.tokens)
                self.supervised += int(document.supervised.sum())
        self.useless = len(data) - len(self.usable)

    def __getitem__(self, index: int) -> Document:
        document = self._data[index]
        cut = len(document.tokens) > self.longest
        return Document(document.tokens[: self.longest], document.supervised[: self.longest], cut)


def split(documents: Documents, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the usable documents to train on, and of those that are held out.

    The content of a document decides, so no document changes sides when others are added. A drafter that is trained
    further on more data is therefore never measured on documents that it has learned.

    Raises:
        UsageError: No document would be left to train on.
    """
    usable = documents.usable
    if held_out >= len(usable):
        raise UsageError(
            f"held_out is {held_out} and the data hold {len(usable)} usable documents; hold out fewer, or add data."
        )
    order = sorted(usable, key=lambda i: _lot(documents[i], seed))
    return sorted(order[held_out:]), order[:held_out]


def _lot(document: Document, seed: int) -> bytes:
    content = document.tokens.int().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16, key=seed.to_bytes(16, "little")).digest()


def pack(order: Sequence[int], lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Pack documents into rows of at most `length` tokens, each into the fullest open row with room for it."""
    done: list[tuple[int, ...]] = []
    rows: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            i = min(fitting)[1]
        else:
            if len(rows) == OPEN_ROWS:
                fullest = rooms.index(min(rooms))
                rooms.pop(fullest)
                done.append(tuple(rows.pop(fullest)))
            i = len(rows)
            rows.append([])
            rooms.append(length)
        rows[i].append(index)
        rooms[i] -= lengths[index]
    return done + [tuple(row) for row in rows]


def eligible(supervised_S: Tensor) -> Tensor:
    """Tokens that may be anchors, `[S]` bool: supervised tokens whose next token is supervised too."""
    return supervised_S & F.pad(supervised_S[1:], (0, 1))


def shares(counts: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to the counts, with no share above its count. The largest remainders round up."""
    whole = sum(counts)
    if whole <= total:
        return list(counts)
    found = [total * count // whole for count in counts]
    for i in sorted(range(len(counts)), key=lambda i: -(total * counts[i] % whole))[: total - sum(found)]:
        found[i] += 1
    return found


def place_anchors(documents: Sequence[Document], count: int, stride: int | None, random: torch.Generator) -> list[int]:
    """Draw up to `count` anchors of a row, in ascending order, without replacement, and from each document in
    proportion to its eligible tokens.

    Args:
        stride: None allows any eligible token; otherwise only every stride-th token from the first eligible one on.
    """
    places, start = [], 0
    for document in documents:
        found = eligible(document.supervised).nonzero().flatten()
        if stride is not None and len(found):
            found = found[(found - found[0]) % stride == 0]
        places.append(start + found)
        start += len(document.tokens)
    anchors: list[int] = []
    for found, share in zip(places, shares([len(found) for found in places], count), strict=True):
        anchors += found[torch.randperm(len(found), generator=random)[:share]].sort().values.tolist()
    return anchors


class Batches:
    """Batches of a run, one a step.

    Args:
        documents: All documents.
        chosen: Indices of the documents to use.
        recipe: Recipe in which length, batch and anchors are not None.
        taught_slots: K.
        alone: Share of the steps, at the beginning, whose blocks have one slot, and K times as many anchors for it.
    """

    def __init__(
        self, documents: Documents, chosen: Sequence[int], recipe: Recipe, taught_slots: int, alone: float = 0.0
    ) -> None:
        assert recipe.length is not None and recipe.batch is not None and recipe.anchors is not None
        self._length, self._batch, self._anchors = recipe.length, recipe.batch, recipe.anchors
        self._documents, self._chosen, self._recipe, self._taught = documents, list(chosen), recipe, taught_slots
        self._alone = alone
        self._epoch: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def _rows(self, epoch: int) -> list[tuple[int, ...]]:
        if self._epoch[0] != epoch:
            random = generator(self._recipe.seed, ORDER, epoch)
            order = [self._chosen[i] for i in torch.randperm(len(self._chosen), generator=random).tolist()]
            self._epoch = (epoch, pack(order, self._documents.lengths, self._length))
        return self._epoch[1]

    def steps_of(self, epoch: int) -> int:
        return -(-len(self._rows(epoch)) // self._batch)

    def steps(self) -> int:
        """Number of steps of the whole run."""
        if self._recipe.steps is not None:
            return self._recipe.steps
        return sum(self.steps_of(epoch) for epoch in range(self._recipe.epochs))

    def run(self, start: int) -> Iterator[tuple[int, Batch]]:
        """Yield the epoch and the batch of each step, from step `start` on and without end. The rows of an epoch are
        spread evenly over its batches, which are padded with empty rows."""
        epoch = begun = 0
        alone = round(self._alone * self.steps())
        while True:
            count, every = self.steps_of(epoch), self._rows(epoch)
            for step in range(max(start - begun, 0), count):
                random = generator(self._recipe.seed, ANCHORS, epoch, step)
                rows = every[len(every) * step // count : len(every) * (step + 1) // count]
                slots = 1 if begun + step < alone else self._taught
                yield epoch, self.batch(rows + [()] * (self._batch - len(rows)), random, slots)
            begun += count
            epoch += 1

    def fixed(self, size: int) -> list[Batch]:
        """One epoch in batches of `size` rows, the same at every call; for evaluations."""
        random = generator(self._recipe.seed, ANCHORS)
        rows = pack(self._chosen, self._documents.lengths, self._length)
        rows += [()] * (-len(rows) % size)
        return [self.batch(rows[i : i + size], random, self._taught) for i in range(0, len(rows), size)]

    def batch(self, rows: Sequence[tuple[int, ...]], random: torch.Generator, slots: int) -> Batch:
        size = len(rows), self._length
        tokens, positions = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
        documents, supervised = torch.full(size, -1), torch.zeros(size, dtype=torch.bool)
        anchors = torch.full((size[0], min(self._anchors * self._taught // slots, self._length)), -1)
        stride = self._recipe.block_size if self._recipe.anchor_placement == "fixed" else None
        for row, indices in enumerate(rows):
            held, begin = [self._documents[index] for index in indices], 0
            for number, document in enumerate(held):
                end = begin + len(document.tokens)
                tokens[row, begin:end], supervised[row, begin:end] = document.tokens, document.supervised
                positions[row, begin:end] = torch.arange(end - begin)
                documents[row, begin:end] = number
                begin = end
            found = place_anchors(held, anchors.size(1), stride, random)
            anchors[row, : len(found)] = torch.tensor(found, dtype=torch.long)
        places = anchors.unsqueeze(-1) + torch.arange(slots + 1)
        inside = places.clamp(0, size[1] - 1).flatten(1)
        beginning = documents.gather(1, anchors.clamp(min=0)).unsqueeze(-1)
        same = documents.gather(1, inside).view_as(places) == beginning
        taught = (anchors >= 0).unsqueeze(-1) & (places < size[1]) & same
        taught = taught & supervised.gather(1, inside).view_as(places)
        blocks = tokens.gather(1, inside).view_as(places)
        return Batch(Rows(tokens, positions, documents, anchors, blocks, taught[:, :, 1:]), tuple(rows))
