"""`generate` as transformers has it, with DFlash behind it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockdraft.compat.adapt import check_token_ids, engine_for, stops_of, without_padding
from blockdraft.drafters import (
    BUNDLED_DFLASH,
    DIFFUSION_STEPS,
    NOISE_SCHEDULE,
    Drafter,
    NetworkDrafter,
    check_refinement,
    load_drafter,
)
from blockdraft.engine import Stats
from blockdraft.errors import UsageError
from blockdraft.targets import Target, as_target, transformers_model
from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class DFlashConfig:
    """How to draft. None of it changes the output.

    Attributes:
        block_size: Tokens per proposal, anchor included; None is the drafter's trained size.
        diffusion_steps: Draft passes a block; each pass settles the guesses it is surest of, and the next sees them.
            None is the drafter's own number, which is 1 but for flow maps.
        noise_schedule: Share of the guesses settled after each pass, "cosine" or "linear".
        drafter: A DFlash checkpoint folder; None is the bundled one, which fits the bundled target.
    """

    block_size: int | None = None
    diffusion_steps: int | None = None
    noise_schedule: str = NOISE_SCHEDULE
    drafter: str | Path | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise UsageError(f"block_size is {self.block_size}; it must be at least 1 (no drafting).")
        check_refinement(DIFFUSION_STEPS if self.diffusion_steps is None else self.diffusion_steps, self.noise_schedule)


class DFlashGenerationMixin:
    """Gives a causal LM a `generate` that drafts; the output is the model's own.

    Args:
        base_model: A causal LM of transformers, or a target from `load_target`.
        config: How to draft.

    Raises:
        ValueError: The drafter does not fit the model, is no DFlash drafter, or was trained for smaller blocks.

    Attributes:
        last_stats: Statistics of the last call, one a row.
    """

    def __init__(self, base_model: PreTrainedModel | Target, config: DFlashConfig | None = None) -> None:
        self.dflash_config = config = config or DFlashConfig()
        self.target = as_target(base_model)
        self.last_stats: list[Stats] = []
        loaded = load_drafter(config.drafter or BUNDLED_DFLASH, target=self.target)
        if not isinstance(loaded, NetworkDrafter):
            raise UsageError(
                f"drafter is {str(config.drafter)!r}, which is no DFlash drafter; give a DFlash checkpoint."
            )
        if config.block_size is not None and config.block_size > loaded.block_size:
            raise UsageError(
                f"block_size is {config.block_size}; this drafter was trained for at most {loaded.block_size}."
            )
        self.drafter = loaded.adapted(self.target, config.diffusion_steps, config.noise_schedule)
        self._plain: Drafter = load_drafter("none", target=self.target)

    @property
    def base_model(self) -> PreTrainedModel:
        """The model of transformers.

        Raises:
            AttributeError: The target is none of transformers.
        """
        model = transformers_model(self.target)
        if model is None:
            raise AttributeError(f"The target is a {type(self.target).__name__} and has no model of transformers.")
        return model

    @property
    def config(self) -> PretrainedConfig:
        """The base model's configuration; `dflash_config` is the drafting's."""
        config: PretrainedConfig = self.base_model.config
        return config

    @property
    def generation_config(self) -> GenerationConfig:
        config: GenerationConfig = self.base_model.generation_config
        return config

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
            input_ids: `[B, L]`.
            attention_mask: `[B, L]`, 0 at padding, which may stand left or right of a prompt; None is no padding.
            use_dflash: False decodes plainly, to the same tokens.
            do_sample: Draw tokens; otherwise decode greedily.
            temperature, top_k, top_p: For drawing; None is 1.0, all and 1.0. The values in the model's
                `generation_config` are not read.
            eos_token_id: Exactly the tokens that end an answer; None is the model's own.
            pad_token_id: Fills up rows that end early; None is the model's own, or else its end token.
            seed: Row i draws with `seed + i`; None draws the seeds from torch's generator.

        Returns:
            `[B, L + longest]` int64 on the device of `input_ids`: the prompts as they came in, then the answers.

        Raises:
            ValueError: A mask that hides tokens between others, contradictory sampling, or what `Engine.generate`
                refuses.
        """
        check_token_ids(input_ids)
        prompts = without_padding(input_ids, attention_mask)
        temperature, top_k, top_p = _sampling(do_sample, temperature, top_k, top_p)
        stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        params = [
            SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=None if seed is None else seed + row,
                stop_token_ids=stops_of(stops, self.target),
                ignore_eos=eos_token_id is not None,
            )
            for row in range(len(prompts))
        ]
        drafter, block_size = (self.drafter, self.dflash_config.block_size) if use_dflash else (self._plain, None)
        engine = engine_for(self.target, drafter, prompts, max_new_tokens, block_size)
        completions = [completion.checked() for completion in engine.generate(prompts, params)]
        self.last_stats = [completion.stats for completion in completions]
        longest = max(len(completion.token_ids) for completion in completions)
        pad = self._pad_token(stops) if pad_token_id is None else pad_token_id
        answers = [c.token_ids + [pad] * (longest - len(c.token_ids)) for c in completions]
        return torch.cat([input_ids.long(), torch.tensor(answers, device=input_ids.device)], dim=1)

    def _pad_token(self, stops: list[int]) -> int:
        """The model's pad token, or else an end token; without end tokens all rows are equally long."""
        model = transformers_model(self.target)
        own = None if model is None else self.generation_config.pad_token_id
        if own is None and self.target.tokenizer is not None:
            own = self.target.tokenizer.pad_token_id
        return own if own is not None else next(iter(stops or sorted(self.target.eos_token_ids)), 0)


def _sampling(
    do_sample: bool, temperature: float | None, top_k: int | None, top_p: float | None
) -> tuple[float, int, float]:
    """Temperature, top-k and top-p as the engine takes them."""
    if not do_sample:
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        neutral = {"temperature": (None, 0, 1), "top_k": (None, 0), "top_p": (None, 1)}
        unused = [f"{name}={value}" for name, value in given.items() if value not in neutral[name]]
        if unused:
            warnings.warn(f"{', '.join(unused)} has no effect with do_sample=False.", stacklevel=3)
        return 0.0, SamplingParams.top_k, SamplingParams.top_p
    if temperature == 0:
        raise UsageError("temperature is 0 with do_sample=True; use do_sample=False to decode greedily.")
    return (
        1.0 if temperature is None else temperature,
        SamplingParams.top_k if top_k is None else top_k,
        SamplingParams.top_p if top_p is None else top_p,
    )
