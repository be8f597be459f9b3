"""Drafters. A kind with a network is a folder of this package, any other kind a file.

Each registers itself as `DRAFTER`, an `DrafterSpec`. `plugins.parts` finds the parts of the folders: layouts, training,
checks and faster runners.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from blockdraft.drafters.ahead import draft_ahead, hits, on_its_own
from blockdraft.drafters.base import (
    DIFFUSION_STEPS,
    NOISE_SCHEDULE,
    DraftCost,
    Drafter,
    DrafterSpec,
    NetworkDrafter,
    State,
    check_refinement,
    slots_behind,
)
from blockdraft.drafters.draft_vocab import DraftVocab, check_draft_vocab, read_draft_vocab
from blockdraft.errors import UsageError
from blockdraft.formats import Trained, check_fits, read_config, read_drafter
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.kernels.cpu.threads import let_team_go
from blockdraft.models import TINY, bundled_drafter, catalogue, located, model_of
from blockdraft.plugins import parts, plugins
from blockdraft.targets import Target, describe_target, other_target_warning, with_draft_vocab
from blockdraft.types import JOINT, DraftModel

PAIR = TINY  # folder of the bundled target's drafters
BUNDLED_DFLASH = "bundled-dflash"


def bundled() -> dict[str, Path]:
    """Folders of the bundled drafters by name.

    "bundled" is the default drafter; "bundled-dflash" is the DFlash drafter, which other engines read as well. Both
    name the same folder if no other drafter is bundled.
    """
    dflash = PAIR / "drafter"
    others = sorted(config.parent for config in PAIR.glob("drafter-*/config.json"))
    assert len(others) <= 1, f"{PAIR} has {len(others)} drafters beside {dflash.name}; only one can be the default"
    return {"bundled": others[0] if others else dflash, BUNDLED_DFLASH: dflash}


def bundled_for(target: str | Path) -> Path | None:
    """The drafter that is bundled for a target: for a model of the catalogue that has one, or for a folder or file with
    the weights that one was trained for, also where they were rounded since. Arguments and errors as in `located`."""
    place = located(target)
    if (model := model_of(place)) is not None:
        return bundled_drafter(model)
    if not Path(place).exists():
        return None
    with suppress(UsageError):  # what is no target, or cannot be read, has none
        return _bundled_by_fingerprint().get(describe_target(place).fingerprint())
    return None


def _bundled_by_fingerprint() -> dict[str | None, Path]:
    """The bundled drafters by the fingerprint of the target that each was trained for."""
    places = [*reversed(bundled().values()), *filter(None, map(bundled_drafter, catalogue()))]
    trained = [gguf_trained(open_gguf(at)) if is_gguf(at) else Trained.read(read_config(at)) for at in places]
    return {one.target: place for one, place in zip(trained, places, strict=True) if one.target is not None}


def for_others(drafter: str | Path, target: str | Path | None, note: Callable[[str], None]) -> str | Path:
    """Drafter for engines other than this one: the bundled DFlash drafter for any bundled name, else as given.

    Args:
        drafter: "bundled", "bundled-dflash", or any other drafter, which is returned unchanged. "bundled" is the one
            that is bundled for the target where that is a model of the catalogue with one.
        note: Function called with a message where the bundled DFlash drafter takes the place of another bundled one.
    """
    folders = bundled()
    own = bundled_for(target) if target is not None and str(drafter) == "bundled" else None
    if own is not None and own not in folders.values():
        return own
    if str(drafter) not in folders:
        return drafter
    if folders[str(drafter)] != folders[BUNDLED_DFLASH]:
        note(
            f"{drafter} means {BUNDLED_DFLASH} for other engines, because all of them read DFlash; the default drafter "
            f"here is {folders[str(drafter)]}"
        )
    return folders[BUNDLED_DFLASH]


def entries() -> dict[str, DrafterSpec]:
    """All kinds of drafters, by the name of their file or folder."""
    found = {name: module.DRAFTER for name, module in plugins(__name__).items() if hasattr(module, "DRAFTER")}
    return dict(sorted({**found, **{name: module.DRAFTER for name, module in parts("drafter").items()}}.items()))


def load_drafter(
    path: str | Path | None = None,
    *,
    target: Target,
    device: str | torch.device | None = DraftModel.drafter_device,
    ahead: int = DraftModel.draft_ahead,
    draft_vocab: DraftVocab | None = DraftModel.draft_vocab,
) -> Drafter:
    """Load the drafter of a target.

    Args:
        path: Folder or GGUF file of a drafter, folder of a smaller language model with the target's tokens, or name of
            a drafter that needs no folder ("none" decodes without drafts, "mtp" is the MTP head in the target's own
            folder). None or "bundled" is the drafter of `bundled_for`, or else the bundled target's, which fits models
            made from it too; for a model of the catalogue without a bundled drafter None is
            "prompt_lookup". "bundled-dflash" is the bundled target's DFlash drafter, even if its default is of another
            kind. Several drafters joined by +, such as "prompt_lookup+bundled", draft together.
        target: Target to draft for, whose dtype and device the drafter gets. A warning is logged if the drafter was
            trained for another target of the same shape.
        device: Device of a smaller language model, such as "cuda:1", or "cpu" beside a GPU; None is the target's
            device. In a combination, it applies to the language models only.
        ahead: Number of possible outcomes of a verification for which such a model drafts while the verification runs;
            0 is none. Needs `device`.
        draft_vocab: Tokens that a drafter with the target's output projection may guess, so that a draft reads these
            rows of it only; see `read_draft_vocab`. In a combination, it applies to such drafters. None is all.

    Raises:
        ValueError: Unknown folder or architecture, unreadable weights, a drafter for another target, a combination
            that names a drafter twice or holds one that guesses nothing, or a `device` or a `draft_vocab` for a
            drafter that cannot use one.
    """
    placed = on_its_own(device, ahead, target)
    kept = None if draft_vocab is None else read_draft_vocab(draft_vocab, target)
    try:
        names = [path] if path is None else joined(path)
        # Each drafter packs rows of its own.
        lent = [target if kept is None else with_draft_vocab(target, kept) for _ in names]
        parts = [_load(name, each, placed, ahead) for name, each in zip(names, lent, strict=True)]
        if placed is not None and not any(movable for _, movable in parts):
            raise UsageError(
                f"The drafter {path or 'bundled'} cannot run on {placed} beside a target on {target.device}: only a "
                "smaller language model can, because it reads nothing but tokens. Name such a model, or leave the "
                "device out."
            )
        drafters = [drafter for drafter, _ in parts]
        [combined] = [entry for entry in entries().values() if entry.joins]
        whole = drafters[0] if len(drafters) == 1 else combined.load(drafters, target)
    except UsageError as error:
        if placed is not None or (path is not None and str(path) not in bundled()):
            raise
        raise UsageError(
            f"The tiny model's drafter, which {path or 'no drafter'} means here, does not fit this target: {error}"
            f'{_of_same_sizes(target)} Without one: "prompt_lookup", or "none".'
        ) from error
    finally:
        let_team_go()
    if kept is not None:
        for drafter, each in zip(drafters, lent, strict=True):
            drafter.draft_vocab = len(kept) if drafter.has_target_head else None
            each.draft_head = each.draft_head if drafter.has_target_head else None  # gives memory back
        if not any(drafter.has_target_head for drafter in drafters):
            raise UsageError(
                f"The drafter {path or 'bundled'} does not use the target's output projection, so draft_vocab would "
                "change nothing; leave it out."
            )
    return whole


def check_place(path: str | Path) -> None:
    """Raise the UsageError of `load_drafter` for a drafter that is neither a name nor a folder or file of one. It needs
    no target."""
    for one in joined(path):
        folder = Path(one)
        if one not in names():
            kind_in(open_gguf(folder)) if is_gguf(folder) else _said_by_folder(folder, one)


def names() -> set[str]:
    """Names that `load_drafter` accepts in the place of a folder."""
    return {*bundled(), *(name for name, entry in entries().items() if entry.by_name)}


def as_given(folder: str | Path) -> str:
    """Path of a drafter's folder that `load_drafter` cannot confuse with a drafter's name."""
    return f"./{folder}" if str(folder) in names() else str(folder)


def joined(path: str | Path) -> list[str]:
    """Drafters that a combination joins; the path alone if it joins none. A folder may have a + in its name."""
    pieces, names = str(path).split(JOINT), list[str]()
    while pieces:
        count = next((n for n in range(len(pieces), 1, -1) if Path(JOINT.join(pieces[:n])).exists()), 1)
        names.append(JOINT.join(pieces[:count]))
        del pieces[:count]
    for name in names if len(names) > 1 else ():
        if not name:
            raise UsageError(f"drafter is {str(path)!r}; put a folder or a name on each side of {JOINT}.")
        if names.count(name) > 1:
            raise UsageError(f"drafter is {str(path)!r}, which names {name} twice; name it once.")
    return names


def _load(path: str | Path | None, target: Target, device: torch.device | None, ahead: int) -> tuple[Drafter, bool]:
    """Load one drafter, and tell whether it runs on the given device instead of the target's."""
    if path in (None, "bundled") and target.path is not None:
        lookup = path is None and model_of(target.path) is not None
        path = bundled_for(target.path) or ("prompt_lookup" if lookup else path)
    folder = bundled().get("bundled" if path is None else str(path))
    known = entries()
    if folder is None and str(path) in names():
        return known[str(path)].load(None, target), False
    folder = folder or Path(str(path))
    said, source = _said(folder, target) if is_gguf(folder) else _said_by_folder(folder, str(path))
    found = said.get("architectures")
    found = found if isinstance(found, list | tuple) else []
    kinds = [entry for entry in known.values() if entry.claims(said)]
    kinds += [entry for name in found for entry in known.values() if name in entry.architectures]
    if kinds:
        entry, own = kinds[0], False
        if device is None or entry.load_on is None:
            drafter = entry.load(folder, target)
        else:
            own, drafter = True, entry.load_on(folder, target, device)
            drafter = draft_ahead(drafter, target, ahead) if ahead else drafter
        told = other_target_warning(folder, source, target)
        if told:
            logging.getLogger(__name__).warning(told)
        return drafter, own
    others = ", ".join(f"{name} ({_few(entry.architectures)})" for name, entry in known.items() if entry.architectures)
    raise UsageError(f"{folder} has the architectures {found}; use a drafter of one of the known kinds: {others}.")


def _of_same_sizes(target: Target) -> str:
    """Sentence on the bundled drafters that a target's sizes and tokens allow; empty if there are none."""
    if target.path is not None and bundled_for(target.path) is not None:
        return " Use bundled, the one for this target."
    found, vocabulary = [], target.tokenizer.get_vocab() if target.tokenizer else None
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    for model in catalogue():
        if (place := bundled_drafter(model)) is not None:
            with suppress(UsageError):
                check_fits(read_drafter(place, vocabulary, target.num_layers).config, **sizes)
                found.append(f" {place} is for {model.name}, which has the same sizes.")
    return "".join(found)


def _said(file: Path, target: Target) -> tuple[dict[str, Any], str | None]:
    """Architecture of a GGUF file, as in a config.json, and the target that it was trained for."""
    header = open_gguf(file)
    found = type(drafter_config(header, target.num_layers))
    return {"architectures": [kind_in(header).configs()[found]]}, gguf_trained(header).target


def _said_by_folder(folder: Path, path: str) -> tuple[dict[str, Any], str | None]:
    if not (folder / "config.json").is_file():
        of_hub = re.fullmatch(r"[\w-]+/[\w.-]+", path) and not folder.exists()
        hint = f" If it is on the hub, fetch it: hf download {path} --local-dir DIR." if of_hub else ""
        if files := sorted(folder.glob("*.gguf")):
            hint = f" It holds the file {files[0]}, which may be one."
        raise UsageError(
            f"{path} is no drafter; give a folder with config.json or one of the names {', '.join(sorted(names()))}."
            f"{hint}"
        )
    raw = read_config(folder)
    if not isinstance(raw, dict):
        raise UsageError(f"{folder / 'config.json'} is not a JSON object; fetch or copy it again.")
    return raw, Trained.read(raw).target


def drafter_of(network: nn.Module, target: Target) -> NetworkDrafter:
    """Drafter that runs this network, which is moved to the target's device and dtype.

    Raises:
        UsageError: No drafter runs networks of this class.
    """
    kinds = {entry.network: entry.drafter for entry in entries().values() if entry.network and entry.drafter}
    for ancestor in type(network).__mro__:  # the closest ancestor that a drafter runs wins
        if ancestor in kinds:
            return cast(NetworkDrafter, kinds[ancestor](network, target))
    known = sorted(kind.__name__ for kind in kinds)
    raise UsageError(f"No drafter runs a {type(network).__name__}; give one of {known} or use load_drafter.")


def _few(names: Sequence[str]) -> str:
    """Up to five names in full; of more, the first and the number of the others."""
    return ", ".join(names) if len(names) <= 5 else f"{names[0]} and {len(names) - 1} more"


__all__ = [
    "BUNDLED_DFLASH",
    "DIFFUSION_STEPS",
    "NOISE_SCHEDULE",
    "DraftCost",
    "Drafter",
    "DrafterSpec",
    "NetworkDrafter",
    "State",
    "as_given",
    "bundled",
    "check_draft_vocab",
    "check_place",
    "check_refinement",
    "drafter_of",
    "entries",
    "for_others",
    "hits",
    "joined",
    "load_drafter",
    "slots_behind",
]
