"""Training of weights that will be rounded to few bits, as those of drafters are beside a target of few bits on a CPU.

Forward and backward see the rounded weights, and the optimizer moves the unrounded ones by that gradient: the
straight-through estimator (arXiv 1308.3432), with which networks learn to bear rounding (arXiv 1712.05877).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantized import LEAST_GROUP, best_group
from blockdraft.nn.rounding import QUICK, rounded


def rounded_layers(network: nn.Module, is_rounded: Callable[[str], bool], bits: int) -> list[nn.Linear]:
    """Linear layers of a draft network that are rounded where its drafter is loaded.

    Args:
        is_rounded: As in `Variant`.

    Raises:
        UsageError: Drafters of this kind have no such layer, or those of this shape are not rounded, because a linear
            layer has a number of inputs that no group divides.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    found = [layer for name, layer in linear.items() if is_rounded(name)]
    if not found:
        raise UsageError(f"qat_bits is {bits}, and drafters of this kind are never rounded; leave qat_bits out.")
    wrong = sorted({layer.in_features for layer in linear.values() if layer.in_features % LEAST_GROUP})
    if wrong:
        raise UsageError(
            f"qat_bits is {bits}, and the drafter has layers of {', '.join(map(str, wrong))} inputs, no multiple of "
            f"{LEAST_GROUP}, which are never rounded; leave qat_bits out."
        )
    return found


@contextmanager
def rounded_weights(layers: Sequence[nn.Linear], bits: int) -> Iterator[None]:
    """Let some layers have rounded weights, in the groups and with the search of drafters that are loaded.

    In the end they have their own weights again, and the gradients that the rounded ones got. Of weights that FSDP
    shards by rows, each process rounds its own. A weight that is not finite stays as it is, for the loss to tell.

    Args:
        layers: Layers with float32 weights and a multiple of `LEAST_GROUP` inputs.
        bits: 4 or 8.
    """
    weights = [_local(layer.weight) for layer in layers]
    own = [weight.clone() for weight in weights]
    try:
        _set(weights, [_rounded(each, bits) for each in own])
        yield
    finally:
        _set(weights, own)


def _rounded(weight: Tensor, bits: int) -> Tensor:
    if not bool(weight.isfinite().all()):
        return weight
    return rounded(weight, bits, best_group(weight.size(1)), shares=QUICK).dequantize()


def _local(weight: Tensor) -> Tensor:
    detached = weight.detach()  # shares its numbers with the parameter, and has no gradient
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _set(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
