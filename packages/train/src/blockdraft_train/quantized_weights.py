"""Quantization-aware training.

Forward and backward see the quantized weights, and the optimizer moves the original ones by that gradient. This is the
straight-through estimator (arXiv 1308.3432), with which networks learn to tolerate quantization (arXiv 1712.05877).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import MIN_GROUP, best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight


def quantized_layers(network: nn.Module, is_quantized: Callable[[str], bool], bits: int) -> list[nn.Linear]:
    """Return the linear layers of a draft network that are quantized when its drafter is loaded.

    Args:
        is_quantized: As in `Variant`.

    Raises:
        UsageError: Drafters of this kind have no such layer, or a layer's number of inputs rules out quantization.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    layers = [layer for name, layer in linear.items() if is_quantized(name)]
    if not layers:
        raise UsageError(f"qat_bits is {bits}, and drafters of this kind are never quantized; leave qat_bits out.")
    odd_sizes = sorted({layer.in_features for layer in linear.values() if layer.in_features % MIN_GROUP})
    if odd_sizes:
        raise UsageError(
            f"qat_bits is {bits}, and the drafter has layers of {', '.join(map(str, odd_sizes))} inputs, no multiple "
            f"of {MIN_GROUP}, which are never quantized; leave qat_bits out."
        )
    return layers


@contextmanager
def quantized_weights(layers: Sequence[nn.Linear], bits: int) -> Iterator[None]:
    """Give some layers quantized weights, in the groups and with the search that loading a drafter uses.

    On exit they have their own weights again, and the gradients that the quantized ones got. Of weights that FSDP
    shards by rows, each process quantizes its own. A weight that is not finite stays as it is: the loss shows it.

    Args:
        layers: Layers with float32 weights and a multiple of `MIN_GROUP` inputs.
        bits: 4 or 8.
    """
    weights = [_local(layer.weight) for layer in layers]
    own = [weight.clone() for weight in weights]
    try:
        set_weights(weights, [_quantized(weight, bits) for weight in own])
        yield
    finally:
        set_weights(weights, own)


def _quantized(weight: Tensor, bits: int) -> Tensor:
    if not bool(weight.isfinite().all()):
        return weight
    return quantize_weight(weight, bits, best_group(weight.size(1)), shares=QUICK).dequantize()


def _local(weight: Tensor) -> Tensor:
    detached = weight.detach()  # shares its numbers with the parameter, and has no gradient
    return detached.to_local() if isinstance(detached, DTensor) else detached


def set_weights(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
