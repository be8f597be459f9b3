"""Draft vocabularies given by users: the tokens that a drafter with the target's output projection may guess."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.targets import Target

DraftVocab: TypeAlias = int | str | Path | Sequence[int]


def read_draft_vocab(given: DraftVocab, target: Target) -> Tensor:
    """The tokens of a draft vocabulary, `[Vd]` int64, ascending.

    Args:
        given: Number of tokens, taken in the order of their ids, which tokenizers give to what they merged first, with
            the target's end tokens among them; a file of token ids, a JSON list or a tensor saved by torch (SGLang's
            `--speculative-token-map`); or the token ids.

    Raises:
        UsageError: An unreadable file, or tokens that the target does not have.
    """
    size, source = target.vocab_size, "draft_vocab"
    if isinstance(given, str) and given.strip().isdecimal():
        given = int(given)
    if isinstance(given, int):
        if not 1 <= given <= size:
            raise UsageError(f"draft_vocab is {given}; it must be from 1 to {size}, the number of the target's tokens.")
        ends = [end for end in sorted(target.eos_token_ids) if end < size]
        first = [*ends, *(token for token in range(given) if token not in ends)]
        return torch.tensor(sorted(first[:given]))
    if isinstance(given, str | Path):
        source, given = str(given), _read(Path(given))
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in given)
    tokens = sorted(set(given)) if whole else []
    if not tokens:
        raise UsageError(f"{source} holds no list of token ids; give one or more whole numbers from 0 to {size - 1}.")
    if tokens[0] < 0 or tokens[-1] >= size:
        wrong = tokens[0] if tokens[0] < 0 else tokens[-1]
        raise UsageError(f"{source} holds the token id {wrong}; the target has the ids 0 to {size - 1}.")
    return torch.tensor(tokens)


def _read(file: Path) -> Sequence[int]:
    try:
        if file.suffix == ".pt":
            saved = torch.load(file, map_location="cpu", weights_only=True)
            found = saved.tolist() if isinstance(saved, Tensor) and saved.ndim == 1 else saved
        else:
            found = json.loads(file.read_text())
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(
            f"draft_vocab is {file}, which cannot be read as a list of token ids ({error}); give a number of tokens, a "
            "JSON file with a list, or a .pt file with a tensor of one dimension."
        ) from error
    return found if isinstance(found, list) else []
