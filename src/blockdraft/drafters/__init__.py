"""Drafters, and how one is found and loaded.

A kind of drafter with a network is a folder of this package, any other kind a file. Each ends in `DRAFTER`, and
`blockdraft.plugins` lists all of them.
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
    check_refinement,
    slots_behind,
)
from blockdraft.drafters.draft_vocab import DraftVocab, check_draft_vocab, read_draft_vocab
from blockdraft.errors import UsageError, describe
from blockdraft.formats import Trained, check_fits, read_config, read_drafter
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.formats.speculators_config import target_said
from blockdraft.models import TINY, alike, bundled_drafter, catalogue, located, made_for, model_of, recognised
from blockdraft.models.catalogue import BUNDLED
from blockdraft.plugins import drafter_modules
from blockdraft.targets import Target, causal_lm, describe_target, other_target_warning, with_draft_vocab
from blockdraft.types import JOINT, DraftModel

PAIR = TINY  # folder of the bundled target's drafters
BUNDLED_DFLASH = "bundled-dflash"


def bundled() -> dict[str, Path]:
    """Return the folders of the bundled drafters by name.

    "bundled" is the default drafter. "bundled-dflash" is the DFlash drafter, which other engines read as well. Both
    name the same folder if no other drafter is bundled.
    """
    dflash = PAIR / "drafter"
    others = sorted(config.parent for config in PAIR.glob("drafter-*/config.json"))
    assert len(others) <= 1, f"{PAIR} has {len(others)} drafters beside {dflash.name}; only one can be the default"
    return {"bundled": others[0] if others else dflash, BUNDLED_DFLASH: dflash}


def bundled_for(target: str | Path) -> Path | None:
    """Return the drafter that is bundled for a target, or None.

    This is the drafter of a model of the catalogue, or of the weights in a folder or file, quantized ones included.
    Arguments and errors as in `located`.
    """
    place = located(target)
    if (model := model_of(place)) is not None:
        return bundled_drafter(model)
    if not Path(place).exists():
        return None
    with suppress(UsageError):  # not a target, or not readable
        fingerprint = describe_target(place).fingerprint()
        return None if fingerprint is None else _bundled_by_fingerprint().get(fingerprint)
    return None


def _bundled_by_fingerprint() -> dict[str, Path]:
    """Map the fingerprint of each target to the drafter that was trained for it."""
    drafters = {}
    for path in [*reversed(bundled().values()), *filter(None, map(bundled_drafter, catalogue()))]:
        trained = gguf_trained(open_gguf(path)) if is_gguf(path) else Trained.read(read_config(path))
        if trained.target is not None:
            drafters[trained.target] = path
    return drafters


def for_others(drafter: str | Path, target: str | Path | None, note: Callable[[str], None]) -> str | Path:
    """Return the drafter to give to other engines: the bundled DFlash drafter for a bundled name, else the given one.

    Args:
        drafter: "bundled", "bundled-dflash", a hub name, whose files are downloaded, or any other drafter, which is
            returned unchanged. "bundled" is the drafter that is bundled for the target, where the target is a model of
            the catalogue with one.
        note: Function called with a message if the bundled DFlash drafter replaces another bundled one.
    """
    folders = bundled()
    own = bundled_for(target) if target is not None and str(drafter) == "bundled" else None
    if own is not None and own not in folders.values():
        return own
    if str(drafter) not in folders:
        return drafter if str(drafter) in names() else drafter_path(drafter)
    if folders[str(drafter)] != folders[BUNDLED_DFLASH]:
        note(
            f"{drafter} means {BUNDLED_DFLASH} for other engines, because all of them read DFlash; the default drafter "
            f"here is {folders[str(drafter)]}"
        )
    return folders[BUNDLED_DFLASH]


def entries() -> dict[str, DrafterSpec]:
    """Return all kinds of drafters by name."""
    return {name: module.DRAFTER for name, module in sorted(drafter_modules().items())}


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
        path: Folder, GGUF file or hub name of a drafter, folder or GGUF file of a smaller language model with the
            target's tokens, or name of a drafter without a folder ("none" decodes without drafts, "mtp" is the MTP head
            in the target's folder).
            None or "bundled" is the drafter of `bundled_for`, else that of the bundled target, which also fits models
            made from it. For a model of the catalogue without a bundled drafter, None is "lookup".
            "bundled-dflash" is the bundled target's DFlash drafter. Several drafters joined by +, such as
            "lookup+bundled", draft together.
        target: Target to draft for. The drafter gets its dtype and device. A warning is logged if the drafter was
            trained for another target of the same shape.
        device: Device of a smaller language model, such as "cuda:1", or "cpu" next to a GPU; None is the target's. In a
            hybrid drafter, it applies to the language models only.
        ahead: Number of possible outcomes of a verification for which such a model drafts while the verification runs;
            0 is none. Needs `device`.
        draft_vocab: Tokens that a drafter with the target's output projection may draft, so that it reads only these
            rows of the projection; see `read_draft_vocab`. In a hybrid drafter, it applies to such members. None is all
            tokens.

    Raises:
        ValueError: Unknown folder or architecture, unreadable weights, a drafter for another target, a hybrid that
            names a drafter twice or has a member that drafts nothing, or a `device` or `draft_vocab` for a drafter that
            cannot use one.
    """
    own_device = on_its_own(device, ahead, target)
    kept = None if draft_vocab is None else read_draft_vocab(draft_vocab, target)
    try:
        paths = [path] if path is None else joined(path)
        # Each drafter packs its own rows of the output projection.
        hosts = [target if kept is None else with_draft_vocab(target, kept) for _ in paths]
        loaded = [_load(member, host, own_device, ahead) for member, host in zip(paths, hosts, strict=True)]
        if own_device is not None and not any(moved for _, moved in loaded):
            raise UsageError(
                f"The drafter {path or 'bundled'} cannot run on {own_device} beside a target on {target.device}: only "
                "a smaller language model can, because it reads nothing but tokens. Name such a model, or leave the "
                "device out."
            )
        drafters = [drafter for drafter, _ in loaded]
        whole = drafters[0] if len(drafters) == 1 else entries()["hybrid"].load(drafters, target)
    except UsageError as error:
        if own_device is not None or (path is not None and str(path) not in bundled()):
            raise
        raise UsageError(
            f"The tiny model's drafter, which {path or 'no drafter'} means here, does not fit this target: {error}"
            f'{_suggest_bundled(target)} Without one: "lookup", or "none".'
        ) from error
    if kept is not None:
        for drafter, host in zip(drafters, hosts, strict=True):
            drafter.draft_vocab = len(kept) if drafter.has_target_head else None
            host.draft_head = host.draft_head if drafter.has_target_head else None  # frees its memory
        if not any(drafter.has_target_head for drafter in drafters):
            raise UsageError(
                f"The drafter {path or 'bundled'} does not use the target's output projection, so draft_vocab would "
                "change nothing; leave it out."
            )
    return whole


def check_place(path: str | Path) -> None:
    """Raise the UsageError of `load_drafter` if a drafter is neither a name nor a folder or file. Needs no target."""
    for member in joined(path):
        if member not in names():
            folder = drafter_path(member)
            if not is_gguf(folder):
                _read_folder(folder, member)
            elif causal_lm(header := open_gguf(folder)) is None:
                kind_in(header)


def drafter_path(drafter: str | Path) -> Path:
    """Return the folder or file of a drafter. A hub name is downloaded where no path of that name exists.

    Raises:
        UsageError: The hub does not send it.
    """
    path = Path(drafter)
    if path.exists() or is_gguf(path) or not re.fullmatch(r"[\w-]+/[\w.-]+", str(drafter)):
        return path
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if path.parent.is_dir() and not isinstance(try_to_load_from_cache(str(drafter), "config.json"), str):
        return path  # with a mistake, which loading reports
    try:
        return Path(snapshot_download(str(drafter), allow_patterns=["*.json", "*.safetensors", "*.pt", "*.bin"]))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{drafter} is no folder here, and the hub does not send a drafter of that name ({describe(error)}); give "
            f"the folder of a drafter, a hub name, or one of the names {', '.join(sorted(names()))}."
        ) from error


def names() -> set[str]:
    """Return the names that `load_drafter` accepts in place of a folder."""
    return {*bundled(), *(name for name, entry in entries().items() if entry.by_name)}


def as_given(folder: str | Path) -> str:
    """Return a path to a drafter's folder that `load_drafter` cannot confuse with a drafter's name."""
    return f"./{folder}" if str(folder) in names() else str(folder)


def joined(path: str | Path) -> list[str]:
    """Split the path of a hybrid drafter into its members. A folder may have a + in its name."""
    pieces, members = str(path).split(JOINT), list[str]()
    while pieces:
        count = next((n for n in range(len(pieces), 1, -1) if Path(JOINT.join(pieces[:n])).exists()), 1)
        members.append(JOINT.join(pieces[:count]))
        del pieces[:count]
    for member in members if len(members) > 1 else ():
        if not member:
            raise UsageError(f"drafter is {str(path)!r}; put a folder or a name on each side of {JOINT}.")
        if members.count(member) > 1:
            raise UsageError(f"drafter is {str(path)!r}, which names {member} twice; name it once.")
    return members


def _load(path: str | Path | None, target: Target, device: torch.device | None, ahead: int) -> tuple[Drafter, bool]:
    """Load one drafter. The flag is whether it runs on `device` instead of the target's."""
    if path in (None, "bundled") and target.path is not None:
        lookup = path is None and model_of(target.path) is not None
        path = bundled_for(target.path) or ("lookup" if lookup else path)
    folder, kinds = bundled().get("bundled" if path is None else str(path)), entries()
    if folder is None and str(path) in names():
        return kinds[str(path)].load(None, target), False
    folder = folder or drafter_path(str(path))
    config, source = _read_gguf(folder, target) if is_gguf(folder) else _read_folder(folder, str(path))
    architectures = config.get("architectures")
    architectures = architectures if isinstance(architectures, list | tuple) else []
    claimants = [entry for entry in kinds.values() if entry.claims(config)]
    claimants += [entry for name in architectures for entry in kinds.values() if name in entry.architectures]
    if not claimants:
        known = ", ".join(f"{name} ({_few(kind.architectures)})" for name, kind in kinds.items() if kind.architectures)
        raise UsageError(
            f"{folder} has the architectures {architectures}; use a drafter of one of the known kinds: {known}."
        )
    entry, moved = claimants[0], device is not None and claimants[0].load_on is not None
    other = _made_for_another(str(path), config, target) if source is None else None
    if device is not None and entry.load_on is not None:
        drafter = entry.load_on(folder, target, device)
        drafter = draft_ahead(drafter, target, ahead) if ahead else drafter
    else:
        try:
            drafter = entry.load(folder, target)
        except UsageError as error:
            if other is None:
                raise
            raise UsageError(f"{error} {other}") from error
    warning = other_target_warning(folder, source, target)
    if other is not None:
        warning = f"{other} The output stays the target's own, but tau may be low."
    if warning:
        logging.getLogger(__name__).warning(warning)
    return drafter, moved


def _made_for_another(drafter: str, config: dict[str, Any], target: Target) -> str | None:
    """Return a sentence if a published drafter was made for another model than the target is named after, else None."""
    model = made_for(drafter)
    if model is None and (verifier := target_said(config)):
        model = recognised(str(verifier))
    if model is None or target.path is None:
        return None
    path = Path(target.path)
    name = path.parents[1].name if path.parent.name == "snapshots" else path.name  # in the hub's cache
    inside = open_gguf(path).metadata.get("general.name") if is_gguf(path) else None
    theirs = model_of(path) or recognised(str(inside or "")) or recognised(name)
    if theirs is None or alike(model, theirs):
        return None
    hubs = [published.hub for published in theirs.drafters if published.hub not in (BUNDLED, theirs.hub)]
    offer = f", for which there is {' or '.join(hubs)}" if hubs else ""
    return f"{drafter} was made for {model.name}, and {name} is {theirs.name} by its name{offer}."


def _suggest_bundled(target: Target) -> str:
    """Return a sentence on the bundled drafters that a target's sizes and tokens allow, or an empty string."""
    if target.path is not None and bundled_for(target.path) is not None:
        return " Use bundled, the one for this target."
    sentences, vocabulary = [], target.tokenizer.get_vocab() if target.tokenizer else None
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    for model in catalogue():
        if (place := bundled_drafter(model)) is not None:
            with suppress(UsageError):
                check_fits(read_drafter(place, vocabulary, target.num_layers).config, **sizes)
                sentences.append(f" {place} is for {model.name}, which has the same sizes.")
    return "".join(sentences)


def _read_gguf(file: Path, target: Target) -> tuple[dict[str, Any], str | None]:
    """Return the architecture of a GGUF file, as in a config.json, and the target that it was trained for."""
    header = open_gguf(file)
    if (name := causal_lm(header)) is not None:
        return {"architectures": [name]}, None
    config_class = type(drafter_config(header, target.num_layers))
    return {"architectures": [kind_in(header).configs()[config_class]]}, gguf_trained(header).target


def _read_folder(folder: Path, path: str) -> tuple[dict[str, Any], str | None]:
    """Return the config.json of a drafter's folder, and the target that it was trained for."""
    if not (folder / "config.json").is_file():
        hint = f" It holds the file {files[0]}, which may be one." if (files := sorted(folder.glob("*.gguf"))) else ""
        raise UsageError(
            f"{path} is no drafter; give a folder with config.json, a hub name, or one of the names "
            f"{', '.join(sorted(names()))}.{hint}"
        )
    raw = read_config(folder)
    if not isinstance(raw, dict):
        raise UsageError(f"{folder / 'config.json'} is not a JSON object; fetch or copy it again.")
    return raw, Trained.read(raw).target


def drafter_of(network: nn.Module, target: Target) -> NetworkDrafter:
    """Return a drafter that runs this network, which is moved to the target's device and dtype.

    Raises:
        UsageError: No drafter runs networks of this class, or a compiled runner has freed the network's weights.
    """
    if any(isinstance(module, nn.Linear) and module.weight is None for module in network.modules()):
        raise UsageError("The weights of this network were packed and freed; load the drafter again, or its network.")
    kinds = {entry.network: entry.drafter for entry in entries().values() if entry.network and entry.drafter}
    for network_class in type(network).__mro__:  # its own class, or the closest base class
        if network_class in kinds:
            return cast(NetworkDrafter, kinds[network_class](network, target))
    known = sorted(kind.__name__ for kind in kinds)
    raise UsageError(f"No drafter runs a {type(network).__name__}; give one of {known} or use load_drafter.")


def _few(names: Sequence[str]) -> str:
    """Return up to five names in full, or the first and the number of the others."""
    return ", ".join(names) if len(names) <= 5 else f"{names[0]} and {len(names) - 1} more"


__all__ = [
    "BUNDLED_DFLASH",
    "DIFFUSION_STEPS",
    "NOISE_SCHEDULE",
    "DraftCost",
    "Drafter",
    "DrafterSpec",
    "NetworkDrafter",
    "as_given",
    "bundled",
    "check_draft_vocab",
    "check_place",
    "check_refinement",
    "drafter_of",
    "drafter_path",
    "entries",
    "for_others",
    "hits",
    "joined",
    "load_drafter",
    "slots_behind",
]
