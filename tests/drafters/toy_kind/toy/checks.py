"""Checks of the toy: target layers that are one layer off."""

from __future__ import annotations

from collections.abc import Iterator

from blockdraft_train.doctor.checks import Assumption, VariantChecker, neighbour_target_layers
from toy.network import ToyConfig, ToyNetwork  # type: ignore[import-not-found]


class ToyChecker(VariantChecker):
    examines = ToyConfig
    network = ToyNetwork

    def checks(self, longest: int) -> Iterator[Assumption]:
        yield Assumption(self.config)
        yield from neighbour_target_layers(self.config)


CHECKERS = (ToyChecker,)
