"""Settings of `blockdraft quantize`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from blockdraft.settings import Count, settings

Bits: TypeAlias = Literal[4, 8]
Tables: TypeAlias = Literal["8", "keep"]


@settings
class QuantizeSettings:
    """Settings of quantization.

    Attributes:
        bits: Bits per weight: 4 or 8.
        group: Inputs that share a scale; a multiple of 8 that divides the inputs of all layers. None is the largest of
            128, 64, 32, 16 and 8 that does. Smaller groups are more exact and take more memory.
        tables: Quantization of embedding and head: "8" bits, or "keep" for none.
        zero_points: Fit the range of each group to its minimum and maximum, instead of centring it at 0.
    """

    bits: Bits = 4
    group: Count | None = None
    tables: Tables = "8"
    zero_points: bool = False


@settings
class CalibrationSettings:
    """Settings of the calibration text.

    Attributes:
        tokens: Tokens of the text that weights the errors.
        length: Tokens per sequence.
        held_out: Additional tokens, on which perplexity is measured.
        seed: Seed of the order in which records are taken.
    """

    tokens: Count = 32768
    length: Annotated[int, Field(ge=2)] = 512
    held_out: Count = 8192
    seed: int = 0
