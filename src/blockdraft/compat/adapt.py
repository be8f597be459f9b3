"""What users of other implementations hold, turned into what the engine takes.

These users come for DFlash and bring models of transformers, so this file, alone outside their packages, names both.
"""

from __future__ import annotations

import copy
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.drafters import entries
from blockdraft.drafters.dflash import DIFFUSION_STEPS, NOISE_SCHEDULE, DFlashDrafter, check_refinement
from blockdraft.errors import UsageError
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.targets import Target
from blockdraft.targets.hf import HFTarget


def as_target(model: PreTrainedModel | Target) -> Target:
    """A model of transformers behind the `Target` protocol, in evaluation mode; a target as it is."""
    if isinstance(model, PreTrainedModel):
        return HFTarget(model)
    if not hasattr(model, "new_cache"):
        raise UsageError(f"The target is a {type(model).__name__}; give a model of transformers or use load_target.")
    return model


def drafter_for(source: DFlashNetwork | DFlashDrafter, target: Target) -> DFlashDrafter:
    """A drafter for this target. A network is moved to the target's device and dtype; a drafter stays as it is."""
    if not isinstance(source, DFlashDrafter):
        kinds = {entry.network: entry.drafter for entry in entries().values() if entry.drafter is not None}
        kind = next(kinds[base] for base in type(source).__mro__ if base in kinds)
        return cast(DFlashDrafter, kind(source, target))
    network, weight = source.network, source.network.fc.weight
    if (weight.device, weight.dtype) != (target.device, target.dtype):
        network = copy.deepcopy(network)  # the drafter given goes on working for its own target
    settings = (source.diffusion_steps, source.noise_schedule)
    return type(source)(network, target, *settings, reduced_head=source.reduced_head)


def check_token_ids(input_ids: Tensor) -> None:
    """Refuse what is no `[B, L]` tensor of token ids.

    Raises:
        ValueError: Another shape, or numbers that are not whole.
    """
    if input_ids.ndim != 2:
        shape = list(input_ids.shape)
        raise UsageError(f"input_ids has the shape {shape}; give [batch, length], for one prompt [1, length].")
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise UsageError(f"input_ids is of {input_ids.dtype}; give token ids, such as torch.int64.")


__all__ = [
    "DIFFUSION_STEPS",
    "NOISE_SCHEDULE",
    "DFlashDrafter",
    "HFTarget",
    "as_target",
    "check_refinement",
    "check_token_ids",
    "drafter_for",
]
