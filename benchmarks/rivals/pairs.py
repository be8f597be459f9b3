"""Targets and drafters as they are measured: as trained, or of the same shape and wider."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.kinds import KINDS, SMALL_LM
from benchmarks.rivals.rows import NATIVE
from benchmarks.sizes.widen import WIDTHS, widen
from blockdraft import load_drafter, load_target
from blockdraft.drafters import Drafter, entries
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.errors import UsageError
from blockdraft.formats import read_config, read_drafter
from blockdraft.targets import BUNDLED, Target


def target_of(path: str | None, width: int, running: str, insist: bool, folder: Path) -> Target:
    """The target, or the same made wider; it says the same words then.

    Args:
        insist: Refuse one that is not compiled where it is to run natively.
        folder: For the wider one, which is written there and stays.

    Raises:
        UsageError: It is not compiled, or cannot be made wider.
    """
    source: str | Path | None = path
    if width > 1:
        source = Path(path or BUNDLED)
        if not source.is_dir() or read_config(source).get("model_type") != "qwen3":
            raise UsageError(f"{source} is no folder of a Qwen3 model, which alone can be made wider; use --widths 1.")
        source = _widened(source, folder / f"target-{width}", width)
    if running != NATIVE:
        return load_target(source, compile="off")
    if not insist:
        return load_target(source)
    try:
        return load_target(source, backend="native", compile="on")
    except UsageError as error:
        raise UsageError(f"{error} Or add --uncompiled, to measure it as it runs.") from error


def _widened(source: Path, out: Path, width: int) -> Path:
    """What an earlier run has left, or else a new one."""
    if not out.exists():
        partial = out.with_name(f"{out.name}.partial")
        widen(source, partial, width).replace(out)
    return out


def drafter_of(kind: str, path: Path | None, target: Target, width: int, running: str, folder: Path) -> Drafter:
    """A drafter for a target of `target_of`. A wider one has random weights: its cycles cost what those of a trained
    one cost, and its guesses are worth nothing.

    Args:
        path: Of the trained one; None where nothing is trained.
    """
    if path is None:
        return load_drafter(kind, target=target)
    if kind == SMALL_LM:
        wide = path if width == 1 else _widened(path, folder / f"{kind}-{width}", width)
        model = load_target(wide, target.dtype, target.device, compile="auto" if running == NATIVE else "off")
        return DraftLMDrafter(model, target)
    if width == 1:
        return load_drafter(path, target=target)
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    narrow = read_drafter(path, vocabulary, target.num_layers).config
    wide_sizes = {name: width * getattr(narrow, name) for name in WIDTHS if hasattr(narrow, name)}
    entry = entries()[KINDS[kind].name]
    assert entry.network is not None and entry.drafter is not None
    make: Any = entry.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make(replace(narrow, **wide_sizes))
    return entry.drafter(network.bfloat16().float(), target)  # so that they are kept in bfloat16, as a trained one's


def check_compiled(kind: str, drafter: Drafter) -> None:
    """Refuse a drafter that could be compiled and is not."""
    reason = getattr(drafter, "compile_reason", None)
    if reason is not None:
        raise UsageError(f"{KINDS[kind].title} is not compiled: {reason}. Add --uncompiled to measure it all the same.")
