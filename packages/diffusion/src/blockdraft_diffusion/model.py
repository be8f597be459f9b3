"""A block-diffusion model: network, configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import NumbersError, UsageError
from blockdraft.settings import Count, Natural, settings
from blockdraft.targets import TargetText
from blockdraft_diffusion.denoiser import Denoiser


@settings
class DiffusionConfig:
    """Block-diffusion settings of a model, stored in its config.json.

    Attributes:
        block_size: Tokens of a block. At 1 the model is autoregressive.
        mask_token_id: Token that stands for unknown tokens.
        token_shift: Whether the hidden state at a token predicts the next one, as in causal language models. The last
            token of the block before then predicts the first token of a block.
    """

    block_size: Count
    mask_token_id: Natural
    token_shift: bool


@dataclass(frozen=True)
class DiffusionModel:
    """A loaded model.

    Attributes:
        text: Tokenizer, context and end tokens; the tokenizer is never None.
        raw: Content of config.json; `config` takes precedence.
        files: Other files to write with the model, content by name.
    """

    network: Denoiser
    config: DiffusionConfig
    text: TargetText
    raw: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def check_tokens(self, ids: Sequence[int], source: str) -> None:
        """Raise a UsageError if there are mask tokens or tokens outside the vocabulary.

        Args:
            source: Source of the tokens, as the beginning of a sentence.
        """
        mask, size = self.config.mask_token_id, self.network.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"{source} contains the token id {wrong}; the model's ids are 0 to {size - 1}.")
        if mask in ids:
            raise UsageError(f"{source} contains the mask token (id {mask}), reserved for unknown tokens; remove it.")

    def check_weights(self) -> None:
        """Raise a NumbersError if a weight is not finite."""
        for name, weight in self.network.named_parameters():
            if not weight.isfinite().all():
                raise NumbersError(f"The model's weight {name} is not finite; copy or create the model again.")

    def check_finite(self, numbers: Tensor) -> None:
        """Raise a NumbersError with a remedy if these outputs of the model hold NaN or infinity."""
        if numbers.isfinite().all():
            return
        self.check_weights()
        is_float32 = next(self.network.parameters()).dtype == torch.float32
        remedy = "its weights are too large, so create it again" if is_float32 else "load it as float32"
        raise NumbersError(f"The model computes numbers that are not finite; {remedy}.")


def hide_mask_token(logits: Tensor, mask_token_id: int) -> Tensor:
    """Return logits `[..., V]` as float32, with -inf for the mask token."""
    is_mask = torch.zeros(logits.size(-1), dtype=torch.bool, device=logits.device)
    is_mask[mask_token_id] = True
    return logits.float().masked_fill(is_mask, -torch.inf)
