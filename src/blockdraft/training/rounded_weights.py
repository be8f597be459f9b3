"""Training of weights that will be rounded to few bits, as those of drafters are beside a target of few bits on a CPU.

Forward and backward see the rounded weights, and the optimizer moves the unrounded ones by that gradient: the
straight-through estimator (arXiv 1308.3432), with which networks learn to bear rounding (arXiv 1712.05877).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantized import LEAST_GROUP, best_group
from blockdraft.nn.rounding import QUICK, rounded


def check_roundable(network: nn.Module, bits: int) -> None:
    """Check that a draft network's weights can be rounded.

    Raises:
        UsageError: A linear layer has a number of inputs that no group divides.
    """
    wrong = sorted({layer.in_features for layer in _linear_layers(network) if layer.in_features % LEAST_GROUP})
    if wrong:
        raise UsageError(
            f"round_bits is {bits}, and the drafter has layers of {', '.join(map(str, wrong))} inputs, no multiple of "
            f"{LEAST_GROUP}, which are never rounded; leave round_bits out."
        )


@contextmanager
def rounded_weights(network: nn.Module, bits: int) -> Iterator[None]:
    """Let all linear layers have rounded weights, in the groups and with the search of drafters that are loaded.

    In the end they have their own weights again, and the gradients that the rounded ones got. Of weights that FSDP
    shards by rows, each process rounds its own.

    Args:
        network: Network with float32 weights, each of whose linear layers has a multiple of `LEAST_GROUP` inputs.
        bits: 4 or 8.
    """
    weights = [_local(layer.weight) for layer in _linear_layers(network)]
    own = [weight.clone() for weight in weights]
    try:
        _set(weights, [rounded(each, bits, best_group(each.size(1)), shares=QUICK).dequantize() for each in own])
        yield
    finally:
        _set(weights, own)


def _linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def _local(weight: Tensor) -> Tensor:
    detached = weight.detach()  # shares its numbers with the parameter, and has no gradient
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _set(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
