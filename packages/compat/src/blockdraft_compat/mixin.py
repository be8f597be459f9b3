"""A mixin with a `generate` like that of transformers, which drafts with DFlash."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.drafters import NOISE_SCHEDULE, NOISE_SCHEDULES, Drafter, load_drafter
from blockdraft.engine import Stats
from blockdraft.errors import UsageError
from blockdraft.targets import Target, as_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_compat.adapt import check_token_ids, decode_batch, sampling, stop_ids, without_padding

NEUTRAL = {"temperature": 1, "top_p": 1}  # values that change nothing


@dataclass(frozen=True)
class DFlashConfig:
    """Settings of drafting. None of them changes the output.

    Attributes:
        block_size: Block size, anchor included; None is the size the drafter was trained for.
        diffusion_steps: Draft passes per block. Each pass fixes its most probable draft tokens, which the next pass
            sees. None is the drafter's own number, usually 1.
        noise_schedule: Curve of the share of draft tokens fixed after each pass, "cosine" or "linear".
        drafter: As in `load_drafter`; None is the bundled one.
    """

    block_size: int | None = None
    diffusion_steps: int | None = None
    noise_schedule: str = NOISE_SCHEDULE
    drafter: str | Path | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise UsageError(f"block_size must be at least 1 (no drafting), got {self.block_size}.")
        if self.diffusion_steps is not None and self.diffusion_steps < 1:
            raise UsageError(f"diffusion_steps must be at least 1, got {self.diffusion_steps}.")
        if self.noise_schedule not in NOISE_SCHEDULES:
            raise UsageError(f"noise_schedule must be one of {sorted(NOISE_SCHEDULES)}, got {self.noise_schedule!r}.")


class DFlashGenerationMixin:
    """Gives a causal language model a `generate` that drafts. The output is the model's own.

    Args:
        base_model: A causal language model of transformers, or a target from `load_target`.
        config: Settings of drafting.

    Raises:
        UsageError: The drafter does not fit the model, or was trained for smaller blocks.

    Attributes:
        last_stats: Statistics of the last call, one for each prompt.
    """

    def __init__(self, base_model: PreTrainedModel | Target, config: DFlashConfig | None = None) -> None:
        self.dflash_config = config = config or DFlashConfig()
        self.target = as_target(base_model)
        self.last_stats: list[Stats] = []
        self.drafter = cast(Any, load_drafter(config.drafter or "bundled", target=self.target))
        self.drafter.noise_schedule = config.noise_schedule  # which DFlash and its relatives read
        if config.block_size is not None and config.block_size > self.drafter.block_size:
            raise UsageError(
                f"block_size is {config.block_size}; this drafter was trained for at most {self.drafter.block_size}."
            )
        self._plain: Drafter = load_drafter("none", target=self.target)

    @property
    def base_model(self) -> PreTrainedModel:
        """The model of transformers, unless another backend runs the target."""
        model = self.target.model
        if model is None:
            raise AttributeError(f"The target is a {type(self.target).__name__}, which has no model of transformers.")
        return model

    @property
    def config(self) -> Any:
        return self.base_model.config

    @property
    def generation_config(self) -> Any:
        return self.base_model.generation_config

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = SamplingParams.max_new_tokens,
        use_dflash: bool = True,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue a batch of prompts.

        Args:
            input_ids: `[B, L]` integers.
            attention_mask: `[B, L]`, 0 at padding, which may be left or right of a prompt; None is no padding.
            max_new_tokens: Maximum number of new tokens.
            use_dflash: Whether to draft; plain decoding returns the same tokens.
            do_sample: Whether to sample; False decodes greedily.
            temperature, top_k, top_p: Sampling parameters; None is 1.0, all tokens and 1.0. Those in the model's
                `generation_config` are ignored.
            eos_token_id: The only tokens that end a response early; None is the model's own.
            pad_token_id: Filler of responses that end early; None is the model's own, or else its end token.
            seed: Row i samples with `seed + i`; None takes the seeds from torch's generator.

        Returns:
            `[B, L + longest]` int64 on the device of `input_ids`: the prompts with their padding, then the responses.

        Raises:
            UsageError: The mask hides tokens inside a prompt, or `Engine.generate` refuses an argument.
        """
        check_token_ids(input_ids)
        prompts = without_padding(input_ids, attention_mask)
        if not do_sample:
            given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            unused = [f"{name}={value}" for name, value in given.items() if value not in (None, 0, NEUTRAL.get(name))]
            if unused:
                warnings.warn(f"{', '.join(unused)} has no effect with do_sample=False.", stacklevel=2)
        stops = stop_ids(eos_token_id, self.target)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            **sampling(do_sample, temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            stop_token_ids=stops,
            ignore_eos=eos_token_id is not None,
        )
        config, pad = self.dflash_config, self._pad_token(stops) if pad_token_id is None else pad_token_id
        drafting = Drafting(config.block_size, draft_passes=config.diffusion_steps) if use_dflash else Drafting(None)
        drafter = self.drafter if use_dflash else self._plain
        output, completions = decode_batch(self.target, drafter, input_ids, prompts, params, pad, drafting)
        self.last_stats = [completion.stats for completion in completions]
        return output

    def _pad_token(self, stops: Sequence[int]) -> int:
        """Return the model's pad token, or else an end token. Without end tokens no row is shorter than others."""
        model, tokenizer = self.target.model, self.target.tokenizer
        pad = None if model is None else self.generation_config.pad_token_id
        if pad is None and tokenizer is not None:
            pad = tokenizer.pad_token_id
        return pad if pad is not None else next(iter(stops or sorted(self.target.eos_token_ids)), 0)
