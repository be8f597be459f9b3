"""Models by name: the catalogue, the models on this machine, and their download.

The catalogue is `models.csv` and `catalogue.toml`, with their schema in `catalogue.py`.
"""

from __future__ import annotations

from blockdraft.models.catalogue import (
    Model,
    PublishedDrafter,
    PublishedTau,
    WeightFile,
    Wheel,
    catalogue,
    find,
    known,
    suggestion,
)
from blockdraft.models.places import (
    DEFAULT,
    TINY,
    bundled_drafter,
    default_target,
    located,
    model_of,
    models_folder,
    named_for_others,
    pulled,
)
from blockdraft.models.recognise import alike, made_for, recognised

__all__ = ["DEFAULT", "TINY", "Model", "PublishedDrafter", "PublishedTau", "WeightFile", "Wheel", "bundled_drafter"]
__all__ += ["catalogue", "default_target", "find", "known", "located", "model_of", "models_folder"]
__all__ += ["named_for_others", "pulled", "alike", "made_for", "recognised", "suggestion"]
