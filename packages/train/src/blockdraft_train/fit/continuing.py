"""Continue the training of a drafter on one's own conversations, and keep it only if it got better."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockdraft.drafters import drafter_files, load_drafter
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.folders import check_free, check_writable, held
from blockdraft.formats import Checkpoint, read_drafter
from blockdraft.models.catalogue import BUNDLED
from blockdraft.prompt_sets import SAMPLES
from blockdraft.targets import Target, check_target, load_target, without_tokenizer
from blockdraft.timing import telling
from blockdraft.types import DEFAULT_BACKEND
from blockdraft_train.batches import Documents, split
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.hidden_states import read_hidden_states
from blockdraft_train.devices import make_accelerator
from blockdraft_train.fit.facts import duration
from blockdraft_train.fit.settings import FitSettings
from blockdraft_train.fit.steps import Where
from blockdraft_train.job import TrainingJob
from blockdraft_train.metrics import encode_prompts, measure_tau
from blockdraft_train.progress import FINISH, Progress, run_folder
from blockdraft_train.recipe import Recipe
from blockdraft_train.trainer import train
from blockdraft_train.variant import find_variant

LENGTH = 2048  # tokens of a conversation; later ones are not learned from
HELD_OUT, HELD_OUT_SHARE, MIN_DOCUMENTS = 16, 0.2, 5  # conversations held out at most, as a share; least of all
PROMPTS, TOKENS = 24, 96  # held-out prompts that are decoded, and tokens of a response
MAX_LOST = 0.03  # share of tau on general prompts that a drafter may lose
MINUTES = 30.0
ENDING = 1.1  # duration of a training that is told to finish, over its duration until then
MIN_SECONDS = 5.0  # that training gets, however long the measurements take
HIDDEN_STATES = "hidden-states"  # folder of hidden states in a folder of recorded conversations
# Some passes at low rates: each further pass over few tokens brings less on others.
FIELDS: dict[str, Any] = {"epochs": 3, "batch": 2, "optimizer": "muon", "schedule": "wsd", "warmup": 0.05}
FIELDS |= {"learning_rate": 1e-4, "muon_learning_rate": 0.002, "eval_every": 0, "eval_prompts": 0, "trackers": ()}


@dataclass(frozen=True)
class Taus:
    """Tau on held-out and on general prompts."""

    held_out: float
    general: float

    def lines(self, after: Taus) -> list[str]:
        """Return a line for each kind of prompts, with tau before and after."""
        rows = ("held-out prompts", self.held_out, after.held_out), ("general prompts", self.general, after.general)
        return [f"tau on {name}: {old:.3f} before, {new:.3f} after ({new / old - 1:+.1%})" for name, old, new in rows]

    def reason_against(self, after: Taus) -> str | None:
        """Return why a drafter with the later figures is not kept, or None if it is."""
        if after.held_out <= self.held_out:
            return f"it drafts held-out prompts no better ({after.held_out:.3f} instead of {self.held_out:.3f})"
        lost = 1 - after.general / self.general
        if lost >= MAX_LOST:
            return f"it loses {lost:.1%} on general prompts, and may lose less than {MAX_LOST:.0%}"
        return None


def continue_fit(where: Where, settings: FitSettings, source: Path, note: Callable[[str], None]) -> list[str]:
    """Continue a drafter on the conversations in a data folder, and write it if it got better.

    It is written if tau rises on conversations that it did not learn from, and falls by less than `MAX_LOST` on
    general prompts.

    Args:
        settings: `init` is the drafter, `minutes` the time of the whole command.
        source: Folder of `blockdraft serve --record` or `blockdraft data`.
        note: Called with sentences about the progress.

    Returns:
        Lines about the outcome.

    Raises:
        UsageError: Folders, data, drafter or target do not fit.
        BlockdraftError: The drafter got no better; the message says by how much.
    """
    with held(where.folder, "blockdraft fit"):
        return _continue(where, settings, source, note)


def _continue(where: Where, settings: FitSettings, source: Path, note: Callable[[str], None]) -> list[str]:
    began, minutes = time.monotonic(), MINUTES if settings.minutes is None else settings.minutes
    complaints, data = Complaints(), None
    with complaints.noting():
        check_free(where.out)
        check_writable(where.out)
    with complaints.noting():
        data = checked_data(source)
    with complaints.noting():
        if where.target is not None:
            check_target(where.target, where.revision)
    complaints.check()
    assert data is not None and settings.init is not None
    with telling(note, "Loading the target"):
        model, backend = where.target or "bundled", where.backend or DEFAULT_BACKEND
        named = {name: getattr(where, name) for name in ("dtype", "device", "adapter", "revision")}
        target = load_target(model, backend=backend, **named)
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, and `fit` needs one; put tokenizer.json into its folder.")
    data.check_tokenizer(target.tokenizer)
    init = drafter_files(settings.init, target.path)
    checkpoint = read_drafter(init, target.tokenizer.get_vocab(), target.num_layers)
    kind = load_drafter(init, target=target).kind
    documents = Documents(data, min(max(data.lengths), LENGTH, target.max_context))
    count = held_out_count(documents)
    prompts = list(held_out_prompts(documents, split(documents, count, settings.seed)[1], target))
    general = encode_prompts(SAMPLES.prompts, target, TOKENS)
    measure = partial(measure_taus, target=target, prompts=prompts, general=general)
    drafter = "the bundled drafter" if settings.init == BUNDLED else init
    with telling(note, f"Measuring {drafter} on {len(prompts)} held-out and {len(general)} general prompts"):
        start = time.monotonic()
        before = measure(init)
        measuring = time.monotonic() - start
    recipe = recipe_of(kind, checkpoint, str(init), documents, count, settings.seed)
    recipe = _with_hidden_states(recipe, kind, checkpoint, target, data, note)
    left = 60 * minutes - (time.monotonic() - began) - measuring
    seconds = max(left / ENDING, MIN_SECONDS)
    note(f"Training on {len(documents.usable) - count} conversations, for at most {duration(seconds)}.")
    trained = where.folder / "drafter"
    where.folder.mkdir(parents=True, exist_ok=True)
    accelerator = make_accelerator(recipe, run_folder(trained), where.device)
    with _finished_after(seconds, run_folder(trained)):
        train(TrainingJob(kind, target, data, trained, recipe, accelerator, progress=Progress(note=note)))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with telling(note, "Measuring the new drafter"):
        after = measure(trained)
    lines = before.lines(after)
    if (reason := before.reason_against(after)) is not None:
        raise BlockdraftError("\n".join([*lines, f"{where.out} is not written, because {reason}."]))
    shutil.move(trained, where.out)
    name = where.target or "bundled"
    return [*lines, f"The drafter is {where.out}. Use it: blockdraft serve --target {name} --drafter {where.out}"]


def checked_data(source: Path) -> TokenData:
    """Open a data folder whose documents are whole conversations. Raise a UsageError if they are not."""
    data = read_data(source)
    if data.manifest.get("split_turns"):
        raise UsageError(
            f"{source} holds a document for each turn, so that turns of one conversation could be held out from "
            "others; make it without --split-turns."
        )
    return data


def held_out_count(documents: Documents) -> int:
    """Return how many conversations to hold out. Raise a UsageError if there are too few."""
    if len(documents.usable) < MIN_DOCUMENTS:
        raise UsageError(
            f"The data hold {len(documents.usable)} usable conversations, and at least {MIN_DOCUMENTS} are needed; "
            "record more."
        )
    return max(1, min(HELD_OUT, int(HELD_OUT_SHARE * len(documents.usable))))


def held_out_prompts(documents: Documents, indices: list[int], target: Target) -> Iterator[list[int]]:
    """Yield the prompts of turns of held-out conversations, one turn of each, then a second one, and so on."""
    turns = [turn_prompts(documents[index]) for index in indices]
    in_order = [part[number] for number in range(max(map(len, turns))) for part in turns if number < len(part)]
    yield from [prompt for prompt in in_order if len(prompt) + TOKENS <= target.max_context][:PROMPTS]


def turn_prompts(document: Document) -> list[list[int]]:
    """Return the tokens before each response of a conversation."""
    written = document.supervised.int()
    begins = ((written[1:] - written[:-1]) == 1).nonzero().flatten() + 1
    return [document.tokens[:begin].tolist() for begin in begins.tolist()] or [document.tokens[:1].tolist()]


def recipe_of(kind: str, checkpoint: Checkpoint, init: str, documents: Documents, held_out: int, seed: int) -> Recipe:
    """Return the recipe that continues a drafter of a kind."""
    recipe_class = find_variant(kind).recipe_class
    fields = FIELDS | {"init": init, "held_out": held_out, "seed": seed, "length": documents.longest}
    fields |= {"block_size": checkpoint.config.block_size, "qat_bits": checkpoint.trained.qat_bits}
    if not hasattr(recipe_class, "init"):
        raise UsageError(f"{init} is a drafter of the kind {kind}, whose training cannot be continued.")
    return recipe_class(**fields)


def _with_hidden_states(
    recipe: Recipe, kind: str, checkpoint: Checkpoint, target: Target, data: TokenData, note: Callable[[str], None]
) -> Recipe:
    """Return the recipe with recorded hidden states if they fit, else with computed ones."""
    layers = (*checkpoint.config.target_layers, target.num_layers)
    folder = data.folder / HIDDEN_STATES
    try:
        read_hidden_states(folder).check(target, data, layers)
    except UsageError as error:
        if folder.exists():
            note(f"The hidden states are computed anew: {error}")
        return replace(recipe, hidden_states="memory")
    return replace(recipe, hidden_states=str(folder))


@contextlib.contextmanager
def _finished_after(seconds: float, run: Path) -> Iterator[None]:
    """Context in which a training run is told to finish after some time."""
    ended = threading.Event()

    def finish() -> None:
        if not ended.wait(seconds):
            while not run.is_dir() and not ended.wait(1):
                pass
            with contextlib.suppress(OSError):
                (run / FINISH).touch()

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure_taus(drafter: Path, target: Target, prompts: list[list[int]], general: list[list[int]]) -> Taus:
    return Taus(*(measure_tau(drafter, target, part, TOKENS) for part in (prompts, general)))
