"""Prompts that the target answers: chosen from data, or written by the target itself.

A model with a chat template writes a user's message when it is given the template up to that message (Magpie, arXiv
2406.08464). A model without one begins a text. Either way prompts are of the kind that the model was trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.engine import Engine, loops
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.folders import make_folder, write_file
from blockdraft.targets import Target, TargetText, without_tokenizer
from blockdraft.types import SamplingParams
from blockdraft_train.data.records import Message, Record, read_records
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.fit.settings import PromptSettings

PROMPTS, HELD_OUT = "prompts.jsonl", "held-out.jsonl"
BEGINNING = 256  # minimum number of characters between two prompts of one plain text
OWN_TOKENS = 96  # maximum length of a prompt that a chat model writes
MARK = "blockdraft-mark"
ROOM = 128  # tokens of the context that a held-out prompt leaves for its answer
TRIES = 3  # maximum number of attempts per wanted prompt; models repeat themselves


@dataclass(frozen=True)
class Prompts:
    """Prompts for a target.

    Attributes:
        records: Prompts in random order, as records that `blockdraft data` reads.
        held_out: Texts to measure on. None of them is in `records`.
        available: Number of different prompts in the sources, held-out ones included; None if the target wrote them.
    """

    records: tuple[dict[str, Any], ...]
    held_out: tuple[str, ...]
    available: int | None


def read_prompts(
    sources: Sequence[str], records: RecordSettings, target: Target | TargetText, settings: PromptSettings
) -> Prompts:
    """Read the prompts of data, without repeats.

    Raises:
        UsageError: A source cannot be read, holds a record of no accepted form, or too few prompts to hold any out.
    """
    prompts: dict[str, dict[str, Any]] = {}
    for place, record in read_records(sources, records):
        try:
            for prompt in _of_record(record, target, settings.prompt_tokens):
                if _first(prompt).strip():
                    prompts.setdefault(json.dumps(prompt), prompt)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
    if len(prompts) <= settings.held_out:
        raise UsageError(
            f"{' and '.join(sources)} hold {len(prompts)} different prompts, and {settings.held_out} are held out to "
            "measure on; give more data."
        )
    return _choose(list(prompts.values()), target, settings, len(prompts))


def write_prompts(
    engine: Engine,
    settings: PromptSettings,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Prompts:
    """Let the target write prompts.

    Raises:
        UsageError: It has no tokenizer, or wrote fewer than half of the wanted prompts in three times as many attempts.
    """
    wanted = settings.count + settings.held_out
    prefix, params = _beginning(engine.target)
    prompts: dict[str, dict[str, Any]] = {}
    for begin in range(0, TRIES * wanted, engine.max_batch_size):
        attempts = [
            SamplingParams(**params, temperature=1.0, seed=settings.seed * 1_000_003 + begin + i)
            for i in range(engine.max_batch_size)
        ]
        starts = [_start(prefix, engine.target, attempt.seed or 0) for attempt in attempts]
        for start, completion in zip(starts, engine.generate(starts, attempts), strict=True):
            ended = completion.checked().finish_reason == "stop"
            text = _text(engine.target, start[len(prefix) :] + completion.token_ids)
            if text.strip() and not loops(completion.token_ids) and (ended or "stop_token_ids" not in params):
                prompts.setdefault(text, {"prompt": text})
        progress("prompts", min(len(prompts), wanted), wanted)
        if len(prompts) >= wanted:
            break
    if 2 * len(prompts) < wanted:
        raise UsageError(
            f"The target wrote only {len(prompts)} usable prompts of {wanted}; name data with prompts (--data)."
        )
    return _choose(list(prompts.values())[:wanted], engine.target, settings, None)


def store(folder: Path, prompts: Prompts) -> None:
    """Write prompts.jsonl and held-out.jsonl, the former last."""
    make_folder(folder)
    for name, records in ((HELD_OUT, [{"prompt": text} for text in prompts.held_out]), (PROMPTS, prompts.records)):
        write_file(folder / name, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())


def _choose(
    prompts: list[dict[str, Any]], target: Target | TargetText, settings: PromptSettings, available: int | None
) -> Prompts:
    """Shuffle the prompts, and hold some out that leave room in the context for a response."""
    random.Random(settings.seed).shuffle(prompts)
    most = target.max_context - min(ROOM, target.max_context // 2)
    held_out: dict[int, str] = {}
    for i, record in enumerate(prompts):
        if len(held_out) == settings.held_out:
            break
        text = _first(record)
        if len(encode(text, target)) <= most:
            held_out[i] = text
    if settings.held_out and not held_out:
        raise UsageError(
            f"All prompts have more than {most} tokens, which leaves no room for answers; give shorter ones."
        )
    records = [record for i, record in enumerate(prompts) if i not in held_out][: settings.count]
    return Prompts(tuple(records), tuple(held_out.values()), available)


def _first(record: dict[str, Any]) -> str:
    """Return the first message of the user."""
    messages: list[Message] = record.get("messages", [])
    return str(next((message["content"] for message in messages if message["role"] == "user"), record.get("prompt")))


def _of_record(record: Record, target: Target | TargetText, tokens: int) -> Iterator[dict[str, Any]]:
    chats = target.tokenizer is not None and target.tokenizer.chat_template is not None
    if isinstance(record, str):
        yield from ({"prompt": text} for text in beginnings(record, target, tokens))
        return
    asked = [message for message in record.messages if message["role"] != "assistant"]
    if chats and len(asked) == 1 and not record.tools:
        yield {"prompt": asked[0]["content"]}
    elif chats:  # the target writes its own responses
        cleared = (
            {**message, "content": ""} if message["role"] == "assistant" else message for message in record.messages
        )
        yield {"messages": list(cleared)} | ({"tools": record.tools} if record.tools else {})
    if chats:
        return
    if len(asked) > 1:
        raise UsageError("this is a chat of several messages, and the target has no chat template; give texts.")
    text = asked[0]["content"]
    yield {"prompt": next(beginnings(text, target, tokens), text)}


def beginnings(text: str, target: Target | TargetText, tokens: int) -> Iterator[str]:
    """Yield beginnings of `tokens` tokens: that of the text, and those of paragraphs further on."""
    assert target.tokenizer is not None
    place = -BEGINNING
    begin = 0
    for paragraph in text.split("\n\n"):
        if paragraph.strip() and begin - place >= BEGINNING:
            place = begin
            passage = text[begin : begin + 16 * tokens].strip()
            offsets = target.tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            if len(offsets) > tokens:  # shorter ones are at the end of the text
                yield passage[: offsets[tokens - 1][1]]
        begin += len(paragraph) + 2


def _beginning(target: Target) -> tuple[list[int], dict[str, Any]]:
    """Return tokens after which the target writes a prompt, and sampling parameters that end it."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}; `fit` needs one.")
    if tokenizer.chat_template is None:
        return list(tokenizer("")["input_ids"]), {"max_new_tokens": PromptSettings.prompt_tokens, "ignore_eos": True}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(chat).partition(MARK)
    prefix, end = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after))
    return prefix, {"max_new_tokens": OWN_TOKENS, "stop_token_ids": tuple(end[:1])}


def _start(prefix: list[int], target: Target, seed: int) -> list[int]:
    """Return the prefix, or a random token that is not special if it is empty."""
    if prefix:
        return prefix
    assert target.tokenizer is not None
    special = set(target.tokenizer.all_special_ids)
    usable = [token for token in range(min(len(target.tokenizer), target.vocab_size)) if token not in special]
    return [random.Random(seed).choice(usable)]


def _text(target: Target, ids: list[int]) -> str:
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(ids, skip_special_tokens=True)).strip()
