"""Reports on checkpoints: layout, fit of drafter and target, and commands that start engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blockdraft.drafters import as_given
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.starting import Start
from blockdraft.targets import Description
from blockdraft_tools.engines import starts


@dataclass(frozen=True)
class Check:
    """One check of whether a drafter fits a target.

    Attributes:
        name: Name of the check.
        holds: Whether it holds; None if that is unknown.
        detail: The values compared, in words.
    """

    name: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class Report:
    """Report on a checkpoint. All values but `config` can be written as JSON; lengths are in tokens.

    Attributes:
        path: Folder, hub name or file.
        what: Kind of checkpoint: "drafter", "target", "adapter" or "block-diffusion model".
        layout: Layout on disk: a file of `formats`, "gguf", "transformers" or "peft".
        about: Architecture and sizes.
        wants: Properties of the target that a drafter or adapter is for.
        conventions: Resolved values of a drafter that other readers may interpret differently.
        fits: Checks against a given target; empty without one.
        starts: Command of each engine, by its name.
        config: Configuration of a drafter's network.
    """

    path: str
    what: str
    layout: str
    about: Mapping[str, Any]
    wants: Mapping[str, Any] = field(default_factory=dict)
    conventions: Mapping[str, Any] = field(default_factory=dict)
    fits: tuple[Check, ...] = ()
    starts: Mapping[str, Start] = field(default_factory=dict)
    config: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report without `config`."""
        return {name: value for name, value in asdict(self).items() if name != "config"}


def layers_of(target: Description) -> int:
    return int(target.config.num_hidden_layers)


def checks_of(
    config: Any, target_layers: Sequence[int], layers_known: bool, fingerprint: str | None, target: Description
) -> list[Check]:
    """Return the checks that apply to every kind of drafter.

    Args:
        config: Configuration of the drafter's network.
        target_layers: Target layers that it reads, from 0; empty if it reads the input of the target's head.
        layers_known: Whether the number of target layers in `config` is known.
        fingerprint: `Target.source_fingerprint` of the drafter's target, if known.
    """
    theirs = {"hidden size": target.config.hidden_size, "vocabulary": target.config.vocab_size}
    ours = {"hidden size": config.hidden_size, "vocabulary": config.vocab_size}
    if layers_known:
        theirs["layers"], ours["layers"] = layers_of(target), config.num_target_layers
    checks = [
        Check(name, ours[name] == theirs[name], f"{ours[name]} here, {theirs[name]} in the target") for name in ours
    ]
    if target_layers:
        inside = max(target_layers) < layers_of(target)
        checks.append(
            Check("target_layers", inside, f"the highest is {max(target_layers)} of {layers_of(target)} layers, from 0")
        )
    if hasattr(config, "max_position_embeddings"):
        longest = target.text.max_context
        detail = f"{config.max_position_embeddings} here, {longest} in the target"
        checks.append(Check("context", config.max_position_embeddings >= longest, detail))
    own = target.fingerprint()
    same = None if fingerprint is None or own is None else fingerprint == own
    detail = f"{fingerprint or 'not known'} here, {own or 'not known'} in the target"
    return [*checks, Check("fingerprint", same, detail)]


def word_of(number: int, words: list[str] | None, target: Description | None) -> str | None:
    """Return the text of a token from the drafter's list or else the target's tokenizer, if either has it."""
    if words is not None:
        return words[number] if number < len(words) else None
    if target is None or target.text.tokenizer is None:
        return None
    token: Any = target.text.tokenizer.convert_ids_to_tokens(number)
    return None if token is None else str(token)


def same_tokenizer(words: list[str] | None, target: Description) -> Check:
    if words is None:
        return Check("tokenizer", None, "the drafter holds none")
    if target.text.tokenizer is None:
        return Check("tokenizer", None, "the target has none")
    wrong = [
        token for token, number in target.text.tokenizer.get_vocab().items() if words[number : number + 1] != [token]
    ]
    detail = "the same tokens" if not wrong else f"{len(wrong)} tokens differ, such as {wrong[0]!r}"
    return Check("tokenizer", not wrong, detail)


def same_mask(config: Any, target: Description) -> Check:
    """Check that the mask token, which stands for tokens not drafted yet, is not an end token."""
    ends = config.mask_token_id in target.text.eos_token_ids
    word = word_of(config.mask_token_id, None, target)
    detail = f"{config.mask_token_id} is {'no token of its tokenizer' if word is None else repr(word)}"
    return Check("mask token", not ends, f"{detail}{', which ends responses' if ends else ''}")


def lines_of(config: Any, layout: str, path: str, wanted: str | None, target: Description | None) -> dict[str, Start]:
    """Return the command of each engine for a drafter, by the engine's name.

    Args:
        wanted: Name of the target in the drafter's files, used if no target is given.
    """
    name = str(wanted or "TARGET") if target is None else target.path
    is_file = target is not None and is_gguf(name)
    folder = "TARGET" if is_file else name
    return starts(config, layout, as_given(path), folder, ["--target", name], name if is_file else None)
