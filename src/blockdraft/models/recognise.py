"""Recognition of the catalogue's models in free names: of files, folders and hub repositories."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from blockdraft.models.catalogue import BUNDLED, Model, catalogue

# Words that do not tell models apart.
COMMON = {"base", "chat", "gguf", "hf", "instruct", "it"}


def recognised(name: str) -> Model | None:
    """Return the model whose words a name contains, such as that of a GGUF file; None if there is none.

    Of several models that with the most words is meant: "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M" is Qwen3-Coder-30B-A3B.
    """
    words = _words(name)
    candidates = [model for model in catalogue() if _words(model.name) <= words]
    return max(candidates, key=lambda model: len(_words(model.name)), default=None)


def alike(first: Model, second: Model) -> bool:
    """Return whether two models have the same name but for words such as "instruct"."""
    return _words(first.name) == _words(second.name)


def made_for(drafter: str | Path) -> Model | None:
    """Return the model that a published drafter was made for, by the drafter's hub name or that of a copy; or None."""
    name, short = str(drafter).lower(), Path(drafter).name.lower().removesuffix(".gguf")
    for model in catalogue():
        for published in model.drafters:
            hub = published.hub.lower()
            if hub not in (BUNDLED, model.hub.lower()) and (hub == name or hub.split("/")[-1] == short):
                return model
    return None


@cache
def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9.]+", name.lower())) - COMMON - {""}
