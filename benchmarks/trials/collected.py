"""What decoding knew behind its anchors, kept beside the texts that it wrote, for `refill` to learn from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.diffusion.kept import whole_lines
from benchmarks.trials.overheard import Rejected
from blockdraft.cli.display import progress
from blockdraft.data.documents import LOOPS, Document, read_data, tokenizer_fingerprint
from blockdraft.data.writer import DataWriter
from blockdraft.engine import Engine, loops
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

LIKELY = 4  # tokens of a law whose mean embedding is taken
WINDOW = 16  # tokens, the anchor the last of them, by which a place of a text is known again


class Known(NamedTuple):
    """What is known behind an anchor: the likeliest tokens at m places.

    Attributes:
        ids, chances: `[m, LIKELY]`, int64 and float32.
    """

    ids: Tensor
    chances: Tensor


def known_of(left: Rejected) -> Known:
    likely = [after[:LIKELY] for after in left.after]
    ids, chances = ([[pair[at] for pair in each] for each in likely] for at in (0, 1))
    return Known(torch.tensor(ids).long().view(-1, LIKELY), torch.tensor(chances).float().view(-1, LIKELY))


def collect(listening: Any, drafter: Any, prompts: Sequence[Sequence[int]], tokens: int, out: Path) -> None:
    """Answer prompts, and write a line of JSON for each: the tokens, how many of them are the prompt's, and what was
    known behind anchors: place, ids and chances of each. What is there already stays.

    Args:
        listening: The target, listened at.
        drafter: Of which `told` is set here: it is called with the number of committed tokens and what is known.
        tokens: Most of an answer.
    """
    done = len(whole_lines(out))
    with (
        progress("answers to learn from") as tell,
        out.open("a", encoding="utf-8") as file,
        Engine(listening, drafter, 1) as engine,
    ):
        for number, prompt in enumerate(prompts[done:], done + 1):
            found = list[tuple[int, Known]]()
            drafter.told = lambda length, known, found=found: found.append((length, known))
            [one] = engine.generate([list(prompt)], SamplingParams(tokens))
            known = [
                [place, known.ids.tolist(), [[round(chance, 4) for chance in row] for row in known.chances.tolist()]]
                for place, known in found
                if len(known.ids)
            ]
            line = {"tokens": [*prompt, *one.checked().token_ids], "prompt": len(prompt), "known": known}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            tell(f"answers to learn from, {out.stem}", number, len(prompts))


def prompts_of(data: Path, most: int, room: int) -> list[list[int]]:
    """The prompts of the first documents that have one of at most `room` tokens, which end where an answer begins."""
    found = []
    for document in read_data(data):
        prompt = document.tokens[: int(document.supervised.int().argmax())].tolist()
        if prompt and len(prompt) <= room:
            found.append(prompt)
        if len(found) == most:
            break
    return found


def as_data(collected: Path, target: Target, out: Path) -> None:
    """Write what was collected as token data, once; answers that loop are left out."""
    if out.exists():
        return
    assert target.tokenizer is not None
    unfinished = out.with_name(f"{out.name}.partial")
    writer = DataWriter(unfinished, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for row, line in enumerate(whole_lines(collected)):
        if row in writer.done:
            continue
        one = json.loads(line)
        tokens, prompt = one["tokens"], one["prompt"]
        looping = loops(tokens[prompt:])
        document = Document(torch.tensor(tokens), torch.arange(len(tokens)) >= prompt)
        writer.add(row, [] if looping else [document], LOOPS if looping else None)
    writer.finish()
    unfinished.replace(out)


@lru_cache(maxsize=1)
def known_places(collected: Path) -> dict[tuple[int, ...], Known]:
    """What is known behind anchors, by their place and the tokens up to them."""
    found = {}
    for line in whole_lines(collected):
        one = json.loads(line)
        for place, ids, chances in one["known"]:
            found[key(place, one["tokens"][: place + 1])] = Known(torch.tensor(ids), torch.tensor(chances))
    return found


def key(place: int, tokens: Sequence[int]) -> tuple[int, ...]:
    return (place, *tokens[-WINDOW:])
