"""What compiled draft networks borrow from a compiled target, and how their weights are packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_decoder import CompiledDecoder, why_not_compiled
from blockdraft.kernels.cpu.library import Library
from blockdraft.nn.draft_network import DraftHost
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.packed import PackedLinear, fits_bfloat16, pack_weights
from blockdraft.nn.quantization import MIN_GROUP, PIECE, QuantizedWeight, best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight


class NotCompiled(Exception):
    """A draft network that cannot be compiled; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class CompiledHost(DraftHost):
    """What a compiled draft network borrows from a compiled target.

    Attributes:
        decoder: The target's compiled forward pass.
        head_dim: Size of the target's attention heads.
        bits: Bits to which weights of drafters are quantized; None leaves them unquantized.
        head_rows: Function from tokens `[n]` int64 to rows `[n, H]` of the target's head.
    """

    decoder: CompiledDecoder
    head_dim: int
    bits: int | None = None
    head_rows: Callable[[Tensor], Tensor] | None = None

    @property
    def reduced_head(self) -> ReducedHead | None:
        """The own head, where a library can run it."""
        return self.own_head if isinstance(self.own_head, ReducedHead) else None

    def choose_library(self, network: nn.Module, head_dim: int) -> tuple[Library, int | None]:
        """Return the library for a draft network, and the bits to which its weights are quantized, or None.

        Weights are quantized like those of the target where input sizes are multiples of the group size and the
        target's library fits the heads. Otherwise float32 weights that bfloat16 represents exactly are stored in it.

        Args:
            head_dim: Size of the network's attention heads.

        Raises:
            NotCompiled: No library runs the network. A missing compiler is also logged.
        """
        weights = [*network.state_dict().values()]
        weights += [] if self.reduced_head is None else [self.reduced_head.weight]
        reason = why_not_compiled(self.dtype, weights[0].device, head_dim)
        if reason is not None:
            raise NotCompiled(reason)
        target = self.decoder.library
        inputs = {module.in_features for module in network.modules() if isinstance(module, nn.Linear)}
        fits = all(size % MIN_GROUP == 0 for size in inputs) and head_dim % target.lanes == 0
        if self.bits is not None and fits:
            return target, self.bits
        halved = self.dtype == torch.float32 and all(fits_bfloat16(weight) for weight in weights if weight.ndim == 2)
        made = build(torch.bfloat16 if halved else self.dtype, target.store_dtype, head_dim, inputs=self.dtype)
        library = made.library()
        if library is None:
            logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
            raise NotCompiled(made.reason)
        return library, None

    def packing_library(self, network: nn.Module) -> tuple[Library, int | None]:
        """Return the library of the target and the fewest bits of weights that are packed already, as `choose_library`.

        Raises:
            NotCompiled: They are not packed for this library.
        """
        packed = [module for module in network.modules() if isinstance(module, PackedLinear)]
        if any(layer.kernels is not self.decoder.library for layer in packed):
            raise NotCompiled("its weights are not packed for the target's library")
        return self.decoder.library, min((layer.bits for layer in packed if layer.bits is not None), default=None)


def pack_together(
    projections: Sequence[nn.Linear], library: Library, dtype: torch.dtype, bits: int | None = None, owned: bool = False
) -> PackedLinear:
    """Pack several projections as one layer, which concatenates their outputs.

    Args:
        dtype: Dtype to which weights are rounded first.
        bits: Bits to which they are quantized then, or None.
        owned: Whether to free the projections' own weights.
    """
    weights: list[Tensor | QuantizedWeight] = [projection.weight.detach() for projection in projections]
    if bits is not None:
        group, step = best_group(projections[0].in_features), max(1, PIECE // projections[0].in_features)
        pieces = [piece for projection in projections for piece in projection.weight.detach().split(step)]
        weights = [quantize_weight(piece.to(dtype), bits, group, shares=QUICK) for piece in pieces]
    biases = [projection.bias.detach().to(dtype) for projection in projections if projection.bias is not None]
    packed = PackedLinear(pack_weights(weights, library), torch.cat(biases) if biases else None)
    packed.dtype = dtype
    if owned:
        for projection in projections:
            projection.weight = projection.bias = None  # type: ignore[assignment]
    return packed
