"""The engines of a server, one for each backend that requests may name, and public names of the models."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from gguf import LlamaFileType

from blockdraft.engine import Engine
from blockdraft.errors import ClosedError, UsageError
from blockdraft.formats.folder import open_folder
from blockdraft.formats.gguf import gguf_outline, is_gguf
from blockdraft.models import TINY
from blockdraft.prompt_sets import SAMPLES
from blockdraft.targets import Target
from blockdraft.types import JOINT, RequestDrafting, SamplingParams

BUNDLED = "blockdraft-pair"  # the tiny pair
CHECK_LENGTH = 64  # maximum tokens of a response in the self-check
CHECK_BATCH_SIZE = 4
CHECK_TREE_BUDGET = 16  # draft tokens of a tree in the self-check if the server chooses their number itself


class Backends:
    """Engines by the names of their backends. All but the first are loaded when a request names them.

    Args:
        usual: Engine of requests that name no backend.
        others: Functions that load more engines, by the names of their backends.

    Attributes:
        target, drafter: Public names of the two models, without local paths.
    """

    def __init__(self, usual: Engine, others: Mapping[str, Callable[[], Engine]] | None = None) -> None:
        self.usual = usual
        self.target = public_name(usual.target.path, "target")
        drafters = [(part.path, public_name(part.path, part.kind)) for part in usual.drafter.parts]
        self.drafter = JOINT.join(name for _, name in drafters)
        self._paths = [(usual.target.path, self.target), *drafters]
        self._engines = {usual.target.backend: usual}
        self._loaders = {name: load for name, load in (others or {}).items() if name not in self._engines}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def names(self) -> list[str]:
        return [*self._engines, *(name for name in self._loaders if name not in self._engines)]

    @property
    def engines(self) -> list[Engine]:
        """The engines loaded so far."""
        return list(self._engines.values())

    def is_loaded(self, name: str | None) -> bool:
        return name is None or name in self._engines

    def engine(self, name: str | None = None) -> Engine:
        """Return the engine of a backend, or the usual one for None. The first call for another one loads it.

        Raises:
            UsageError: No backend has this name, or it cannot be loaded.
            ClosedError: The server is shutting down.
        """
        if name is None:
            return self.usual
        if name not in self.names:
            raise UsageError(f"speculation.backend must be one of {', '.join(self.names)}, got {name!r}.")
        if name not in self._engines:
            with self._lock:
                if self._closed:
                    raise ClosedError("The server is shutting down.")
                if name not in self._engines:
                    self._engines[name] = self._loaders[name]()
        return self._engines[name]

    def public(self, text: str) -> str:
        """Replace the paths of the models in a text by their public names."""
        for path, name in self._paths:
            if path is not None:
                text = text.replace(os.path.abspath(path), name)
                if len(Path(path).parts) > 1:  # a path such as "." also occurs inside other words
                    text = text.replace(str(path), name)
        return text

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for engine in self.engines:
            engine.close()


def public_name(path: Path | None, default: str) -> str:
    """Return the name of a model on the hub, or that of its folder or file, or `default` without a path."""
    if path is None:
        return default
    path = Path(os.path.abspath(path))
    if path.is_relative_to(TINY):
        return BUNDLED
    if path.is_relative_to(TINY.parent):  # such as pair/smollm2/drafter/drafter.gguf
        return f"bundled for {path.relative_to(TINY.parent).parts[0]}"
    if path.parent.name == "snapshots":  # in the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def weights_of(engine: Engine) -> tuple[int, int]:
    """Return the numbers of weights of the target and of the drafter."""
    drafter = 0
    for path in (part.path for part in engine.drafter.parts if part.path is not None):
        # In its files, since the network drops its weights once its forward pass is compiled.
        drafter += sum((gguf_outline(path) if is_gguf(path) else open_folder(path)).kinds.values())
    model = engine.target.path
    if model is not None and is_gguf(model):  # the weights themselves would have to be dequantized
        return sum(gguf_outline(model).kinds.values()), drafter
    return sum(weight.numel() for _, weight in engine.target.named_weights()), drafter


def kind_of(target: Target) -> tuple[str, str]:
    """Return the family of a target and the type of its weights, as Ollama names them."""
    if target.path is not None and is_gguf(target.path):
        metadata = gguf_outline(target.path).metadata
        try:
            kind = (
                LlamaFileType(metadata.get("general.file_type", -1)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
            )
        except ValueError:
            kind = "unknown"
        return str(metadata.get("general.architecture", "unknown")), kind
    return str(target.architecture.get("model_type", "unknown")), str(target.dtype).removeprefix("torch.").upper()


def count_differences(engine: Engine, count: int) -> int:
    """Return how many of `count` greedy responses differ between drafting and plain decoding.

    Every decoding step drafts, even where the engine itself would pause.

    Raises:
        NumbersError, RequestError: Decoding failed.
    """
    room = engine.target.max_context // 2
    params = SamplingParams(max_new_tokens=max(1, min(CHECK_LENGTH, room)))
    prompts = [f"{text} ({number})" for number, text in enumerate(islice(cycle(SAMPLES.prompts), count))]
    size, budget = engine.drafting.block_size, engine.drafting.tree_budget
    always = replace(
        engine.drafting,
        block_size=None if size == "auto" else size,
        tree_budget=CHECK_TREE_BUDGET if budget == "auto" else budget,
    )
    with Engine(engine.target, engine.drafter, max_batch_size=CHECK_BATCH_SIZE, drafting=always) as checked:
        drafted, plain = (
            [checked.submit(prompt, params, drafting=RequestDrafting(enabled)) for prompt in prompts]
            for enabled in (True, False)
        )
        return sum(
            first.result().checked().token_ids != second.result().checked().token_ids
            for first, second in zip(drafted, plain, strict=True)
        )
