"""Frequencies of rotary embeddings and rotary angles, equal to those of transformers bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError, describe


def default_frequencies(channels: int, theta: float) -> Tensor:
    """Return the unscaled frequencies in radians per position, `[channels / 2]` float32."""
    return 1.0 / _wavelengths(channels, theta)


def _wavelengths(channels: int, theta: float) -> Tensor:
    powers: Tensor = theta ** (torch.arange(0, channels, 2, dtype=torch.float) / channels)
    return powers


def _linear(channels: int, theta: float, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    return default_frequencies(channels, theta) / rope["factor"], 1.0


def _dynamic(channels: int, theta: float, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """Scale the base (NTK) for texts of the trained length."""
    factor = rope["factor"]
    stretched = (factor * positions / positions - (factor - 1)) ** (channels / (channels - 2))
    return default_frequencies(channels, theta * stretched), 1.0


def _yarn(channels: int, theta: float, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """Interpolate low frequencies and keep high ones (YaRN, arXiv 2309.00071)."""
    original = rope.get("original_max_position_embeddings") or positions
    factor = positions / original if rope["factor"] is None else rope["factor"]

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def channel_of(rotations: float) -> float:
        """Return the channel whose angle makes this number of rotations within the original context."""
        return channels * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    scale = rope.get("attention_factor")
    if scale is None:
        weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1)
    low, high = channel_of(rope.get("beta_fast") or 32), channel_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high += 0.001 if low == high else 0
    kept = 1 - ((torch.arange(channels // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(channels, theta)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept, scale


def _llama3(channels: int, theta: float, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """Divide low frequencies by a factor, keep high ones, and interpolate in between (Llama 3.1)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope.get("original_max_position_embeddings") or positions
    frequencies = default_frequencies(channels, theta)
    wavelengths = 2 * math.pi / frequencies
    is_low, is_high = wavelengths > original / low, wavelengths < original / high
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(is_low, frequencies / factor, frequencies)
    return torch.where(is_low | is_high, scaled, between), 1.0


def _longrope(channels: int, theta: float, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """Divide each frequency by its factor for texts within the original context (LongRoPE, arXiv 2402.13753)."""
    original = rope.get("original_max_position_embeddings") or positions
    factor = rope.get("factor")
    factor = positions / original if factor is None else factor
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    if len(rope["short_factor"]) != channels // 2:
        raise ValueError(f"{channels // 2} frequencies have {len(rope['short_factor'])} short factors")
    return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * _wavelengths(channels, theta)), scale


SCALINGS: dict[str, Callable[[int, float, Mapping[str, Any], int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def rotary_frequencies(
    head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Compute the frequencies of rotary embeddings.

    Args:
        head_dim, max_positions, theta, scaling: As in `Rotary`.

    Returns:
        Radians per position of each pair of channels, `[head_dim / 2]` float32, and a factor for cosine and sine.

    Raises:
        UsageError: The scaling is unknown or lacks a parameter.
    """
    rope = dict(scaling or {})
    kind = rope.get("rope_type", "default")
    try:
        with torch.device("cpu"):  # also while a network is created on the device meta
            if kind == "default":
                return default_frequencies(head_dim, theta), 1.0
            channels = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            frequencies, scale = SCALINGS[kind](channels, theta, rope, max_positions)
            return frequencies, float(scale)
    except Exception as error:  # any kind, since parameters can have any type
        raise UsageError(
            f"rope_scaling is {scaling}, which cannot be used ({describe(error)}); set rope_type to one of "
            f"{', '.join(['default', *SCALINGS])}, with its parameters."
        ) from error


class Rotary:
    """Rotary angles of positions.

    The frequencies are not a buffer of a module, since they must stay float32 when the weights are cast: bfloat16
    cannot tell neighbouring positions apart.

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
