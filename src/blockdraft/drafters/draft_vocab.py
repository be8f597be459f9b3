"""Draft vocabularies given by users: the tokens that a drafter with the target's output projection may draft."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from blockdraft.errors import UsageError, describe
from blockdraft.targets import Target
from blockdraft.text_files import read_json

log = logging.getLogger(__name__)

# A number, a file, or the token ids.
DraftVocab: TypeAlias = int | str | Path | Sequence[int]


def read_draft_vocab(given: DraftVocab, target: Target) -> Tensor:
    """Return the tokens of a draft vocabulary, `[Vd]` int64, ascending.

    Log a warning if it has all tokens, or end tokens only.

    Args:
        given: Number of tokens, in the order of their ids and including the target's end tokens (tokenizers give the
            lowest ids to their first merges); a file of token ids, a JSON list or a tensor saved by torch (SGLang's
            `--speculative-token-map`); or the token ids.

    Raises:
        UsageError: An unreadable file, or tokens that the target does not have.
    """
    read, size = check_draft_vocab(given, target.vocab_size), target.vocab_size
    ends = [end for end in sorted(target.eos_token_ids) if end < size]
    if isinstance(read, int):
        read = [*ends, *(token for token in range(read) if token not in ends)][:read]
    kept = sorted(set(read))
    if len(kept) == size:
        log.warning("The draft vocabulary leaves out none of the target's %d tokens, so drafts get no cheaper.", size)
    if set(kept) <= set(ends):
        log.warning("The draft vocabulary has end tokens only, so that nothing else can be drafted.")
    return torch.tensor(kept)


def check_draft_vocab(given: DraftVocab, size: int | None = None) -> int | list[int]:
    """Return the number of tokens, or the listed ids, of a draft vocabulary as in `read_draft_vocab`.

    Args:
        size: Number of the target's tokens; None, if unknown, skips the checks that depend on it.

    Raises:
        UsageError: As `read_draft_vocab`.
    """
    number = _number(given)
    if number is not None:
        if number < 1 or (size is not None and number > size):
            limit = "at least 1" if size is None else f"from 1 to {size}, the number of the target's tokens"
            raise UsageError(f"draft_vocab must be {limit}, got {given}.")
        return number
    source, listed = "draft_vocab", cast(Any, given)
    if isinstance(given, str | Path):
        source, listed = str(given), _read(given)
    ids = "0 or more" if size is None else f"from 0 to {size - 1}"
    listed = listed.tolist() if hasattr(listed, "tolist") else listed
    is_list = isinstance(listed, Iterable) and not isinstance(listed, str | Mapping)
    listed = list(listed) if is_list else [listed]
    for token in listed:
        if not is_list or isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"{source} must be a list of token ids, {ids}, got {token!r}.")
        if int(token) < 0 or (size is not None and int(token) >= size):
            raise UsageError(f"{source} holds the token id {token}; the target's are {ids}.")
    if not listed:
        raise UsageError(f"{source} holds no token ids; list one or more, {ids}.")
    return [int(token) for token in listed]


def _number(given: DraftVocab) -> int | None:
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    if isinstance(given, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", given):
        return int(given)
    return None


def _read(given: str | Path) -> Any:
    file = Path(given)
    if not os.path.isfile(file):  # unlike Path's, it accepts names that are too long
        raise UsageError(
            f"draft_vocab is {str(given)[:200]!r}, which is no file; give a number of tokens, or a JSON or .pt file "
            "with a list of token ids."
        )
    try:
        if file.suffix == ".pt":
            return torch.load(file, map_location="cpu", weights_only=True)
        return read_json(file)
    except Exception as error:  # torch raises many kinds
        raise UsageError(
            f"draft_vocab is {given}, which cannot be read as a list of token ids ({describe(error)}); give a JSON "
            "file with a list, or a .pt file with a tensor."
        ) from error
