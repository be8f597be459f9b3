"""Target layers whose outputs a drafter reads, and those outputs, the hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blockdraft.decode.proposal import chain
from blockdraft.errors import UsageError
from blockdraft.targets import Target

# Tokens per forward pass, padding included. Larger ones exceed the caches of a CPU, and have much padding on a GPU.
CPU_TOKENS, GPU_TOKENS = 1024, 16_384


def target_hidden_states(target: Target, target_layers: Sequence[int], tokens: Sequence[Tensor]) -> list[Tensor]:
    """Compute the hidden states of some documents without gradients.

    Args:
        target_layers: 0-based layers whose outputs are read; `target.num_layers` is the input of the head.
        tokens: `[S]` int64 for each document; lengths may differ.

    Returns:
        `[S, m * H]` for each document, in the target's dtype and on its device, the m layers concatenated in their
        order. Those of a forward pass share the memory of its padded batch.

    Raises:
        UsageError: The target lacks a layer, or a document is longer than its context.
    """
    check_target_layers(target, target_layers)
    longest = max(map(len, tokens))
    if longest > target.max_context:
        raise UsageError(
            f"A document has {longest} tokens and the target's context is {target.max_context}; make the data again "
            f"with --length {target.max_context}."
        )
    hidden_states: dict[int, Tensor] = {}
    for group in batches(list(map(len, tokens)), CPU_TOKENS if target.device.type == "cpu" else GPU_TOKENS):
        hidden_states |= zip(group, _of_one_forward(target, target_layers, [tokens[i] for i in group]), strict=True)
    return [hidden_states[i] for i in range(len(tokens))]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group indices by similar lengths: at most `most` tokens, padding included, or a single document."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and lengths[group[0]] * (len(group) + 1) > most:
            yield group
            group = []
        group.append(i)
    yield group


def _of_one_forward(target: Target, target_layers: Sequence[int], tokens: Sequence[Tensor]) -> list[Tensor]:
    padded = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
    for row, document in zip(padded, tokens, strict=True):
        row[: len(document)] = document
    proposal = chain(padded.to(target.device))
    cache = target.new_cache(*padded.shape)
    first = torch.zeros(len(tokens), dtype=torch.int64, device=target.device)  # no logits are needed; one is the least
    output = target.forward(proposal.tokens, proposal.parents, cache, target_layers, logits_at=first)
    assert output.hidden_states is not None
    hidden_states = output.hidden_states.to(target.dtype)
    return [row[: len(document)] for row, document in zip(hidden_states, tokens, strict=True)]


def chosen_target_layers(target_layers: int | tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Choose the target layers.

    Args:
        target_layers: The layers themselves, or their number. A number of layers is spread from layer 1 to the third
            from the end, as in z-lab's drafters, or wider in a target of few layers. None is 5, or all layers of a
            target that has fewer.

    Raises:
        UsageError: The target has fewer layers than that.
    """
    count = min(5, num_layers) if target_layers is None else target_layers
    if not isinstance(count, int):
        return count
    if not 1 <= count <= num_layers:
        raise UsageError(
            f"target_layers is {count}, a number of layers, but the target has {num_layers}; give at most that, or "
            "name the layers, as in --target-layers 0,1 or, for layer 0 alone, --target-layers 0,"
        )
    if count == 1:
        return (num_layers // 2,)
    ranges = ((1, num_layers - 3), (0, num_layers - 2), (0, num_layers - 1))
    first, last = next((first, last) for first, last in ranges if last - first + 1 >= count)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def check_target_layers(target: Target, target_layers: Sequence[int]) -> None:
    """Raise UsageError unless there are target layers and the target has them."""
    outside = [layer for layer in target_layers if not 0 <= layer <= target.num_layers]
    if outside or not target_layers:
        raise UsageError(
            f"target_layers are {list(target_layers)} and the target has {target.num_layers} layers; name one or more "
            f"of 0 to {target.num_layers - 1}, or {target.num_layers} for the input of the head."
        )
