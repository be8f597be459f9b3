"""Texts for calibration and for measuring perplexity, as batches of token ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.data.chats import ChatEncoder
from blockdraft.data.records import Record, read_records
from blockdraft.data.settings import RecordSettings
from blockdraft.errors import UsageError
from blockdraft.targets import TargetText, without_tokenizer
from blockdraft.tools.quantize.settings import CalibrationSettings

MAX_RECORDS = 100_000  # read from the sources


@dataclass(frozen=True)
class Text:
    """A calibration and a held-out text.

    Attributes:
        calibration, held_out: Token ids, `[B, length]` int64.
    """

    calibration: Tensor
    held_out: Tensor


def read_text(
    sources: Sequence[str], records: RecordSettings, target: TargetText, settings: CalibrationSettings
) -> Text:
    """Read texts, conversations or prompts, and concatenate them in random order.

    Args:
        sources, records: As for `read_records`.

    Raises:
        UsageError: A source cannot be read, the target has no tokenizer, or there is too little text.
    """
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so no text can be read for it.")
    encoder = ChatEncoder(target.tokenizer, target.eos_token_ids)
    texts = [record for _, record in itertools.islice(read_records(sources, records), MAX_RECORDS)]
    random.Random(settings.seed).shuffle(texts)
    ids: list[int] = []
    for record in texts:
        if len(ids) >= settings.tokens + settings.held_out:
            break
        ids += _encoded(record, encoder, target.tokenizer.chat_template is not None)
    return cut_text(ids, " and ".join(sources), target.max_context, settings)


def cut_text(ids: list[int], source: str, most: int, settings: CalibrationSettings) -> Text:
    """Cut token ids into sequences of equal length, of which the last are held out.

    Args:
        source: Name of the text, for the message.
        most: Maximum number of tokens per sequence.

    Raises:
        UsageError: There are too few tokens.
    """
    length = min(settings.length, most)
    count = min(len(ids), settings.tokens + settings.held_out) // length
    share = settings.held_out / (settings.tokens + settings.held_out)
    held_out = max(1, round(count * share))
    wanted = settings.tokens + settings.held_out
    if wanted < 2 * length:
        raise UsageError(
            f"tokens and held_out are {wanted} together; {length} are read at a time, so give at least {2 * length}, "
            "or a smaller length."
        )
    if count - held_out < 1:
        raise UsageError(f"{source} holds {len(ids)} tokens; give at least {2 * length}, better {wanted}.")
    table = torch.tensor(ids[: count * length]).view(count, length)
    return Text(table[:-held_out], table[-held_out:])


def _encoded(record: Record, encoder: ChatEncoder, has_template: bool) -> list[int]:
    if isinstance(record, str):
        return encoder.text(record)
    written = [message for message in record.messages if message["content"] is not None]
    if not has_template:
        return encoder.text("\n".join(str(message["content"]) for message in written))
    if written and written[-1]["role"] != "assistant":
        return encoder.prompt(written, record.tools)
    return encoder.chat(written, record.tools)[0]
