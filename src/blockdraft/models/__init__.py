"""Models by name: the catalogue (`catalogue.toml`, whose schema is `catalogue.py`), and those of it that are on this
machine (`pulled.py`), which `pull.py` gets.
"""

from __future__ import annotations

from blockdraft.models.catalogue import Drafter, Measured, Model, WeightFile, Wheel, catalogue, find, known
from blockdraft.models.pulled import located, models_folder, pulled

__all__ = ["Drafter", "Measured", "Model", "WeightFile", "Wheel"]
__all__ += ["catalogue", "find", "known", "located", "models_folder", "pulled"]
