"""Our own decoder, for the families that it knows: how a checkpoint becomes a target, compiled, captured or neither."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from blockdraft.cpu.build import Build
from blockdraft.cpu.compiled_decoder import CompiledDecoder
from blockdraft.cpu.threads import use_best_threads
from blockdraft.cuda.graphs import CudaRecorder
from blockdraft.decode.proposal import chain_parents
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.targets.base import LoadOptions
from blockdraft.targets.gguf import read_gguf
from blockdraft.targets.native_files import read_checkpoint
from blockdraft.targets.native_target import NativeTarget
from blockdraft.types import Compile

RANK = 0
PROBED_CONTEXT = 256  # slots
PROBED_NODES = (1, 16)


def use_best_threads_for(target: NativeTarget) -> None:
    """Use as many threads as are best for forwards of one node and of some."""
    cache = target.new_cache(1, min(PROBED_CONTEXT, target.max_context))
    cache.commit([range(cache.capacity - max(PROBED_NODES))])  # as if so many tokens had been read

    def score() -> None:
        for count in PROBED_NODES:
            tokens = torch.zeros(1, count, dtype=torch.long)
            target.forward(tokens, chain_parents(1, count), cache)

    facts = (target.decoder.config, target.dtype, target.bits)
    use_best_threads(score, facts)


def load(path: str | Path, options: LoadOptions) -> NativeTarget:
    """Load a checkpoint; see `read_checkpoint` and `read_gguf` for what is read, and for errors.

    The compiler is waited for, however long it takes. What runs the forward once it is loaded goes on running it: an
    answer is never begun one way and ended the other.

    Raises:
        UsageError: It is to be compiled and cannot be.
    """
    captured = options.device.type == "cuda" and options.compile == "on"
    if options.kv_dtype is not None and options.device.type != "cpu":
        raise UsageError(f"kv_dtype is {options.kv_dtype!r}, which is for CPUs, and the device is {options.device}.")
    if captured and options.exact:
        raise UsageError("exact and compile 'on' do not go together on a GPU; use compile auto or off.")
    read = read_gguf(path, options) if is_gguf(path) else read_checkpoint(path, options)
    known = read.tokenizer, read.folder, read.generation_config, read.source_fingerprint
    special = read.decoder.config.torch_only
    if captured and special:
        raise UsageError(f"compile 'on' captures CUDA graphs, which know no {special}; use compile auto or off.")
    target = NativeTarget(read.decoder, read.config, *known)
    target.round_drafters = options.round_drafters
    target.tokenizer_reason = read.tokenizer_reason
    if captured:
        target.capture(CudaRecorder(options.device))
        return target
    target.compile_reason = read.reason if read.build is None else _compile(target, read.build, options.compile)
    if options.kv_dtype is not None and target.compiled is None:
        raise UsageError(
            f"kv_dtype is {options.kv_dtype!r}, which only a forward compiled for a CPU can do, and {path} has none: "
            f"{target.compile_reason}. Leave kv_dtype out."
        )
    if options.compile == "on" and target.compiled is None:
        raise UsageError(f"{path} has no compiled forward: {target.compile_reason}. Use compile auto or off.")
    target.exact = options.exact and target.compiled is None  # compiled, it is so in any case
    if options.best_threads and target.compiled is not None:
        use_best_threads_for(target)
    return target


def _compile(target: NativeTarget, library: Build, compile: Compile) -> str | None:
    """Let the target use this library. Returns why it does not."""
    found = library.library()
    if found is None:
        if compile == "auto":
            logging.getLogger(__name__).warning("The target runs uncompiled, which is slower: %s.", library.reason)
        return library.reason
    target.compiled = CompiledDecoder(target.decoder, found, target.max_context)
    return None
