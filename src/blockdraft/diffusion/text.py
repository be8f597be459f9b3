"""Texts and chats as token ids, and which of them a model is to predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.data.chats import ChatEncoder
from blockdraft.data.records import Record, read_records
from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError

GAP = "[GAP]"  # where tokens are to be found
LONGEST = 512  # tokens of a row, unless more are asked for


class Tokens(NamedTuple):
    """Attributes:
    ids: `[L]` int64.
    eligible: `[L]` bool: those that are to be predicted. Others are given, such as what a user says.
    """

    ids: Tensor
    eligible: Tensor


def read_texts(sources: Sequence[str], rows: RecordSettings, model: DiffusionModel) -> list[Tokens]:
    """The rows of files or datasets: of a text all tokens are to be predicted, of a chat those of the assistant.

    Args:
        sources, rows: As for `read_records`.

    Raises:
        UsageError: A source cannot be read, a row holds the mask token, or a prompt has no answer.
    """
    assert model.text.tokenizer is not None
    encoder = ChatEncoder(model.text.tokenizer, model.text.eos_token_ids)
    found = []
    for place, record in read_records(sources, rows):
        try:
            ids, eligible = _encoded(record, encoder)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        model.check_tokens(ids, place)
        found.append(Tokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(eligible, dtype=torch.bool)))
    return found


def gapped(text: str, gap: int, model: DiffusionModel) -> list[int | None]:
    """Token ids of a text as it is, with `gap` times None for each `GAP` in it. What stands before a gap and what
    stands behind it are turned into tokens each for itself.

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
    """A token as it is written behind another one: many tokenizers leave out the space of a text's first token."""
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    once, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
    return twice.removeprefix(once) if twice.startswith(once) else once


def unseen(tokens: Sequence[int | None], block_size: int) -> tuple[int, int]:
    """How many known tokens stand behind the first gap, and how many of them share no block with a gap, so that they
    cannot be seen from one."""
    gaps = {place // block_size for place, token in enumerate(tokens) if token is None}
    behind = [place for place, token in enumerate(tokens) if token is not None and place > tokens.index(None)]
    return len(behind), sum(place // block_size not in gaps for place in behind)


def row_length(model: DiffusionModel, wanted: int | None) -> int:
    """Tokens of a row. Raises a UsageError where more are wanted than the context holds."""
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
