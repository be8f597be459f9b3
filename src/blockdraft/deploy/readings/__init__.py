"""The ways in which drafters' checkpoints are read wrongly, a file each kind; `base.py` says what is in it."""

from __future__ import annotations

from pathlib import Path

from blockdraft.deploy.readings.base import Bench, Reading
from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.plugins import plugins
from blockdraft.targets import Target


def bench_of(path: str | Path, target: Target) -> tuple[Bench, str | None]:
    """A drafter beside its target, and the fingerprint of the target that it was trained for, where it is known.

    Args:
        path: Folder or GGUF file.

    Raises:
        ValueError: It cannot be read, or none of the files here knows its kind.
    """
    if not Path(path).exists():
        raise UsageError(f"There is no {path}; give the folder or GGUF file of a drafter that has a network.")
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    found = read_drafter(path, vocabulary, target.num_layers)
    kinds: list[type[Bench]] = [module.BENCH for module in plugins(__name__).values()]
    for kind in kinds:
        if isinstance(found.config, kind.examines) and not isinstance(found.config, kind.leaves):
            return kind(target, found), found.trained_for
    raise UsageError(f"{path} is of a kind ({type(found.config).__name__}) that cannot be examined here.")


__all__ = ["Bench", "Reading", "bench_of"]
