"""Settings of `blockdraft quantize`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from blockdraft.settings import Count, settings

Bits: TypeAlias = Literal[4, 8]
Tables: TypeAlias = Literal["8", "keep"]


@settings
class QuantizeSettings:
    """Quantization of weights."""

    bits: Bits = Field(4, description="Bits per weight.")
    group: Count | None = Field(
        None,
        description="Input weights that share a scale: a multiple of 8 that divides the input size of every layer. "
        "Smaller groups are more exact and take more memory. By default the largest of 128, 64, ..., 8 that fits.",
    )
    tables: Tables = Field("8", description='Quantization of embedding and output head: "8" bits, or "keep".')
    zero_points: bool = Field(
        False,
        description="Fit the range of each group to its smallest and largest weight, instead of centring it at 0.",
    )


@settings
class CalibrationSettings:
    """Text for calibration."""

    tokens: Count = Field(32768, description="Number of tokens of calibration text, which weight the errors.")
    length: Annotated[int, Field(ge=2)] = Field(512, description="Sequence length in tokens.")
    held_out: Count = Field(8192, description="Number of further tokens, on which perplexity is measured.")
    seed: int = Field(0, description="Seed of the order in which records are taken.")
