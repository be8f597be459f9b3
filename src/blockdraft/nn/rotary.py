"""Rotary angles of draft networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.errors import UsageError, describe


def rotary_frequencies(
    head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Radians a position of each pair of channels `[head_dim / 2]` float32, and a factor on cosine and sine.

    The many kinds of scaling are transformers' business. Arguments as of `Rotary`.

    Raises:
        UsageError: Transformers does not know the scaling, or it lacks a parameter.
    """
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    try:
        with torch.device("cpu"):  # also where the weights are still to come
            rotary = Qwen3RotaryEmbedding(
                Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=rope)
            )
    except Exception as error:  # of many kinds
        raise UsageError(
            f"rope_scaling is {scaling}, of which transformers makes no angles ({describe(error)}); name a rope_type "
            "that it knows, with its parameters."
        ) from error
    return cast(Tensor, rotary.inv_freq), float(rotary.attention_scaling)


class Rotary:
    """cos and sin of positions.

    The frequencies are no buffer of a module, because they must stay float32 when the weights are cast: rounded to
    bfloat16, positions blur.

    Args:
        scaling: `rope_type` and its parameters, without theta; None is plain RoPE.
    """

    def __init__(self, head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None) -> None:
        frequencies, self._scale = rotary_frequencies(head_dim, max_positions, theta, scaling)
        self._frequencies = {frequencies.device: frequencies}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions `[B, N]`, each `[B, N, D]`."""
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = next(iter(self._frequencies.values())).to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies[positions.device]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)
