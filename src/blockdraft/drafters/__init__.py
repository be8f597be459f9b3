"""Drafters, and how one is found and loaded.

A kind of drafter with a network is a folder of this package, any other kind a file. Each ends in `DRAFTER`, and
`blockdraft.plugins` lists all of them.
"""

from blockdraft.drafters.base import (
    NOISE_SCHEDULE,
    NOISE_SCHEDULES,
    DraftCost,
    Drafter,
    DrafterSpec,
    Observer,
    select_layers,
    slots_behind,
)
from blockdraft.drafters.draft_vocab import check_draft_vocab
from blockdraft.drafters.hidden_states import HiddenStateObserver
from blockdraft.drafters.load import (
    TINY_DRAFTER,
    as_given,
    bundled_for,
    check_place,
    default_drafter,
    drafter_files,
    drafter_of,
    drafter_path,
    entries,
    held_drafters,
    joined,
    load_drafter,
    place_of,
)

__all__ = [
    "NOISE_SCHEDULE",
    "NOISE_SCHEDULES",
    "TINY_DRAFTER",
    "DraftCost",
    "Drafter",
    "DrafterSpec",
    "HiddenStateObserver",
    "Observer",
    "as_given",
    "bundled_for",
    "check_draft_vocab",
    "check_place",
    "default_drafter",
    "drafter_files",
    "drafter_of",
    "drafter_path",
    "entries",
    "held_drafters",
    "joined",
    "load_drafter",
    "place_of",
    "select_layers",
    "slots_behind",
]
