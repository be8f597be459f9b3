"""Base of all draft networks."""

from __future__ import annotations

from torch import nn


class DraftNetwork(nn.Module):
    """A draft network.

    Attributes:
        qat_bits: Bits to which its weights were rounded in training, as in `Trained`; None if they were not.
    """

    qat_bits: int | None = None
