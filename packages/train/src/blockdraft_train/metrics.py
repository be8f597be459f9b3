"""Metrics of a run: loss, accuracies and accepted lengths from the sums of a step, and tau measured by the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine, mean_tau
from blockdraft.engine.text import encode
from blockdraft.errors import NumbersError, UsageError
from blockdraft.targets import Target
from blockdraft.types import Drafting, Prompt, SamplingParams
from blockdraft_train.batches import Batch, Documents
from blockdraft_train.loss import Sums, term_weights
from blockdraft_train.variant import Variant

BATCH_SIZE = 8  # responses decoded at a time when tau is measured


def total_weights(variant: Variant[Any, Any, Any], batches: Iterable[Batch]) -> list[float]:
    """Return the total weight of the taught slots for each term of the loss. `batches` are those of all processes."""
    taught = [batch.tensors.taught_BAK for batch in batches]
    return [
        max(sum(float(term_weights(variant, name, mask).sum()) for mask in taught), 1e-9) for name in variant.factors()
    ]


def total_loss(variant: Variant[Any, Any, Any], terms_T: Tensor, weights: Sequence[float]) -> Tensor:
    """Compute the loss, a scalar, from the sum of each term and its total weight."""
    factors = variant.factors().values()
    return torch.stack([f * term / w for f, term, w in zip(factors, terms_T, weights, strict=True)]).sum()


def step_metrics(
    variant: Variant[Any, Any, Any], sums: Sequence[Sums], weights: Sequence[float], accelerator: Accelerator
) -> dict[str, Any]:
    """Compute metrics over all processes.

    Args:
        sums: Sums that this process computed.
        weights: From `total_weights`.
    """
    parts = [torch.cat([field.double().flatten() for field in part]) for part in sums]
    summed = cast(Tensor, accelerator.reduce(torch.stack(parts).sum(dim=0), "sum")).cpu()
    slots, names, counted = len(sums[0].right_K), list(variant.factors()), variant.counted
    sizes = [len(names), slots, slots, len(counted), 1, 1]
    terms, right, taught, counts, accepted, blocks = summed.split(sizes)
    metrics: dict[str, Any] = {"loss": float(total_loss(variant, terms, weights))}
    if len(names) > 1:
        metrics |= {f"loss_{name}": float(t) / w for name, t, w in zip(names, terms, weights, strict=True)}
    metrics["accuracy"] = [round(float(r / t), 4) if t else None for r, t in zip(right, taught, strict=True)]
    if taught.any():
        metrics |= {name: float(count / taught.sum()) for name, count in zip(counted, counts, strict=True)}
    metrics["accepted_length"] = float(accepted / blocks) if blocks else None
    return metrics


def not_finite(target_outputs: Iterable[Tensor], done: int, loss: float, norm: float) -> NumbersError:
    """Return the error for a step whose loss or gradient norm is not finite.

    Args:
        target_outputs: What the target computed at this step; the error blames the target if it is not finite.
        done: Number of steps before it.
    """
    checkpoint = " The newest checkpoint stays as it is." if done else ""
    if all(bool(output.isfinite().all()) for output in target_outputs):
        return NumbersError(
            f"Loss {loss} and gradient norm {norm} at step {done + 1} are not both finite; lower the learning rate, or "
            f"use dtype float32.{checkpoint}"
        )
    return NumbersError(
        f"The target computed numbers that are not finite at step {done + 1}, so nothing can be learned from it; load "
        f"it with --target-dtype float32, or, if it is float32 already, copy its weights again.{checkpoint}"
    )


def held_out_prompts(documents: Documents, held_out: Sequence[int], count: int) -> list[list[int]]:
    """Return prompts from the first `count` held-out documents: the tokens before the first supervised one.

    A document that begins with a supervised token gives this token as its prompt.
    """
    prompts = []
    for index in held_out[:count]:
        document = documents[index]
        prompts.append(document.tokens[: max(int(document.supervised.int().argmax()), 1)].tolist())
    return prompts


def encode_prompts(prompts: Sequence[Prompt], target: Target, tokens: int) -> list[list[int]]:
    """Return the token ids of the prompts.

    Raises:
        UsageError: A prompt and a response of `tokens` tokens exceed the target's context.
    """
    encoded = [encode(prompt, target) for prompt in prompts]
    longest = max(map(len, encoded), default=0)
    if longest + tokens > target.max_context:
        raise UsageError(
            f"A prompt has {longest} tokens and eval_tokens is {tokens}; together they exceed the target's context of "
            f"{target.max_context}. Shorten the prompt, or lower eval_tokens."
        )
    return encoded


def measure_tau(
    drafter: Path, target: Target, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0
) -> float:
    """Return tau over all prompts, with the drafter in this folder and whole blocks.

    Args:
        tokens: Maximum number of tokens of a response.
        temperature: Sampling temperature; 0 is greedy. Prompt i is decoded with seed i.
    """
    engine = Engine(target, load_drafter(drafter, target=target), BATCH_SIZE, Drafting(block_size=None))
    params = [
        SamplingParams(min(tokens, target.max_context - len(prompt)), temperature, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    completions = engine.generate([list(prompt) for prompt in prompts], params)
    return mean_tau([completion.stats for completion in completions])
