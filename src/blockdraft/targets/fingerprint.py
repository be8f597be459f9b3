"""Fingerprints of targets: hashes of names, shapes and a sample of the values of their weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from blockdraft.targets.base import Target

SAMPLE = 32  # values per weight
_fingerprints: WeakKeyDictionary[Target, str] = WeakKeyDictionary()


def target_fingerprint(target: Target) -> str:
    """Return the fingerprint of configuration and weights, 16 hexadecimal digits, equal in float32 and bfloat16.

    Hidden states and data carry it: they belong to exactly this model, so quantization or a merged adapter changes it.
    It is computed once for each target, since quantized weights are dequantized for it.
    """
    if target not in _fingerprints:
        architecture = _hash(json.dumps(target.architecture, sort_keys=True).encode())
        _fingerprints[target] = _digest(architecture, target.named_weights())
    return _fingerprints[target]


def weights_fingerprint(weights: Iterable[tuple[str, Tensor]], base: str = "") -> str:
    """Return the fingerprint of weights alone, 16 hexadecimal digits, which drafters carry.

    The configuration is left out, since releases of transformers write it differently.

    Args:
        base: Fingerprint of the model into which these weights of an adapter are merged. Merged weights would depend on
            the dtype of the arithmetic.
    """
    return _digest(base, weights)


def other_target_warning(drafter: str | Path, trained_for: str | None, target: Target) -> str | None:
    """Return a warning if a drafter was trained for another target of the same shape, as far as that is known.

    Args:
        trained_for: `Target.source_fingerprint` of the target that the drafter was trained for.
    """
    if trained_for is None or target.source_fingerprint in (None, trained_for):
        return None
    return (
        f"{drafter} was trained for another target (fingerprint {trained_for}) than {target.path or 'this one'} "
        f"({target.source_fingerprint}). The output stays the target's own. Between quantizations of one model "
        "little is lost; otherwise tau may be low: use a drafter trained for this target, or continue training this "
        "one (blockdraft train --init)."
    )


def sampled_fingerprint(samples: Iterable[tuple[str, Sequence[int], Tensor]], base: str = "") -> str:
    """Return `weights_fingerprint` from names, shapes, and the values at `sampled_positions`."""
    lines = {}
    for name, shape, values in samples:
        lines[name] = json.dumps([name, list(shape), values.to("cpu", torch.bfloat16).tolist()])
    return _hash("".join([base, *(lines[name] for name in sorted(lines))]).encode())


@cache
def sampled_positions(count: int) -> Tensor:
    """Return the indices of the sampled values among the `count` values of a weight, int64."""
    return torch.linspace(0, count - 1, min(SAMPLE, count), dtype=torch.float64).long()


def sampled_places(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return `sampled_positions` as an int64 tensor for each dimension."""
    # Torch's own unravel_index imports sympy, which takes long.
    indices = np.unravel_index(sampled_positions(math.prod(shape)).numpy(), tuple(shape))
    return tuple(torch.as_tensor(axis) for axis in indices)


def _digest(prefix: str, weights: Iterable[tuple[str, Tensor]]) -> str:
    return sampled_fingerprint(((name, weight.shape, _sample(weight)) for name, weight in weights), prefix)


def _sample(weight: Tensor) -> Tensor:
    whole = weight.detach() if weight.dim() else weight.detach()[None]
    # Indexed, and not flattened, which may copy.
    return whole[tuple(axis.to(whole.device) for axis in sampled_places(whole.shape))]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
