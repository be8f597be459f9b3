"""Checks of MTP heads.

They try the hidden state of another token or before the norm, swapped halves of an entry, the hidden state that the
next step reads, and the stored form of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft_train.doctor.checks import (
    Assumption,
    Tensors,
    VariantChecker,
    before_norm,
    halves_swapped,
    lags,
    precision,
    rope,
)


class MTPChecker(VariantChecker):
    examines = MTPConfig
    network = MTPNetwork
    config: MTPConfig

    def checks(self, longest: int) -> Iterator[Assumption]:
        config = self.config
        yield Assumption(config)
        yield before_norm(config)
        yield from lags(config)
        remedy = "Swap the halves of the columns of mtp.fc.weight in the file: the embedding comes first."
        assumption = "inputs of hidden state and embedding"
        yield Assumption(
            config, fault="order", assumption=assumption, remedy=remedy, tensors=halves_swapped("fc.weight")
        )
        fed = not config.normed_feedback
        assumption = f"the state that is fed on taken {'behind' if fed else 'before'} the last norm"
        remedy = f"Write normed_feedback: {str(fed).lower()} into config.json."
        yield Assumption(replace(config, normed_feedback=fed), fault="feedback", assumption=assumption, remedy=remedy)
        for step, kept in ((-1, "whole"), (1, "less two")):
            remedy = "Write the norms anew: this layout keeps what is added to one."
            assumption = f"norms that the file keeps {kept}"
            yield Assumption(config, fault="norm", assumption=assumption, remedy=remedy, tensors=_norms(step))
        yield from rope(config, self.target.shape)
        yield from precision(config, self.target.dtype)


def _norms(step: int) -> Callable[[Tensors], Tensors]:
    def changed(name: str, tensor: Tensor) -> Tensor:
        return tensor + step if tensor.ndim == 1 and "norm" in name else tensor

    return lambda tensors: {name: changed(name, tensor) for name, tensor in tensors.items()}


CHECKERS = (MTPChecker,)
