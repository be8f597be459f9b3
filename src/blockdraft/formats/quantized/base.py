"""Protocol of the layouts of quantized checkpoints, and shared functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.formats.stored import StoredTensor
from blockdraft.nn.quantization import MAX_GROUP, MIN_GROUP, QuantizedWeight, narrow


class NotRead(ValueError):
    """A quantized checkpoint is not supported; the message is the reason, to follow "because"."""


class QuantizedLayout(Protocol):
    """Layout of a quantized checkpoint; each file of this package is one."""

    def weights(self, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the quantized weights under their names in an unquantized checkpoint, read when needed.

        Arguments and errors are those of `read_quantized`.
        """


def check(fits: bool, why_not: str) -> None:
    if not fits:
        raise NotRead(why_not)


def modules(tensors: Iterable[str], part: str) -> list[str]:
    """Return the names of the modules that have this part."""
    names = [name.removesuffix(f".{part}") for name in tensors if name.endswith(f".{part}")]
    check(bool(names), f"its configuration says that it is quantized, and no module has a {part}")
    return names


def part_of(
    tensors: Mapping[str, StoredTensor], name: str, kinds: Iterable[str], shape: tuple[int, ...]
) -> StoredTensor:
    """Return a tensor of the checkpoint. Raise `NotRead` if it is missing or has another dtype or shape."""
    check(name in tensors, f"its checkpoint lacks {name}")
    tensor = tensors[name]
    fits = tensor.kind in kinds and tensor.shape == shape
    check(fits, f"{name} is of {tensor.kind} {list(tensor.shape)} instead of {' or '.join(kinds)} {list(shape)}")
    return tensor


def check_groups(name: str, inputs: int, groups: int) -> None:
    """Raise `NotRead` unless this number of inputs can have this number of groups."""
    fits = groups > 0 and inputs % groups == 0 and inputs // groups % MIN_GROUP == 0
    fits = fits and inputs // groups <= MAX_GROUP
    least = f"groups of {inputs // groups}" if groups and inputs % groups == 0 else f"{groups} groups"
    check(
        fits,
        f"{name} has {least} in rows of {inputs}; groups must divide them and be a multiple of {MIN_GROUP} up to "
        f"{MAX_GROUP}",
    )


def check_order(name: str, tensors: Mapping[str, StoredTensor], inputs: int, groups: int) -> None:
    """Raise `NotRead` if a tensor assigns inputs to groups in another order than theirs."""
    if name in tensors:
        expected = torch.arange(inputs) // (inputs // groups)
        ordered = torch.equal(tensors[name].tensor().long(), expected)
        check(ordered, f"its inputs are not grouped in their order ({name}; desc_act), which has no fast product")


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `[n, words]` to unsigned values `[n, words * 32 / bits]`, uint8, lowest bits first."""
    octets = _own(words).view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def _own(tensor: Tensor) -> Tensor:
    """Copy with standard strides; `contiguous` keeps any stride of a dimension of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def few_bits(values: Tensor, zeros: Tensor | None, scale: Tensor, bits: int) -> QuantizedWeight:
    """Return the weight `(values - zeros) * scale`, with one zero and one scale per group.

    Args:
        values: `[out, in]` uint8.
        zeros: `[out, in / group]` integers; None is the middle of the range.
        scale: `[out, in / group]`, of any dtype.
    """
    check(bool(scale.isfinite().all()), "some of its scales are not finite")
    middle, scale = 1 << bits - 1, narrow(scale.float().contiguous())
    signed = (values ^ 128).view(torch.int8) if bits == 8 else values.view(torch.int8) - 8
    if zeros is None or bool((zeros == middle).all()):
        return QuantizedWeight(signed.contiguous(), scale, None, bits)
    codes, shift = (signed, middle) if bits == 8 else (values.view(torch.int8), 0)
    offset = scale.float() * (shift - zeros.float())
    return QuantizedWeight(codes.contiguous(), scale, offset.contiguous(), bits)
