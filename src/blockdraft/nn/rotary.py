"""Rotary angles of draft networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError, describe
from blockdraft.light_transformers import import_lightly

import_lightly()  # before any configuration, so that it takes half of the time

from transformers import Qwen3Config  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402


def default_frequencies(channels: int, theta: float) -> Tensor:
    """Return the radians per position of each pair of `channels`, `[channels / 2]` float32, without scaling.

    This equals transformers bit for bit. Its own code is in the files of its models, which take as long to import as
    torch.
    """
    return 1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float) / channels))


def rotary_frequencies(
    head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Return the frequencies of rotary embeddings like transformers.

    Args:
        head_dim, max_positions, theta, scaling: As in `Rotary`.

    Returns:
        Radians per position of each pair of channels, `[head_dim / 2]` float32, and a factor on cosine and sine.

    Raises:
        UsageError: transformers does not know the scaling, or the scaling lacks a parameter.
    """
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    try:
        with torch.device("cpu"):  # also if a network is created on the meta device
            config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=rope)
            found: dict[str, Any] = {**(config.rope_parameters or {})}
            if found["rope_type"] == "default":
                return default_frequencies(head_dim, found["rope_theta"]), 1.0
            frequencies, scale = ROPE_INIT_FUNCTIONS[found["rope_type"]](config)
            return frequencies, float(scale)
    except Exception as error:  # transformers raises many kinds
        raise UsageError(
            f"rope_scaling is {scaling}, which transformers does not accept ({describe(error)}); name a rope_type "
            "that it knows, with its parameters."
        ) from error


class Rotary:
    """Rotary angles of positions.

    The frequencies are not a buffer, because they must stay float32 when the weights are cast: bfloat16 cannot
    distinguish neighbouring positions.

    Args:
        head_dim: Size of an attention head.
        max_positions: Positions that the model was trained for; some kinds of scaling use them.
        theta: Base of the frequencies.
        scaling: `rope_type` and its parameters, without theta; None is plain RoPE.
    """

    def __init__(self, head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None) -> None:
        frequencies, self._scale = rotary_frequencies(head_dim, max_positions, theta, scaling)
        self._frequencies = {frequencies.device: frequencies}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B, N, D]` of positions `[B, N]`."""
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = next(iter(self._frequencies.values())).to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies[positions.device]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)
