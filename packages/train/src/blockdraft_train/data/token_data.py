"""Shards of tokens that drafters are trained on: what is written while serving, and read by training.

`Documents` of a shard lie one after the other; see `token_shard`. The manifest beside the shards, `data.json`, counts
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.folders import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
MANIFEST = "data.json"
HIDDEN_STATES_MANIFEST = "hidden_states.json"


def token_shard(
    tokens: Sequence[Tensor],
    supervised: Sequence[Tensor],
    rows: Sequence[int],
    cut: Sequence[bool],
    left_out: Sequence[tuple[int, int]] = (),
) -> dict[str, Tensor]:
    """Return the tensors of a shard.

    Args:
        tokens, supervised: `[S]` int64 or int32, and bool, of each document.
        rows: Number of each document's source record.
        cut: Whether each document was cut to the maximum length.
        left_out: Records that gave no document, each with the number of its reason.
    """
    nothing = torch.empty(0, dtype=torch.int32)
    return {
        "tokens": torch.cat([nothing, *(part.int() for part in tokens)]),
        "supervised": torch.cat([nothing.bool(), *supervised]),
        "offsets": torch.tensor([0, *map(len, tokens)]).cumsum(0),
        "rows": torch.tensor(rows, dtype=torch.int64),
        "cut": torch.tensor(cut, dtype=torch.bool),
        "left_out": torch.tensor(left_out, dtype=torch.int64).reshape(-1, 2),
    }


def shard_name(number: int) -> str:
    return f"tokens-{number:05}.safetensors"


def hidden_states_name(number: int) -> str:
    return f"hidden-states-{number:05}.safetensors"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of the vocabulary, that is of the token that each id stands for."""
    return fingerprint(sorted(tokenizer.get_vocab().items()))
