"""Text to calibrate on and to measure on, as rows of token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.data.chats import ChatEncoder
from blockdraft.data.rows import Row, read_rows
from blockdraft.data.settings import RowSettings
from blockdraft.errors import UsageError
from blockdraft.quantize.settings import CalibrationSettings
from blockdraft.targets import TargetText

MOST_ROWS = 100_000  # of the sources


@dataclass(frozen=True)
class Text:
    """Attributes:
    calibration, held_out: `[rows, length]` int64.
    """

    calibration: Tensor
    held_out: Tensor


def read_text(sources: Sequence[str], rows: RowSettings, target: TargetText, settings: CalibrationSettings) -> Text:
    """Texts, conversations or prompts, one behind the other in random order.

    Args:
        sources: As for `read_rows`.

    Raises:
        UsageError: A source cannot be read, the target has no tokenizer, or there is too little text.
    """
    if target.tokenizer is None:
        raise UsageError("The target has no tokenizer, so no text can be read for it.")
    encoder = ChatEncoder(target.tokenizer, target.eos_token_ids)
    found = [row for _, row in zip(range(MOST_ROWS), (row for _, row in read_rows(sources, rows)), strict=False)]
    random.Random(settings.seed).shuffle(found)
    ids: list[int] = []
    for row in found:
        if len(ids) >= settings.tokens + settings.held_out:
            break
        ids += _encoded(row, encoder, target.tokenizer.chat_template is not None)
    return cut_text(ids, " and ".join(sources), target.max_context, settings)


def cut_text(ids: list[int], source: str, most: int, settings: CalibrationSettings) -> Text:
    """Token ids as rows of equal length, the last of them held out. Raises a UsageError where they are too few."""
    length = min(settings.length, most)
    count = min(len(ids), settings.tokens + settings.held_out) // length
    share = settings.held_out / (settings.tokens + settings.held_out)
    held_out = max(1, round(count * share))
    if count - held_out < 1:
        raise UsageError(f"{source} holds {len(ids)} tokens; give at least {2 * length}, better {settings.tokens}.")
    table = torch.tensor(ids[: count * length]).view(count, length)
    return Text(table[:-held_out], table[-held_out:])


def _encoded(row: Row, encoder: ChatEncoder, has_template: bool) -> list[int]:
    if isinstance(row, str):
        return encoder.text(row)
    written = [message for message in row if message["content"] is not None]
    if not has_template:
        return encoder.text("\n".join(str(message["content"]) for message in written))
    if written and written[-1]["role"] != "assistant":
        return encoder.prompt(written)
    return encoder.chat(written)[0]
