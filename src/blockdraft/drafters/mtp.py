"""A multi-token prediction head as drafter: one layer guesses token after token from the target's last hidden state,
and then from its own output, as EAGLE-3 does."""

from __future__ import annotations

from pathlib import Path

from blockdraft.drafters.base import Entry, read_network
from blockdraft.drafters.eagle3 import Eagle3Drafter
from blockdraft.nn.mtp import MTPNetwork
from blockdraft.targets import Target


class MTPDrafter(Eagle3Drafter):
    """Drafts with an MTP head, whose embedding and output projection are the target's."""


def load(path: Path, target: Target) -> MTPDrafter:
    return MTPDrafter(read_network(path, target, MTPNetwork), target, path)


DRAFTER = Entry(
    load,
    architectures=("MTPDraftModel",),
    network=MTPNetwork,
    layouts=("mtp",),
    variant="mtp",
    drafter=MTPDrafter,
)
