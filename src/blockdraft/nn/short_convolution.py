"""Gated short convolutions along a sequence, as in LFM2, over all nodes of trees at once.

The cache keeps the convolution's input of each token in the token's KV slot, like keys and values. So sequences can be
shortened, copied and stored at any token, and a tree needs no state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ConvolutionWindow:
    """KV slots that the convolutions of R nodes use.

    Attributes:
        slots: Slots of the nodes, `[R]` int64.
        before: Slots of the tokens before each node on its path, nearest first, `[kernel - 1, R]` int64.
        is_token: Whether there is such a token, `[kernel - 1, R, 1]` bool.
    """

    slots: Tensor
    before: Tensor
    is_token: Tensor

    @classmethod
    def of(cls, parents: Tensor, starts: Tensor, lengths: Tensor, kernel: int) -> ConvolutionWindow:
        """Return the window of B * N nodes.

        Args:
            parents: `[B, N]`, as in `Target.forward`.
            starts, lengths: First slot and number of committed tokens of each sequence, `[B, 1]` int64.
        """
        nodes = torch.arange(parents.size(1), device=parents.device).expand_as(parents)
        before, place = [], parents  # a node, or -1 for the last committed token, -2 for the one before, ...
        for _ in range(kernel - 1):
            before.append(lengths + place)
            place = torch.where(place >= 0, parents.gather(1, place.clamp(min=0)), place - 1)
        slots = torch.stack([lengths + nodes, *before])
        absolute = (starts + slots.clamp(min=0)).flatten(1)
        return cls(absolute[0], absolute[1:], (slots[1:] >= 0).flatten(1).unsqueeze(-1))

    def piece(self, first: int, size: int) -> ConvolutionWindow:
        """Return the window of `size` nodes from `first` on. Padding nodes behind the last one are not written."""
        nodes = slice(first, first + size)
        before, is_token = self.before[:, nodes], self.is_token[:, nodes]
        missing = size - before.size(1)
        return ConvolutionWindow(
            self.slots[nodes], F.pad(before, (0, missing)), F.pad(is_token, (0, 0, 0, missing), value=False)
        )

    def to(self, device: torch.device) -> ConvolutionWindow:
        return ConvolutionWindow(self.slots.to(device), self.before.to(device), self.is_token.to(device))


@dataclass(frozen=True)
class ConvolutionMemory:
    """Inputs of a layer's convolution, `[slots, H]`, and the slots that a forward pass uses."""

    inputs: Tensor
    window: ConvolutionWindow


class ShortConvolution(nn.Module):
    """Depthwise convolution of a layer between its two projections, with a gate on its input and one on its output.

    Args:
        weight: Weight in the checkpoint, `[H, 1, kernel]`.

    Attributes:
        kernel: Weights by distance, `[kernel, H]` in float32 or wider; the first row is that of the token itself.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.kernel: Tensor
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.register_buffer("kernel", weight[:, 0].T.flip(0).to(wide).contiguous())

    def forward(self, x: Tensor, memory: ConvolutionMemory) -> Tensor:
        """Map projected inputs of R nodes, `[R, 3 * H]`, to `[R, H]`, and write the convolution's inputs."""
        gate, out_gate, value = x.chunk(3, dim=-1)
        inputs, window = gate * value, memory.window
        memory.inputs[window.slots] = inputs[: len(window.slots)].to(memory.inputs.dtype)
        total = inputs * self.kernel[0]
        for slots, is_token, weight in zip(window.before, window.is_token, self.kernel[1:], strict=True):
            total += memory.inputs[slots].masked_fill(~is_token, 0) * weight
        return total.to(x.dtype) * out_gate
