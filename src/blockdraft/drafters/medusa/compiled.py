"""Compiled runner of Medusa's heads.

The first blocks of all heads read the same input, so they are one matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.medusa.network import HeadRunner, MedusaNetwork, ResidualBlock
from blockdraft.kernels.cpu.compiled_network import CompiledHost, pack_together
from blockdraft.machine import return_freed
from blockdraft.nn.packed import PackedLinear
from blockdraft.timing import HEAD, PASS, mark


class CompiledHeads(HeadRunner):
    """A `HeadRunner` in compiled C. Its arithmetic is float32, whatever the dtype.

    Args:
        network: Network whose weights are copied into the library's layout and must not change afterwards.
        host: The compiled target. Weights are not quantized; an own head that is a `ReducedHead` is packed.
        owned: As in `Target.runner`.

    Raises:
        NotCompiled: As in `CompiledHost.choose_library`.
    """

    @torch.no_grad()
    def __init__(self, network: MedusaNetwork, host: CompiledHost, owned: bool = False) -> None:
        library, _ = replace(host, bits=None).choose_library(network, host.head_dim)
        self._library, self._head, self.config, self.dtype = library, host.head, network.config, host.dtype
        heads = [list(cast(nn.Sequential, head)) for head in network]
        blocks = [[cast(ResidualBlock, block) for block in head[: network.config.num_layers]] for head in heads]

        def packed(*projections: nn.Linear) -> PackedLinear:
            return pack_together(projections, library, host.dtype, owned=owned)

        self._first = packed(*(head_blocks[0].linear for head_blocks in blocks))
        self._others = [[packed(block.linear) for block in head_blocks[1:]] for head_blocks in blocks]
        self._heads = [packed(projection) for projection in network.projections()]
        self._reduced = None if self._heads else host.reduced_head
        self._shared = None if self._reduced is None else packed(self._reduced.projection)
        return_freed()

    def weight_bytes(self) -> int:
        others = (layer for head_blocks in self._others for layer in head_blocks)
        shared = () if self._shared is None else (self._shared,)
        return sum(layer.nbytes for layer in (self._first, *others, *self._heads, *shared))

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        hidden, (batch, size) = hidden.float().contiguous(), hidden.shape
        fields = self._library.linear(self._first)
        fields = type(fields).from_buffer_copy(fields)
        fields.outputs = count * size  # of the first `count` heads
        raised = torch.empty(batch, count, size)
        self._library.multiply(fields, hidden, raised)
        states = hidden[:, None] + F.silu(raised)
        for state, others in zip(states.unbind(1), self._others, strict=False):
            for linear in others:
                state += F.silu(self._product(linear, state.contiguous()))
        mark(PASS)
        if self._heads:
            by_head = zip(self._heads, states.unbind(1), strict=False)
            logits = torch.stack([self._product(head, state.contiguous()) for head, state in by_head], dim=1)
        elif self._reduced is not None and self._shared is not None:
            scores = self._product(self._shared, states.flatten(0, 1))
            logits = self._reduced.everywhere(scores.view(batch, count, -1))
        else:
            logits = self._head(states.to(self.dtype))
        mark(HEAD)
        return logits

    def _product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        out = torch.empty(len(x), linear.out_features)
        self._library.multiply(self._library.linear(linear), x, out)
        return out
