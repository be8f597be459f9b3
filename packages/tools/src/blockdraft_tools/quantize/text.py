"""Texts for calibration and for measuring perplexity, as batches of token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from blockdraft import text_files
from blockdraft.chat_text import encode_chat
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError
from blockdraft.targets import TargetText, without_tokenizer
from blockdraft_tools.quantize.settings import CalibrationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Text:
    """A calibration and a held-out text.

    Attributes:
        calibration, held_out: Token ids, `[B, length]` int64.
    """

    calibration: Tensor
    held_out: Tensor


def read_text(sources: Sequence[str], target: TargetText, settings: CalibrationSettings) -> Text:
    """Read texts and chats, and concatenate them in random order.

    Args:
        sources: Text files; files of JSON lines, each with `messages`, `text`, or `prompt` and `response`; folders of
            tokens that `blockdraft data` wrote.

    Raises:
        UsageError: A source cannot be read, the target has no tokenizer, or there is too little text.
    """
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so no text can be read for it.")
    texts = [text for source in sources for text in _texts(source)]
    random.Random(settings.seed).shuffle(texts)
    ids: list[int] = []
    for text in texts:
        if len(ids) >= settings.tokens + settings.held_out:
            break
        ids += text.tolist() if isinstance(text, Tensor) else _encoded(text, target.tokenizer)
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


def _texts(source: str) -> Iterator[Tensor | str | dict[str, Any]]:
    """Yield the texts of a source as token ids, plain texts or fields of JSON."""
    path = Path(source)
    try:
        if path.is_dir():
            shards = [load_file(shard) for shard in sorted(path.glob("tokens-*.safetensors"))]
            if not shards:
                raise UsageError(f"{path} holds no tokens; give the folder that `blockdraft data` wrote.")
            for shard in shards:
                yield from shard["tokens"].split(shard["offsets"].diff().tolist())
        elif path.suffix in (".json", ".jsonl"):
            for number, line in enumerate(text_files.read_text(path).splitlines(), 1):
                yield _row(line, f"{path}, line {number}")
        else:
            yield text_files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); give a text file or a folder of tokens.") from error


def _row(line: str, place: str) -> str | dict[str, Any]:
    """Return the text, or the messages and tools, of a line of JSON."""
    try:
        row = json.loads(line)
        if "messages" in row:
            if not [message["role"] for message in row["messages"]]:
                raise ValueError("no messages")
            return {"messages": row["messages"], "tools": row.get("tools")}
        if "text" in row:
            if not isinstance(row["text"], str):
                raise TypeError("no text")
            return row["text"]
        turns = [("user", row["prompt"]), *([("assistant", row["response"])] if "response" in row else [])]
        return {"messages": [{"role": role, "content": content} for role, content in turns], "tools": None}
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{place} must be a JSON object with messages, text, or prompt and response; of other forms and datasets, "
            "give the folder of tokens that `blockdraft data` makes."
        ) from error


def _encoded(text: str | dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(text, str):
        return encode_text(text, tokenizer)
    messages = text["messages"]
    if tokenizer.chat_template is None:
        return encode_text("\n".join(str(message["content"]) for message in messages), tokenizer)
    return encode_chat(tokenizer, messages, text["tools"], add_generation_prompt=messages[-1]["role"] != "assistant")
