"""Compiled runner of Medusa's heads. The first blocks of all heads read the same input, so they are one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.medusa.network import MedusaNetwork, ResidualBlock
from blockdraft.kernels.cpu.compiled_decoder import why_not_compiled
from blockdraft.kernels.cpu.compiled_network import Beside, library_for, pack_together
from blockdraft.kernels.cpu.library import Library
from blockdraft.machine import return_freed
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.packed import PackedLinear
from blockdraft.timing import HEAD, PASS, mark


def compiled(
    network: MedusaNetwork, beside: Beside, head: Callable[[Tensor], Tensor] | None, owned: bool
) -> CompiledHeads | str:
    """The compiled runner of heads in the target's dtype, or the reason why there is none.

    Args:
        beside: The target.
        head: Output head that the heads share; None is the target's.
        owned: As in `Target.runner`.
    """
    weights = list(network.state_dict().values())  # unlike `parameters`, also holds weights that are packed already
    dtype = weights[0].dtype
    reason = why_not_compiled(dtype, weights[0].device, beside.head_dim)
    if reason is not None:
        return reason
    weights += [head.weight] if isinstance(head, ReducedHead) else []
    library, reason = library_for(weights, dtype, beside.decoder.library.store_dtype, beside.head_dim)
    return reason or "" if library is None else CompiledHeads(network, library, head or beside.head, owned)


class CompiledHeads:
    """A `HeadRunner` in compiled C. Its arithmetic is float32, whatever the dtype.

    Args:
        network: Network whose weights are copied into the library's layout and must not be changed afterwards.
        library: Library built for its dtype.
        head: Output head that the heads share; a `ReducedHead` is packed.
        owned: As in `Target.runner`.
    """

    compile_reason: str | None = None

    @torch.no_grad()
    def __init__(
        self, network: MedusaNetwork, library: Library, head: Callable[[Tensor], Tensor], owned: bool = False
    ) -> None:
        self._library, self._head, self._config = library, head, network.config
        self._dtype = next(iter(network.state_dict().values())).dtype
        heads = [list(cast(nn.Sequential, each)) for each in network]
        blocks = [[cast(ResidualBlock, block) for block in each[: network.config.num_layers]] for each in heads]

        def packed(*places: tuple[object, str]) -> PackedLinear:
            return pack_together(places, library, self._dtype, owned=owned)

        self._first = packed(*((of_head[0], "linear") for of_head in blocks))
        self._others = [[packed((block, "linear")) for block in of_head[1:]] for of_head in blocks]
        own = () if network.config.shared_head else tuple(network)
        self._heads = [packed((each, str(network.config.num_layers))) for each in own]
        self._reduced = None if own or not isinstance(head, ReducedHead) else head
        self._shared = None if self._reduced is None else packed((self._reduced, "projection"))
        return_freed()

    def weight_bytes(self) -> int:
        others = (each for of_head in self._others for each in of_head)
        shared = () if self._shared is None else (self._shared,)
        return sum(each.nbytes for each in (self._first, *others, *self._heads, *shared))

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        """As `HeadRunner.__call__`."""
        hidden, (batch, size) = hidden.float().contiguous(), hidden.shape
        fields = self._library.linear(self._first)
        fields = type(fields).from_buffer_copy(fields)
        fields.outputs = count * size  # of the first `count` heads
        raised = torch.empty(batch, count, size)
        self._library.multiply(fields, hidden, raised)
        states = hidden[:, None] + F.silu(raised)
        for each, others in zip(states.unbind(1), self._others, strict=False):
            for linear in others:
                each += F.silu(self._product(linear, each.contiguous()))
        mark(PASS)
        if self._heads:
            by_head = zip(self._heads, states.unbind(1), strict=False)
            logits = torch.stack([self._product(each, state.contiguous()) for each, state in by_head], dim=1)
        elif self._reduced is not None and self._shared is not None:
            scores = self._product(self._shared, states.flatten(0, 1))
            logits = self._reduced.everywhere(scores.view(batch, count, -1))
        else:
            logits = self._head(states.to(self._dtype))
        mark(HEAD)
        return logits

    def _product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        out = torch.empty(len(x), linear.out_features)
        self._library.multiply(self._library.linear(linear), x, out)
        return out


RUNNERS = {MedusaNetwork: compiled}
