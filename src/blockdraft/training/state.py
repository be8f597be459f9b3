"""Weights and optimisers of a run, which may be spread over processes: gathered for a file, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors by name, on the CPU of the main process; to be called by all of them."""
    return cast(dict[str, Tensor], get_model_state_dict(module, options=WHOLE))


def gathered(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """What `restore` takes, likewise: a part of what a checkpoint holds."""
    weights, moments = get_state_dict(module, optimizers, options=WHOLE)
    return {"network": weights, "optimizers": moments}


def restore(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer], state: Mapping[str, Any]) -> None:
    """Put back what `gathered` gave; `state` may hold more."""
    set_state_dict(
        module,
        optimizers,
        model_state_dict=state["network"],
        optim_state_dict=state["optimizers"],
        options=StateDictOptions(full_state_dict=True),
    )
