"""Training batches: documents packed into sequences, with anchors.

A batch follows from (seed, epoch, step) alone. Each process plans whole steps and takes its part of them. So the number
of processes changes nothing, and a resumed run needs no state of a random generator.

Letters: B sequences, S tokens of a sequence, A anchors of a sequence, K taught slots of a block, L = K + 1.
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

from blockdraft.errors import UsageError
from blockdraft_train.data.documents import Document
from blockdraft_train.recipe import Recipe

OPEN_SEQUENCES = 32  # sequences that are filled at a time
ORDER, ANCHORS = range(1, 3)  # purposes of random numbers, each with its own seeds


def generator(*key: int) -> torch.Generator:
    """Return a random generator that depends on these numbers alone."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class PackedSequences(NamedTuple):
    """Packed sequences and their anchors, as a variant sees them.

    Attributes:
        tokens_BS, positions_BS: int64; positions begin at 0 in each document.
        documents_BS: int64; number of each token's document in its sequence, -1 after the last document.
        anchors_BA: int64; indices into the sequence, in ascending order, -1 for no block.
        tokens_BAL: int64; the anchor and the K tokens after it.
        taught_BAK: bool; which of these K tokens are taught: they are supervised and in the anchor's document.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    anchors_BA: Tensor
    tokens_BAL: Tensor
    taught_BAK: Tensor


def hidden_states_before(hidden_states_BSF: Tensor, sequences: PackedSequences) -> Tensor:
    """Return the hidden states of the token before each anchor, `[B, A, F]`.

    They are 0 where the anchor is the first token of its document.
    """
    before_BA = (sequences.anchors_BA - 1).clamp(min=0)
    first_BA = sequences.positions_BS.gather(1, sequences.anchors_BA.clamp(min=0)) == 0
    before_BAF = hidden_states_BSF.gather(1, before_BA.unsqueeze(-1).expand(-1, -1, hidden_states_BSF.size(2)))
    return before_BAF.masked_fill(first_BA.unsqueeze(-1), 0)


@dataclass(frozen=True)
class Batch:
    """Sequences of one step.

    Attributes:
        tensors: Tensors of the sequences, on the CPU.
        contents: Documents of each sequence, as indices into the data.
    """

    tensors: PackedSequences
    contents: tuple[tuple[int, ...], ...]

    def part(self, begin: int, end: int) -> Batch:
        return Batch(PackedSequences(*(tensor[begin:end] for tensor in self.tensors)), self.contents[begin:end])

    def on(self, device: torch.device) -> PackedSequences:
        return PackedSequences(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))


class Documents:
    """Training documents, cut to the length of a sequence.

    Attributes:
        longest: Length of a sequence.
        usable: Indices of the documents with an eligible anchor.
        lengths: Number of tokens of every document, after cutting.
        cut: Number of documents that were cut.
        useless: Number of documents without two adjacent supervised tokens.
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
    """Return the indices of the usable documents to train on, and of those to hold out.

    The content of a document decides, so adding documents moves no document to the other side. A drafter that is
    trained further on more data is therefore never measured on documents that it has learned.

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
    """Return bytes that order documents pseudo-randomly by content and seed."""
    content = document.tokens.int().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16, key=seed.to_bytes(16, "little")).digest()


def pack(order: Sequence[int], lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Pack documents into sequences of at most `length` tokens, each into the fullest open sequence with room."""
    done: list[tuple[int, ...]] = []
    open_sequences: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            i = min(fitting)[1]
        else:
            if len(open_sequences) == OPEN_SEQUENCES:
                fullest = rooms.index(min(rooms))
                rooms.pop(fullest)
                done.append(tuple(open_sequences.pop(fullest)))
            i = len(open_sequences)
            open_sequences.append([])
            rooms.append(length)
        open_sequences[i].append(index)
        rooms[i] -= lengths[index]
    return done + [tuple(sequence) for sequence in open_sequences]


def eligible(supervised_S: Tensor) -> Tensor:
    """Return which tokens may be anchors, `[S]` bool: supervised tokens whose next token is supervised too."""
    return supervised_S & F.pad(supervised_S[1:], (0, 1))


def shares(counts: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to the counts, with no share above its count. The largest remainders round up."""
    whole = sum(counts)
    if whole <= total:
        return list(counts)
    parts = [total * count // whole for count in counts]
    for i in sorted(range(len(counts)), key=lambda i: -(total * counts[i] % whole))[: total - sum(parts)]:
        parts[i] += 1
    return parts


def place_anchors(documents: Sequence[Document], count: int, stride: int | None, random: torch.Generator) -> list[int]:
    """Draw up to `count` anchors of a sequence without replacement, in ascending order.

    Each document gets a share in proportion to its eligible tokens.

    Args:
        stride: Distance between candidates, from the first eligible token on; None allows any eligible token.
    """
    places, start = [], 0
    for document in documents:
        candidates = eligible(document.supervised).nonzero().flatten()
        if stride is not None and len(candidates):
            candidates = candidates[(candidates - candidates[0]) % stride == 0]
        places.append(start + candidates)
        start += len(document.tokens)
    anchors: list[int] = []
    for candidates, share in zip(places, shares(list(map(len, places)), count), strict=True):
        anchors += candidates[torch.randperm(len(candidates), generator=random)[:share]].sort().values.tolist()
    return anchors


class Batches:
    """Batches of a run, one per step.

    Args:
        documents: All documents.
        indices: Indices of the documents to use.
        recipe: Recipe in which length, batch and anchors are set.
        taught_slots: K.
        alone: Share of the steps, at the start, whose blocks have one slot. They have K times as many anchors.
    """

    def __init__(
        self, documents: Documents, indices: Sequence[int], recipe: Recipe, taught_slots: int, alone: float = 0.0
    ) -> None:
        assert recipe.length is not None and recipe.batch is not None and recipe.anchors is not None
        self._length, self._batch, self._anchors = recipe.length, recipe.batch, recipe.anchors
        self._documents, self._indices, self._recipe, self._taught = documents, list(indices), recipe, taught_slots
        self._alone = alone
        self._epoch: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def _sequences(self, epoch: int) -> list[tuple[int, ...]]:
        if self._epoch[0] != epoch:
            random = generator(self._recipe.seed, ORDER, epoch)
            order = [self._indices[i] for i in torch.randperm(len(self._indices), generator=random).tolist()]
            self._epoch = (epoch, pack(order, self._documents.lengths, self._length))
        return self._epoch[1]

    def steps_of(self, epoch: int) -> int:
        return -(-len(self._sequences(epoch)) // self._batch)

    def steps(self) -> int:
        """Return the number of steps of the whole run."""
        if self._recipe.steps is not None:
            return self._recipe.steps
        return sum(self.steps_of(epoch) for epoch in range(self._recipe.epochs))

    def run(self, start: int) -> Iterator[tuple[int, Batch]]:
        """Yield the epoch and the batch of each step, from step `start` on and without end.

        The sequences of an epoch are spread evenly over its batches, which are padded with empty sequences.
        """
        epoch = begun = 0
        alone = round(self._alone * self.steps())
        while True:
            count, sequences = self.steps_of(epoch), self._sequences(epoch)
            for step in range(max(start - begun, 0), count):
                random = generator(self._recipe.seed, ANCHORS, epoch, step)
                part = sequences[len(sequences) * step // count : len(sequences) * (step + 1) // count]
                slots = 1 if begun + step < alone else self._taught
                yield epoch, self.batch(part + [()] * (self._batch - len(part)), random, slots)
            begun += count
            epoch += 1

    def fixed(self, size: int) -> list[Batch]:
        """Return one epoch in batches of `size` sequences, the same at every call; for evaluations."""
        random = generator(self._recipe.seed, ANCHORS)
        sequences = pack(self._indices, self._documents.lengths, self._length)
        sequences += [()] * (-len(sequences) % size)
        return [self.batch(sequences[i : i + size], random, self._taught) for i in range(0, len(sequences), size)]

    def batch(self, sequences: Sequence[tuple[int, ...]], random: torch.Generator, slots: int) -> Batch:
        size = len(sequences), self._length
        tokens, positions = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
        documents, supervised = torch.full(size, -1), torch.zeros(size, dtype=torch.bool)
        anchors = torch.full((size[0], min(self._anchors * self._taught // slots, self._length)), -1)
        stride = self._recipe.block_size if self._recipe.anchor_placement == "fixed" else None
        for row, indices in enumerate(sequences):
            contents, begin = [self._documents[index] for index in indices], 0
            for number, document in enumerate(contents):
                end = begin + len(document.tokens)
                tokens[row, begin:end], supervised[row, begin:end] = document.tokens, document.supervised
                positions[row, begin:end] = torch.arange(end - begin)
                documents[row, begin:end] = number
                begin = end
            placed = place_anchors(contents, anchors.size(1), stride, random)
            anchors[row, : len(placed)] = torch.tensor(placed, dtype=torch.long)
        places = anchors.unsqueeze(-1) + torch.arange(slots + 1)
        inside = places.clamp(0, size[1] - 1).flatten(1)
        beginning = documents.gather(1, anchors.clamp(min=0)).unsqueeze(-1)
        same = documents.gather(1, inside).view_as(places) == beginning
        taught = (anchors >= 0).unsqueeze(-1) & (places < size[1]) & same
        taught = taught & supervised.gather(1, inside).view_as(places)
        blocks = tokens.gather(1, inside).view_as(places)
        return Batch(PackedSequences(tokens, positions, documents, anchors, blocks, taught[:, :, 1:]), tuple(sequences))
