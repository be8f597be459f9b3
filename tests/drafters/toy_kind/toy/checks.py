"""Ways in which the toy's checkpoints are read wrongly: taps that are one layer off."""

from __future__ import annotations

from collections.abc import Iterator

from blockdraft.drafters.toy.network import ToyConfig, ToyNetwork  # type: ignore[import-not-found]

from blockdraft.tools.deploy.checks import USUAL, Reading, TaughtBench, neighbours


class ToyBench(TaughtBench):
    examines = ToyConfig
    network = ToyNetwork

    def readings(self, longest: int) -> Iterator[Reading]:
        yield Reading("", USUAL, "", self.config)
        yield from neighbours(self.config)


BENCH = ToyBench
