"""Texts and chats as token ids, and their packing into training sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_train.data.chats import ChatEncoder
from blockdraft_train.data.records import Record, read_records
from blockdraft_train.data.settings import RecordSettings

GAP = "[GAP]"  # marks a gap to fill
DEFAULT_LENGTH = 512  # tokens of a sequence


class TextTokens(NamedTuple):
    """Token ids of a text `[L]`, or of a batch of sequences `[B, L]`.

    Attributes:
        ids: Token ids, int64.
        eligible: Tokens to predict, bool. The others are given, such as a user's messages.
    """

    ids: Tensor
    eligible: Tensor


def read_texts(sources: Sequence[str], settings: RecordSettings, model: DiffusionModel) -> list[TextTokens]:
    """Read the records of files or datasets. All tokens of a text are to be predicted; in a chat, the assistant's.

    Args:
        sources, settings: As for `read_records`.

    Raises:
        UsageError: A source cannot be read, a record contains the mask token, or a prompt has no response.
    """
    assert model.text.tokenizer is not None
    encoder = ChatEncoder(model.text.tokenizer, model.text.eos_token_ids)
    texts = []
    for source, record in read_records(sources, settings):
        try:
            ids, eligible = _encoded(record, encoder)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from error
        model.check_tokens(ids, source)
        texts.append(TextTokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(eligible, dtype=torch.bool)))
    return texts


def encode_gaps(text: str, gap: int, model: DiffusionModel) -> list[int | None]:
    """Tokenize a text, with `gap` times None for each `GAP` in it.

    The parts between gaps are tokenized one by one, without a chat template.

    Raises:
        UsageError: There is no gap, or no text before the first one.
    """
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    first, *others = text.split(GAP)
    tokens: list[int | None] = [*encode_text(first, tokenizer)]
    if not others or not tokens:
        raise UsageError(f"{text!r} has no {GAP}, or no text before it; write {GAP} where tokens are missing.")
    for part in others:
        tokens += [*[None] * gap, *tokenizer(part, add_special_tokens=False)["input_ids"]]
    return tokens


def token_text(token: int, model: DiffusionModel) -> str:
    """Return the text of a token in the middle of a text, since many tokenizers omit the first space of a text."""
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    once, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
    return twice.removeprefix(once) if twice.startswith(once) else once


def count_unseen(tokens: Sequence[int | None], block_size: int) -> tuple[int, int]:
    """Count the known tokens after the first gap, and those among them that share no block with a gap."""
    gap_blocks = {position // block_size for position, token in enumerate(tokens) if token is None}
    after_gap = [i for i, token in enumerate(tokens) if token is not None and i > tokens.index(None)]
    return len(after_gap), sum(position // block_size not in gap_blocks for position in after_gap)


def sequence_length(model: DiffusionModel, length: int | None) -> int:
    """Return the tokens of a sequence: `length`, or the default. Raise a UsageError if the context is shorter."""
    context = model.text.max_context
    if length is not None and length > context:
        raise UsageError(f"length must be at most {context}, the model's context, got {length}.")
    return length or min(DEFAULT_LENGTH, context)


def _encoded(record: Record, encoder: ChatEncoder) -> tuple[list[int], list[bool]]:
    if isinstance(record, str):
        ids = encoder.text(record)
        return ids, [True] * len(ids)
    if any(message["content"] is None for message in record.messages):
        raise UsageError("this is a prompt without a response, so there is nothing to predict.")
    return encoder.chat(record.messages, record.tools)


class PackedTexts:
    """Training set: texts joined and cut into sequences of equal length, the last of which are held out.

    Args:
        length: Tokens of a sequence.
        held_out: Share of the sequences that is held out for measurement.
        seed: Seed of the order.

    Attributes:
        all: Tokens of all sequences, `[N, length]`.
        num_skipped: Sequences left out since they have no token to predict, such as parts of long questions.
        num_train, num_held_out: Numbers of sequences.

    Raises:
        UsageError: There is no sequence to train on.
    """

    def __init__(self, texts: Sequence[TextTokens], length: int, held_out: float, seed: int) -> None:
        packed = _packed(texts, length)
        is_useful = packed.eligible.any(dim=1)
        self.all, self.num_skipped = TextTokens(*(part[is_useful] for part in packed)), int((~is_useful).sum())
        self.length, self._seed = length, seed
        count = len(self.all.ids)
        self.num_held_out = math.ceil(held_out * count)
        self.num_train = count - self.num_held_out
        if self.num_train < 1:
            num_tokens = sum(len(text.ids) for text in texts)
            raise UsageError(
                f"There are {num_tokens} tokens, which make {count} sequences of {length} with something to learn, "
                f"{self.num_held_out} of them held out; give more text, or shorter sequences (--length)."
            )

    def batch(self, step: int, size: int) -> TextTokens:
        """Return the sequences of a step, counted from 0. Each epoch has all sequences once, in its own order."""
        indices = []
        for number in range(step * size, (step + 1) * size):
            epoch, place = divmod(number, self.num_train)
            indices.append(_order(self._seed, epoch, self.num_train)[place])
        return TextTokens(*(part[indices] for part in self.all))

    def held_out(self) -> list[TextTokens]:
        """Return the held-out sequences."""
        return [TextTokens(*tokens) for tokens in zip(*(part[self.num_train :] for part in self.all), strict=True)]


def seed_of(*parts: int) -> int:
    """Derive a seed from these numbers, different for each combination."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _packed(texts: Sequence[TextTokens], length: int) -> TextTokens:
    """Join all texts into sequences `[N, length]` whose first tokens are given. Drop the rest at the end."""
    empty = TextTokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    ids, eligible = (torch.cat(parts) for parts in zip(empty, *texts, strict=True))
    count = len(ids) // length
    packed = TextTokens(
        ids[: count * length].view(count, length), eligible[: count * length].view(count, length).clone()
    )
    packed.eligible[:, 0] = False
    return packed


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed_of(seed, 0, epoch))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
