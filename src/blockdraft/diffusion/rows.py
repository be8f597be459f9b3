"""The rows that a training reads: which there are, which of them are held out, and in what order the others come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from blockdraft.diffusion.text import Tokens
from blockdraft.errors import UsageError


class Rows:
    """Texts, joined and cut into rows, the last of which are held out.

    Args:
        length: Tokens of a row.
        held_out: Share of the rows that is kept back.
        seed: Of their order.

    Attributes:
        all: `[R, length]`.
        idle: Rows that were left out, since they hold nothing to learn, such as parts of long questions.
        trained, held_out: How many rows are learned, and how many are kept back.

    Raises:
        UsageError: There is no row to learn.
    """

    def __init__(self, texts: Sequence[Tokens], length: int, held_out: float, seed: int) -> None:
        joined = _joined(texts, length)
        teaches = joined.eligible.any(dim=1)
        self.all, self.idle = Tokens(*(part[teaches] for part in joined)), int((~teaches).sum())
        self.length, self._seed = length, seed
        count = len(self.all.ids)
        self.held_out = math.ceil(held_out * count)
        self.trained = count - self.held_out
        if self.trained < 1:
            found = sum(len(text.ids) for text in texts)
            raise UsageError(
                f"There are {found} tokens, which make {count} rows of {length} with something to learn, "
                f"{self.held_out} of them held out; give more text, or shorter rows (--length)."
            )

    def batch(self, step: int, size: int) -> Tokens:
        """The rows of a step, from 0 on: all of them once in each epoch, in an order of its own."""
        places = []
        for number in range(step * size, (step + 1) * size):
            epoch, place = divmod(number, self.trained)
            places.append(_order(self._seed, epoch, self.trained)[place])
        return self._at(places)

    def kept_back(self) -> list[Tokens]:
        """The held-out rows, one by one."""
        return [Tokens(*row) for row in zip(*(part[self.trained :] for part in self.all), strict=True)]

    def looked_at(self, batch: int, size: int) -> Tokens:
        """A batch of held-out rows, or of all where none is held out, over and over in their order."""
        first, count = (self.trained, self.held_out) if self.held_out else (0, self.trained)
        return self._at([first + (batch * size + place) % count for place in range(size)])

    def _at(self, places: Sequence[int]) -> Tokens:
        return Tokens(*(part[list(places)] for part in self.all))


def seed_of(*parts: int) -> int:
    """A seed of its own for each of such numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _joined(texts: Sequence[Tokens], length: int) -> Tokens:
    """`[R, length]`: all texts, one behind the other, as rows whose first tokens are given. What is left at the end is
    left out."""
    nothing = Tokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    ids, eligible = (torch.cat(parts) for parts in zip(nothing, *texts, strict=True))
    count = len(ids) // length
    cut = Tokens(ids[: count * length].view(count, length), eligible[: count * length].view(count, length).clone())
    cut.eligible[:, 0] = False
    return cut


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed_of(seed, 0, epoch))
    found: list[int] = torch.randperm(count, generator=generator).tolist()
    return found
