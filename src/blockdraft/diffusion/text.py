"""Texts and chats as token ids, and the rows of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.data.chats import ChatEncoder
from blockdraft.data.records import Record, read_records
from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError

GAP = "[GAP]"  # mark of a gap to fill
LONGEST = 512  # tokens of a row by default


class Tokens(NamedTuple):
    """Token ids and their roles, of a text or of a batch of rows `[B, L]`.

    Attributes:
        ids: `[L]` int64.
        eligible: Tokens to predict, `[L]` bool. The others are given, such as a user's messages.
    """

    ids: Tensor
    eligible: Tensor


def read_texts(sources: Sequence[str], settings: RecordSettings, model: DiffusionModel) -> list[Tokens]:
    """Read the records of files or datasets. All tokens of a text are to be predicted, and those of the assistant in a
    chat.

    Args:
        sources, settings: As for `read_records`.

    Raises:
        UsageError: A source cannot be read, a record holds the mask token, or a prompt has no answer.
    """
    assert model.text.tokenizer is not None
    encoder = ChatEncoder(model.text.tokenizer, model.text.eos_token_ids)
    found = []
    for place, record in read_records(sources, settings):
        try:
            ids, eligible = _encoded(record, encoder)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        model.check_tokens(ids, place)
        found.append(Tokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(eligible, dtype=torch.bool)))
    return found


def gapped(text: str, gap: int, model: DiffusionModel) -> list[int | None]:
    """Token ids of a text, with `gap` times None for each `GAP` in it. The parts between gaps are tokenized one by one,
    without a chat template.

    Raises:
        UsageError: There is no gap, or no text before the first one.
    """
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    first, *others = text.split(GAP)
    found: list[int | None] = [*encode_text(first, tokenizer)]
    if not others or not found:
        raise UsageError(f"{text!r} has no {GAP}, or no text before it; write it where tokens are to be found.")
    for part in others:
        found += [*[None] * gap, *tokenizer(part, add_special_tokens=False)["input_ids"]]
    return found


def spelled(token: int, model: DiffusionModel) -> str:
    """Text of a token after another one, since many tokenizers omit the space of a text's first token."""
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    once, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
    return twice.removeprefix(once) if twice.startswith(once) else once


def unseen(tokens: Sequence[int | None], block_size: int) -> tuple[int, int]:
    """Number of known tokens after the first gap, and number of those that no gap sees, since no gap is in their
    block."""
    gaps = {place // block_size for place, token in enumerate(tokens) if token is None}
    behind = [place for place, token in enumerate(tokens) if token is not None and place > tokens.index(None)]
    return len(behind), sum(place // block_size not in gaps for place in behind)


def row_length(model: DiffusionModel, wanted: int | None) -> int:
    """Tokens of a row. Raises a UsageError if more are wanted than the context holds."""
    most = model.text.max_context
    if wanted is not None and wanted > most:
        raise UsageError(f"length is {wanted}, and the model has a context of {most} tokens; give at most {most}.")
    return wanted or min(LONGEST, most)


def _encoded(record: Record, encoder: ChatEncoder) -> tuple[list[int], list[bool]]:
    if isinstance(record, str):
        ids = encoder.text(record)
        return ids, [True] * len(ids)
    if any(message["content"] is None for message in record):
        raise UsageError("this is a prompt without a response, so there is nothing to predict.")
    return encoder.chat(record)


class Rows:
    """Rows of a training: texts, joined and cut, of which the last are held out.

    Args:
        length: Tokens of a row.
        held_out: Share of the rows that is only measured on.
        seed: Seed of their order.

    Attributes:
        all: Tokens of R rows, `[R, length]`.
        idle: Number of rows that were left out since they hold nothing to learn, such as parts of long questions.
        trained, held_out: Numbers of rows to learn and of held-out rows.

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
        """Rows of a step, counted from 0. Each epoch holds all rows once, in an order of its own."""
        places = []
        for number in range(step * size, (step + 1) * size):
            epoch, place = divmod(number, self.trained)
            places.append(_order(self._seed, epoch, self.trained)[place])
        return self._at(places)

    def held_out_rows(self) -> list[Tokens]:
        """Held-out rows, one by one."""
        return [Tokens(*row) for row in zip(*(part[self.trained :] for part in self.all), strict=True)]

    def held_out_batch(self, number: int, size: int) -> Tokens:
        """Batch of held-out rows, or of all rows if none is held out, over and over in their order."""
        first, count = (self.trained, self.held_out) if self.held_out else (0, self.trained)
        return self._at([first + (number * size + place) % count for place in range(size)])

    def _at(self, places: Sequence[int]) -> Tokens:
        return Tokens(*(part[list(places)] for part in self.all))


def seed_of(*parts: int) -> int:
    """Seed derived from these numbers, different for each of their combinations."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _joined(texts: Sequence[Tokens], length: int) -> Tokens:
    """All texts, joined, as rows `[R, length]` whose first tokens are given. The rest at the end is dropped."""
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
