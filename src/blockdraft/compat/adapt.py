"""Arguments of other projects' interfaces, converted to those of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from blockdraft.drafters import Drafter, NetworkDrafter, drafter_of
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.types import Drafting

MOST_ROWS = 8  # most prompts that are decoded together


def drafter_for(source: DFlashNetwork | NetworkDrafter, target: Target) -> NetworkDrafter:
    """A drafter for this target. A network is moved to the target's device and dtype, a drafter is not."""
    return source.adapted(target) if isinstance(source, NetworkDrafter) else drafter_of(source, target)


def engine_for(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    block_size: int | None = None,
) -> Engine:
    """An engine with no more memory than these prompts need.

    Args:
        prompts: Token ids of each prompt.
        max_new_tokens: Most tokens of an answer.
        block_size: Most tokens of a block, anchor included; None is the drafter's own.
    """
    rows = min(len(prompts), MOST_ROWS)
    longest = max(map(len, prompts)) + max_new_tokens + 1 + drafter.block_size
    return Engine(target, drafter, rows, Drafting(block_size), cache_tokens=rows * target.row_slots(longest))


def stops_of(token_ids: Iterable[int], target: Target) -> tuple[int, ...]:
    """The stop tokens that are in the target's vocabulary.

    Other projects accept any number, such as -1 for no stop token, which `SamplingParams` refuses.
    """
    return tuple(int(token) for token in token_ids if 0 <= int(token) < target.vocab_size)


def check_token_ids(input_ids: Tensor) -> None:
    """Check that `input_ids` is a `[B, L]` tensor of token ids.

    Raises:
        UsageError: The shape is another, or the dtype is not an integer type.
    """
    if input_ids.ndim != 2:
        shape = list(input_ids.shape)
        raise UsageError(f"input_ids has the shape {shape}; it must be [batch, length], for one prompt [1, length].")
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise UsageError(f"input_ids is of {input_ids.dtype}; it must be of an integer type, such as torch.int64.")


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The token ids of each row of `input_ids` without its padding.

    Args:
        input_ids: `[B, L]`.
        attention_mask: `[B, L]`, 0 at padding; None is no padding.

    Raises:
        UsageError: There is no row, or the mask has another shape, hides a whole row, or hides tokens between others.
    """
    rows: list[list[int]] = input_ids.tolist()
    if not rows:
        raise UsageError("input_ids holds no prompt; give at least one.")
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        shapes = f"{list(attention_mask.shape)} and input_ids {list(input_ids.shape)}"
        raise UsageError(f"attention_mask has the shape {shapes}; the shapes must be equal.")
    prompts = []
    for number, (row, kept) in enumerate(zip(rows, attention_mask.bool().tolist(), strict=True)):
        if True not in kept:
            raise UsageError(f"attention_mask hides all of row {number}; leave at least one token.")
        first, count = kept.index(True), sum(kept)
        if not all(kept[first : first + count]):
            raise UsageError(f"attention_mask hides tokens inside row {number}; hide only padding at its ends.")
        prompts.append(row[first : first + count])
    return prompts
