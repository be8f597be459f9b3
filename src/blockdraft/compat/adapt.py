"""What users of other implementations hold, turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from blockdraft.drafters import Drafter, NetworkDrafter, drafter_of
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.types import Drafting

MOST_ROWS = 8  # that are decoded together


def drafter_for(source: DFlashNetwork | NetworkDrafter, target: Target) -> NetworkDrafter:
    """A drafter for this target. A network is moved to the target's device and dtype; a drafter stays as it is."""
    return source.adapted(target) if isinstance(source, NetworkDrafter) else drafter_of(source, target)


def engine_for(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    block_size: int | None = None,
) -> Engine:
    """An engine for these prompts alone: it takes no more memory than they need."""
    rows = min(len(prompts), MOST_ROWS)
    longest = max(map(len, prompts)) + max_new_tokens + 1 + drafter.block_size
    return Engine(target, drafter, rows, Drafting(block_size), cache_tokens=rows * target.row_slots(longest))


def stops_of(token_ids: Iterable[int], target: Target) -> tuple[int, ...]:
    """Those of the stop tokens that the target can yield. The calls that we stand in for take any, such as -1 for none,
    while `SamplingParams` refuses what cannot be."""
    return tuple(int(token) for token in token_ids if 0 <= int(token) < target.vocab_size)


def check_token_ids(input_ids: Tensor) -> None:
    """Refuse what is no `[B, L]` tensor of token ids.

    Raises:
        ValueError: Another shape, or numbers that are not whole.
    """
    if input_ids.ndim != 2:
        shape = list(input_ids.shape)
        raise UsageError(f"input_ids has the shape {shape}; give [batch, length], for one prompt [1, length].")
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise UsageError(f"input_ids is of {input_ids.dtype}; give token ids, such as torch.int64.")


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The token ids of each row of `[B, L]` without those that the mask, of the same shape, hides.

    Raises:
        ValueError: No row, a mask of another shape, or one that hides a whole row or tokens between others.
    """
    rows: list[list[int]] = input_ids.tolist()
    if not rows:
        raise UsageError("input_ids holds no prompt; give at least one.")
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        shapes = f"{list(attention_mask.shape)} and input_ids {list(input_ids.shape)}"
        raise UsageError(f"attention_mask has the shape {shapes}; they must be equal.")
    prompts = []
    for number, (row, kept) in enumerate(zip(rows, attention_mask.bool().tolist(), strict=True)):
        if True not in kept:
            raise UsageError(f"Row {number}'s attention_mask hides the whole prompt; leave at least one token.")
        first, count = kept.index(True), sum(kept)
        if not all(kept[first : first + count]):
            raise UsageError(f"Row {number}'s attention_mask hides tokens between others; only padding can be hidden.")
        prompts.append(row[first : first + count])
    return prompts
