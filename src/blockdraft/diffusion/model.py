"""A block-diffusion model: network, configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import NumbersError, UsageError
from blockdraft.nn.denoiser import Denoiser
from blockdraft.settings import Count, Natural, settings
from blockdraft.targets import TargetText


@settings
class DiffusionConfig:
    """Configuration of a block-diffusion model beside its network.

    Attributes:
        block_size: Tokens of a block. At 1 the model is autoregressive.
        mask_token_id: Token in the place of those that are unknown.
        token_shift: Whether the state at a token predicts the next one, as in causal language models. The first token
            of a block is then predicted at the last one of the block before.
    """

    block_size: Count
    mask_token_id: Natural
    token_shift: bool


@dataclass(frozen=True)
class DiffusionModel:
    """A loaded model.

    Attributes:
        text: Tokenizer, context and end tokens; the tokenizer is never None.
        raw: Content of config.json, besides `config`.
        files: Other files of its folder, content by name, which are written along with it.
    """

    network: Denoiser
    config: DiffusionConfig
    text: TargetText
    raw: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def check_tokens(self, ids: Sequence[int], place: str) -> None:
        """Raise a UsageError if there are tokens outside of the vocabulary, or mask tokens.

        Args:
            place: Source of the tokens, as the beginning of a sentence.
        """
        mask, size = self.config.mask_token_id, self.network.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"{place} holds the token id {wrong}, and the model has those from 0 to {size - 1} only.")
        if mask in ids:
            raise UsageError(f"{place} holds the mask token (id {mask}), which stands for unknown tokens; take it out.")

    def check_weights(self) -> None:
        """Raise a NumbersError if a weight is not finite."""
        for name, weight in self.network.named_parameters():
            if not weight.isfinite().all():
                raise NumbersError(f"The model's weight {name} is not finite; copy its files again, or make it anew.")

    def check_finite(self, numbers: Tensor) -> None:
        """Raise a NumbersError with a remedy if the model has computed NaN or infinity."""
        if numbers.isfinite().all():
            return
        self.check_weights()
        is_float32 = next(self.network.parameters()).dtype == torch.float32
        remedy = "its weights are too large, so make it anew" if is_float32 else "load it as float32"
        raise NumbersError(f"The model computes numbers that are not finite; {remedy}.")


def hide_mask_token(logits: Tensor, mask_token_id: int) -> Tensor:
    """Logits `[..., V]` as float32, with -inf for the mask token, which is never an answer."""
    hidden = torch.zeros(logits.size(-1), dtype=torch.bool, device=logits.device)
    hidden[mask_token_id] = True
    return logits.float().masked_fill(hidden, -torch.inf)
