"""Batches of prompts as tensors, which other projects' interfaces take and return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters import Drafter
from blockdraft.engine import Completion, Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.types import Drafting, SamplingParams

MAX_BATCH_SIZE = 8


def check_token_ids(input_ids: Tensor) -> None:
    """Raise a UsageError unless `input_ids` is a `[B, L]` tensor of an integer type."""
    if input_ids.ndim != 2:
        shape = list(input_ids.shape)
        raise UsageError(f"input_ids must be of shape [batch, length], for one prompt [1, length], got {shape}.")
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise UsageError(f"input_ids must be of an integer type, such as torch.int64, got {input_ids.dtype}.")


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the token ids of each prompt without its padding, where the `[B, L]` mask is 0."""
    rows: list[list[int]] = input_ids.tolist()
    if not rows:
        raise UsageError("input_ids holds no prompt; give at least one.")
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        raise UsageError(
            f"attention_mask must be of input_ids' shape, {list(input_ids.shape)}, got {list(attention_mask.shape)}."
        )
    prompts = []
    for number, (row, visible) in enumerate(zip(rows, attention_mask.bool().tolist(), strict=True)):
        if True not in visible:
            raise UsageError(f"attention_mask hides all of row {number}; leave at least one token.")
        first, count = visible.index(True), sum(visible)
        if not all(visible[first : first + count]):
            raise UsageError(f"attention_mask hides tokens inside row {number}; hide only padding at its ends.")
        prompts.append(row[first : first + count])
    return prompts


def stop_ids(eos_token_id: int | Iterable[int] | None, target: Target) -> tuple[int, ...]:
    """Return the stop tokens in the target's vocabulary. Other projects accept any number, such as -1 for none."""
    ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
    return tuple(int(token) for token in ids if 0 <= int(token) < target.vocab_size)


def sampling(do_sample: bool | None, **given: float | None) -> dict[str, Any]:
    """Return temperature, top-k and so on for the engine. None is the default of transformers."""
    if not do_sample:
        return {}
    if given["temperature"] == 0:
        raise UsageError("temperature is 0 with do_sample=True; use do_sample=False to decode greedily.")
    return {"temperature": 1.0, **{name: value for name, value in given.items() if value is not None}}


def decode_batch(
    target: Target,
    drafter: Drafter,
    input_ids: Tensor,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    pad_token: int,
    drafting: Drafting = Drafting(None),  # noqa: B008 (frozen)
    streamer: Any = None,
) -> tuple[Tensor, list[Completion]]:
    """Decode a batch with an engine that has just enough memory for it.

    Args:
        input_ids: `[B, L]`, the prompts with their padding.
        prompts: Token ids of each prompt without padding.
        params: Sampling parameters; row i uses `seed + i`.
        pad_token: Filler of responses that are shorter than the longest.
        drafting: How far to draft; by default whole blocks.
        streamer: A streamer of transformers, for one prompt.

    Returns:
        `[B, L + longest]` int64 on the device of `input_ids`, the prompts followed by the responses; and the
        completions, none of them with a streamer.
    """
    batch_size = min(len(prompts), MAX_BATCH_SIZE)
    longest = max(map(len, prompts)) + params.max_new_tokens + 1 + drafter.block_size
    slots = batch_size * target.row_slots(longest)
    engine = Engine(target, drafter, batch_size, drafting, cache_tokens=slots)
    completions = list[Completion]()
    count = len(prompts)
    seeds = torch.randint(2**62, (count,)) if params.seed is None else params.seed + torch.arange(count)
    rows = [replace(params, seed=seed) for seed in seeds.tolist()]
    if streamer is None:
        completions = [completion.checked() for completion in engine.generate(prompts, rows)]
        responses = [completion.token_ids for completion in completions]
    elif count == 1:
        streamer.put(input_ids.cpu())
        responses = [[]]
        for chunk in engine.stream(prompts[0], rows[0]):
            if chunk.checked().token_ids:
                streamer.put(torch.tensor(chunk.token_ids))
            responses[0] += chunk.token_ids
        streamer.end()
    else:
        raise UsageError(f"inputs holds {count} prompts; a streamer takes one, so call generate for each.")
    width = max(map(len, responses))
    padded = [[*response, *[pad_token] * (width - len(response))] for response in responses]
    return torch.cat([input_ids.long(), torch.tensor(padded, device=input_ids.device)], dim=1), completions
