"""Checks of EAGLE-3.

They try layers counted from 1, hidden states of the wrong token, a wrong draft vocabulary, swapped halves of an entry,
and norms in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network, default_target_layers
from blockdraft.errors import UsageError
from blockdraft_train.doctor.checks import (
    Assumption,
    Tensors,
    VariantChecker,
    halves_swapped,
    lags,
    neighbour_target_layers,
    precision,
    rope,
)

PROJECTIONS = tuple(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")


class Eagle3Checker(VariantChecker):
    examines = Eagle3Config
    network = Eagle3Network
    config: Eagle3Config

    def checks(self, longest: int) -> Iterator[Assumption]:
        config = self.config
        yield Assumption(config)
        yield from neighbour_target_layers(config)
        yield from self._usual_target_layers()
        yield from lags(config)
        yield from self._vocabularies()
        remedy = (
            "Swap the halves of the columns of q_proj, k_proj and v_proj in the file: the embedding comes first, as in "
            "SafeAILab's code."
        )
        yield Assumption(
            config,
            fault="order",
            assumption="inputs of hidden state and embedding",
            remedy=remedy,
            tensors=halves_swapped(*PROJECTIONS),
        )
        for fault, name, assumption in (
            ("feedback", "norm_output", "the state that is fed on taken {} the last norm"),
            ("norm", "norm_before_residual", "the residual stream begun {} the norm of the hidden state"),
        ):
            other = not getattr(config, name)
            changes: dict[str, Any] = {name: other}
            remedy = f"Write {name}: {str(other).lower()} into config.json."
            place = "behind" if other else "before"
            yield Assumption(
                replace(config, **changes), fault=fault, assumption=assumption.format(place), remedy=remedy
            )
        yield from rope(config, self.target.shape)
        yield from precision(config, self.target.dtype)

    def _usual_target_layers(self) -> Iterator[Assumption]:
        """Yield checks with the target layers that SafeAILab's code reads, whatever a file states."""
        try:
            target_layers = default_target_layers(self.config.num_target_layers)
        except UsageError:  # the target is too small for them
            return
        if target_layers not in {
            self.config.target_layers,
            *(check.target_layers for check in neighbour_target_layers(self.config)),
        }:
            assumption = (
                f"the usual target layers, {list(target_layers)}, in place of {list(self.config.target_layers)}"
            )
            remedy = "Leave the target layers out of config.json, or write these."
            yield Assumption(
                self.config, fault="target_layers", assumption=assumption, remedy=remedy, target_layers=target_layers
            )

    def _vocabularies(self) -> Iterator[Assumption]:
        """Yield checks with other meanings of `d2t` that name tokens of the target."""
        size, whole = self.config.draft_vocab_size, self.config.vocab_size
        if size == whole:
            return
        places, offsets = torch.arange(size), self.checkpoint.tensors["d2t"]
        for assumption, other in (
            ("d2t one less", offsets - 1),
            ("d2t one more", offsets + 1),
            ("d2t as the tokens themselves, not as offsets", offsets - places),
            ("the first tokens of the target, whatever d2t says", torch.zeros_like(offsets)),
        ):
            kept = other + places
            if int(kept.min()) >= 0 and int(kept.max()) < whole:
                remedy = "Write d2t anew: token i of the draft vocabulary is the target's token i + d2t[i]."

                def tensors(given: Tensors, other: torch.Tensor = other) -> Tensors:
                    return {**given, "d2t": other}

                yield Assumption(self.config, fault="vocabulary", assumption=assumption, remedy=remedy, tensors=tensors)


CHECKERS = (Eagle3Checker,)
