"""A block-diffusion model: network, configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.denoisers.config import DiffusionConfig
from blockdraft.errors import UsageError
from blockdraft.nn.denoiser import Denoiser
from blockdraft.targets import TargetText


@dataclass(frozen=True)
class DiffusionModel:
    """Attributes:
    text: Tokenizer, context and end tokens; the tokenizer is there.
    raw: What config.json holds besides `config`.
    files: Other files of its folder, which belong into every folder that it is written to.
    """

    network: Denoiser
    config: DiffusionConfig
    text: TargetText
    raw: dict[str, Any]
    files: tuple[Path, ...] = ()

    def check_tokens(self, ids: Sequence[int], place: str) -> None:
        """Raise a UsageError for tokens that no text may hold.

        Args:
            place: Where they come from, as the beginning of a sentence.
        """
        mask, size = self.config.mask_token_id, self.network.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"{place} holds the token id {wrong}, and the model has those from 0 to {size - 1} only.")
        if mask in ids:
            raise UsageError(
                f"{place} holds the mask token (id {mask}), which stands for tokens that are not known; take it out."
            )


def hide_mask_token(logits: Tensor, mask_token_id: int) -> Tensor:
    """Logits `[..., V]` float32 of which the mask token has -inf: it is never what a place holds."""
    hidden = torch.zeros(logits.size(-1), dtype=torch.bool, device=logits.device)
    hidden[mask_token_id] = True
    return logits.float().masked_fill(hidden, -torch.inf)
