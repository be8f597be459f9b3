"""Targets: language models whose output must not change.

Each module with `load` and `RANK`, of this package or named by a plugin, is a backend.

`load(path, options)` raises `NotCovered` if the backend cannot run the model. "auto" tries the backends whose rank is
not None, in ascending order. A negative rank marks a backend made for this machine, which leaves options that it lacks
to the others.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.kernels.cpu.threads import set_threads
from blockdraft.machine import multiplies_bfloat16
from blockdraft.models import TINY, default_target, located
from blockdraft.plugins import TARGETS, install_hint, load_all, plugins
from blockdraft.targets.base import (
    NotCovered,
    Target,
    TargetOutput,
    TargetText,
    embedding_and_head,
    set_max_context,
    with_draft_vocab,
    without_tokenizer,
)
from blockdraft.targets.checkpoint import checked_folder, load_text, load_text_with, own_dtype
from blockdraft.targets.decoder_head import DecoderHead, read_decoder_head, runs_heads
from blockdraft.targets.describe import Description, describe_target
from blockdraft.targets.exact import check_exact
from blockdraft.targets.families import FAMILIES, decoder_config
from blockdraft.targets.fingerprint import other_target_warning, target_fingerprint, weights_fingerprint
from blockdraft.targets.gguf import causal_lm, has_head, load_gguf_text, read_gguf_head
from blockdraft.targets.model_config import AnyConfig, ModelConfig, make_config
from blockdraft.targets.weights import HEAD, SOURCE, TABLE
from blockdraft.types import DEFAULT_LOAD_OPTIONS, LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_THREADS = 1024  # torch crashes with very many
BUNDLED = TINY / "target"
log = logging.getLogger(__name__)


def backends() -> dict[str, ModuleType]:
    """Return the modules of the backends by name, those of plugins included."""
    modules = load_all(TARGETS) | plugins(__name__)
    return {name: module for name, module in modules.items() if hasattr(module, "RANK")}


def load_target(path: str | Path | None = None, options: LoadOptions = DEFAULT_LOAD_OPTIONS, **changes: Any) -> Target:
    """Load a target.

    Args:
        path: A Hugging Face model folder or hub name, a GGUF file or any part of a split one, or the name of a pulled
            catalogue model, such as "smollm2"; "bundled" is the bundled model. None is SmolLM2 if it has been pulled
            and its drafter is bundled, else the bundled model. The native backend runs GGUF files with their quantized
            weights on a CPU.
        options: How to load it. Loading checks `exact` on the model, with the current number of threads.
        changes: Fields of `LoadOptions` to change, as in `load_target(path, dtype=torch.bfloat16, quantize="int8")`.

    Raises:
        UsageError: The folder, dtype or device is unknown, weights cannot be read, the model is no decoder-only
            language model or not supported by the given backend, or `exact` does not hold.
    """
    options, known = replace(options.load_options(), **changes), backends()
    backend, threads = options.backend, options.threads
    if backend != "auto" and backend not in known:
        if (hint := install_hint(TARGETS, backend)) is not None:
            raise UsageError(f"backend is {backend!r}, which is not installed; {hint} brings it.")
        raise UsageError(f"backend is {backend!r}; use one of {['auto', *sorted(known)]}.")
    placed, kind = device_and_dtype(options.device, options.dtype)
    path = default_target() if path is None else located(path)
    if options.dtype is None and options.quantize is None:
        kind = _default_dtype(path, options.revision, placed, kind)
    if isinstance(threads, int):
        if not 1 <= threads <= MAX_THREADS:
            raise UsageError(f"threads must be from 1 to {MAX_THREADS}, got {threads}.")
        set_threads(threads, "as requested")
    if options.exact and placed.type == "mps":
        raise UsageError("exact needs float64, and the device mps has none; use the device cpu, or do without exact.")
    if options.max_context is not None and options.max_context < 2:
        raise UsageError(f"max_context must be at least 2, got {options.max_context}.")
    options = replace(options, dtype=str(kind).removeprefix("torch."), device=str(placed))
    ranked = sorted((module.RANK, name) for name, module in known.items() if module.RANK is not None)
    reason: NotCovered | None = None
    for name in [backend] if backend != "auto" else [name for _, name in ranked]:
        try:
            target: Target = known[name].load(path, options)
        except NotCovered as refused:
            passes_on = known[name].RANK is not None and known[name].RANK < 0
            if backend != "auto" or ((options.quantize or options.kv_dtype) and not passes_on):
                other_weights = f"other weights, or leave {'quantize' if options.quantize else 'kv_dtype'} out"
                others = "another backend, or auto" if backend != "auto" else other_weights
                raise UsageError(f"The {name} backend cannot run {path}: {refused}. Use {others}.") from refused
            reason = reason or refused
            continue
        except UsageError as error:
            if reason is None:
                raise
            raise UsageError(f"{error} The other backend cannot run it, because {reason}.") from error
        target.backend_reason = None if reason is None else str(reason)
        if options.max_context is not None:
            set_max_context(target, options.max_context)
        if options.exact:
            check_exact(target)
        return target
    raise UsageError(f"No backend runs {path}: {reason}.") from reason


def device_and_dtype(
    device: torch.device | str | None, dtype: torch.dtype | str | None
) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of a model, from those of `load_target`, where None is the default."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        placed = torch.empty(0, device=device).device
        if placed.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"Device {device} is not usable here: {str(error).splitlines()[0]}") from error
    if dtype is None:
        dtype = torch.float32 if placed.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}; use one of {sorted(DTYPES)}.")
    return placed, DTYPES[name]


def _default_dtype(path: str | Path, revision: str | None, device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of a checkpoint on a device that supports it, or `otherwise` if it has none."""
    try:
        own = None if is_gguf(path) else own_dtype(path, revision)
    except UsageError:  # the backend reports it, unless it supports such paths
        return otherwise
    if own is None or own not in DTYPES.values():
        return otherwise
    lacks = own == torch.float16 or (own == torch.bfloat16 and not multiplies_bfloat16())
    if device.type == "cpu" and lacks:
        name = str(own).removeprefix("torch.")
        log.warning(
            "%s is in %s, for which this processor has no instructions; it computes in float32. --dtype (dtype=) "
            "chooses another.",
            path,
            name,
        )
        return torch.float32
    return own


def as_target(model: PreTrainedModel | Target) -> Target:
    """Return a model of transformers, in evaluation mode, as a target. Targets are returned unchanged.

    Raises:
        UsageError: The model is neither.
    """
    if hasattr(model, "new_cache"):
        return cast(Target, model)
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"The target is a {type(model).__name__}; give a model of transformers or use load_target.")
    target: Target = backends()["hf"].HFTarget(model)
    return target


def load_target_text(path: str | Path | None = None, revision: str | None = None) -> TargetText:
    """Load tokenizer and limits of a target, without its weights. Arguments and errors as in `load_target`."""
    path = default_target() if path is None else located(path)
    return load_gguf_text(path, revision) if is_gguf(path) else load_text(path, revision)


def check_target(path: str | Path, revision: str | None = None) -> None:
    """Raise a UsageError if a path is clearly not a target's."""
    path = located(path)
    if is_gguf(path):
        load_gguf_text(path, revision)
    else:
        checked_folder(path, revision)


__all__ = ["FAMILIES", "HEAD", "SOURCE", "TABLE", "AnyConfig", "DecoderHead", "Description", "LoadOptions"]
__all__ += ["ModelConfig", "NotCovered", "Target", "TargetOutput", "TargetText", "as_target", "causal_lm"]
__all__ += ["check_target", "decoder_config", "device_and_dtype", "describe_target", "embedding_and_head", "has_head"]
__all__ += ["load_target", "load_target_text", "load_text_with", "make_config", "read_decoder_head", "read_gguf_head"]
__all__ += ["runs_heads", "target_fingerprint", "other_target_warning", "weights_fingerprint", "with_draft_vocab"]
__all__ += ["without_tokenizer"]
