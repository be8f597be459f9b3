"""What hooks read and change in a forward of transformers' models. They go afterwards: the model may be used without
the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.errors import UsageError


def tappable(model: PreTrainedModel, num_layers: int) -> dict[int, nn.Module]:
    """What gives the output of each layer, and under `num_layers` the input of the head.

    Raises:
        UsageError: The model keeps its layers otherwise than others do.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return {**dict(enumerate(module)), num_layers: model.base_model}
    raise UsageError(f"{type(model).__name__} has no list of {num_layers} layers, so none can be tapped.")


@contextmanager
def listening(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of these modules, which a forward inside fills in."""
    tapped: dict[int, Tensor] = {}
    hooks = []
    for tap, module in modules.items():

        def keep(module: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
            tapped[tap] = output if isinstance(output, Tensor) else output[0]

        hooks.append(module.register_forward_hook(keep))
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def heading(model: PreTrainedModel, logits_at: Tensor | None) -> Iterator[None]:
    """Let the head see one node of each row only, or none where this is empty; None changes nothing. `logits_to_keep`
    would compute these nodes for every row."""
    if logits_at is None:
        yield
        return

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        if len(logits_at) == 0:
            return (hidden[:, :0], *args[1:])
        return (hidden[torch.arange(len(hidden), device=hidden.device), logits_at].unsqueeze(1), *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
