"""Choice of the mask token, which stands for unknown tokens in a block."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft_train.data.documents import TokenData

RESERVED = re.compile(r"[<\[].*(reserved|unused|extra_id|placeholder).*[>\]]", re.IGNORECASE)
SMALLEST_RMS = 1e-4  # root mean square of an embedding; smaller ones vanish in the norms of the draft layers
COST = "outputs stay the same, but draft tokens right after this token may be worse"


class MaskToken(NamedTuple):
    """A chosen mask token.

    Attributes:
        id: Token id.
        why: Sentence on the choice; None if there is nothing to report.
    """

    id: int
    why: str | None = None


def mask_token(target: Target, wanted: int | None = None, data: TokenData | None = None) -> MaskToken:
    """Choose the mask token.

    It is the requested token, else the first that exists of: the tokenizer's mask token, an entry of the embedding that
    no token uses, a reserved token, a token that never occurs in the data.

    Args:
        wanted: Token id; None leaves the choice to this function.
        data: Training data; None counts no occurrences.

    Raises:
        UsageError: The wanted token ends outputs or lies outside the vocabulary, or every token begins or ends texts.
    """
    size, tokenizer = target.vocab_size, target.tokenizer
    if wanted is not None:
        if wanted >= size:
            raise UsageError(
                f"mask_token_id is {wanted} and the target's vocabulary has {size} tokens, 0 to {size - 1}; name one "
                "of these that never occurs in text, or leave it out to have one chosen."
            )
        if wanted in target.eos_token_ids:
            raise UsageError(
                f"mask_token_id is {wanted}, which ends outputs; name one that never occurs in text, or leave it out."
            )
        occurrences = int(_counts(data, size)[wanted])
        return MaskToken(wanted, f"it occurs {occurrences} times in the data; {COST}" if occurrences else None)
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    names = {token: name for name, token in vocabulary.items()}
    special = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    excluded = {*target.eos_token_ids, *(token for token in special if token is not None)}
    free = [token for token in range(size) if token not in excluded]
    if not free:
        raise UsageError(
            f"Every token of the target's vocabulary of {size} begins or ends texts; name a mask token (mask_token_id)."
        )
    own = None if tokenizer is None else tokenizer.mask_token_id
    if own is not None and own < size:
        return MaskToken(own)
    first_unused = max(names, default=-1) + 1
    entries = [*range(first_unused, size), *reversed(range(first_unused))]
    for token in entries if names else ():
        if token not in names and _is_nonzero(target, token):
            return MaskToken(token, "an entry of the embedding that no token uses")
    times = _counts(data, size).tolist()
    reserved = [token for token, name in sorted(names.items()) if RESERVED.fullmatch(name)]
    others = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.unk_token_id]
    for token in [*reserved, *others]:
        if token in free and not times[token] and _is_nonzero(target, token):
            return MaskToken(token, f"{names.get(token)!r}, which the data do not hold")
    rarest = sorted(free, key=lambda token: (times[token], -token))
    token = next((token for token in rarest if _is_nonzero(target, token)), rarest[0])
    occurs = f"the rarest in the data, {times[token]} times" if times[token] else "which the data do not hold"
    return MaskToken(token, f"{names.get(token)!r}, {occurs}, because every entry of the embedding is used; {COST}")


def usual_mask_tokens(target: Target) -> list[int]:
    """Return tokens that drafters use as masks: mask, padding, and the first and last unused and reserved tokens.

    Without a tokenizer there are none.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        return []
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    unused = [token for token in range(target.vocab_size) if token not in names]
    reserved = [token for token, name in sorted(names.items()) if RESERVED.fullmatch(name)]
    tokens = [tokenizer.mask_token_id, *unused[:1], *reserved[:1], tokenizer.pad_token_id, tokenizer.unk_token_id]
    tokens += [*unused[-1:], *reserved[-1:]]
    return list(dict.fromkeys(token for token in tokens if token is not None and token < target.vocab_size))


def _counts(data: TokenData | None, size: int) -> Tensor:
    """Return the number of occurrences of each token, `[size]` int64."""
    counts = torch.zeros(size, dtype=torch.int64)
    for document in data or ():
        counts += torch.bincount(document.tokens, minlength=size)[:size]
    return counts


def _is_nonzero(target: Target, token: int) -> bool:
    """Return whether a token's embedding is not zero. With zero, the first draft layer could not tell slots apart."""
    embedding = target.embed(torch.tensor([token], device=target.device)).float()
    return float(embedding.square().mean().sqrt()) > SMALLEST_RMS
