"""Checks of Medusa's heads: numbered from the anchor, or reading another hidden state."""

from __future__ import annotations

from collections.abc import Iterator

from blockdraft_medusa.network import MedusaConfig, MedusaNetwork
from blockdraft_train.doctor.checks import Assumption, VariantChecker, before_norm, precision


class MedusaChecker(VariantChecker):
    examines = MedusaConfig
    network = MedusaNetwork
    config: MedusaConfig

    @property
    def block_size(self) -> int:
        return self.config.num_heads + 1

    @property
    def compared(self) -> int:
        """Number of compared draft tokens: one fewer than heads, because a check may leave out the first head."""
        return max(1, self.config.num_heads - 1)

    def checks(self, longest: int) -> Iterator[Assumption]:
        config = self.config
        yield Assumption(config)
        yield before_norm(config)
        if config.num_heads > 1:
            remedy = "Drop the first head, which drafts the target's own token, and renumber the others."
            assumption = "head 1 drafts the token after the anchor, not head 0"
            yield Assumption(config, fault="shift", assumption=assumption, remedy=remedy, shift=1)
        remedy = "The heads draft one token further than their numbers say: train one to stand before them."
        assumption = "the hidden state of two tokens before the anchor"
        yield Assumption(config, fault="shift", assumption=assumption, remedy=remedy, lag=1)
        yield from precision(config, self.target.dtype)


CHECKERS = (MedusaChecker,)
