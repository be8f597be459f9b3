"""How a checkpoint is rounded to few bits: the settings of `blockdraft quantize`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from blockdraft.settings import Count, settings

Bits: TypeAlias = Literal[4, 8]
Tables: TypeAlias = Literal["8", "keep"]


@settings
class QuantizeSettings:
    """How weights are rounded.

    Attributes:
        bits: Of a weight: 4 or 8.
        group: Inputs that share a scale; a multiple of 8 that divides the rows of all layers. None is the largest of
            128, 64, 32, 16 and 8 that does. Smaller groups are more exact and take more memory.
        tables: Embedding and head: "8" rounds them to 8 bits, "keep" leaves them as they are.
        zero_points: Let the range of each group begin and end where its numbers do, instead of about 0.
    """

    bits: Bits = 4
    group: Count | None = None
    tables: Tables = "8"
    zero_points: bool = False


@settings
class CalibrationSettings:
    """What text is looked at.

    Attributes:
        tokens: Of the text that errors are weighed on.
        length: Tokens of it that are read together.
        held_out: Further tokens, on which perplexity is measured.
        seed: Of the order in which the rows of a text are taken.
    """

    tokens: Count = 32768
    length: Annotated[int, Field(ge=2)] = 512
    held_out: Count = 8192
    seed: int = 0
