"""Checks of `blockdraft doctor`, which read a drafter's checkpoint differently and compare acceptance.

A module of this package, or of an entry point of the group `blockdraft_train.checkers`, defines `CHECKERS`:
subclasses of `Checker` for the classes of configurations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, read_drafter
from blockdraft.plugins import load_all, plugins
from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.objectives import Slots
from blockdraft_train.variant import find_variant

CHUNK = 16  # anchors per draft pass
THETAS = (10_000.0, 1_000_000.0, 10_000_000.0)

Tensors = Mapping[str, Tensor]
# Tokens `[S]` int64, and indices of anchors.
Text = tuple[Tensor, Sequence[int]]


@dataclass(frozen=True)
class Assumption:
    """An assumption about a checkpoint, under which the drafter drafts again.

    Attributes:
        config: Configuration of the network under this assumption.
        fault: Name of the fault if the drafter does better, such as "target_layers". Empty for the first check, which
            follows the configuration.
        assumption: What the check assumes, in words.
        remedy: What to do if the drafter does better.
        shift: Number of tokens by which draft tokens are later than the configuration says.
        lag: Number of tokens by which hidden states are older than this kind of drafter expects.
        target_layers: Target layers that replace those of the configuration, if any.
        tensors: Function that changes the tensors of the checkpoint.
        dtype: Dtype of the draft pass; None is the target's.
    """

    config: Any
    fault: str = ""
    assumption: str = "as its configuration says"
    remedy: str = ""
    shift: int = 0
    lag: int = 0
    target_layers: tuple[int, ...] | None = None
    tensors: Callable[[Tensors], Tensors] = dict
    dtype: torch.dtype | None = None


class Checker(ABC):
    """Drafts on finished texts, as training does, under each check.

    Attributes:
        examines: Class of the configurations that it checks, without subclasses.
    """

    examines: ClassVar[type]

    def __init__(self, target: Target, checkpoint: Checkpoint) -> None:
        self.target, self.checkpoint, self.config = target, checkpoint, checkpoint.config
        self._hidden_states: dict[tuple[tuple[int, ...], Tensor], Tensor] = {}

    @property
    def block_size(self) -> int:
        """Block size of the drafter, anchor included."""
        return int(self.config.block_size)

    @abstractmethod
    def checks(self, longest: int) -> Iterator[Assumption]:
        """Yield all checks. The first follows the configuration.

        Args:
            longest: Number of tokens of the longest text.
        """

    @abstractmethod
    def right(self, check: Assumption, texts: Sequence[Text]) -> Tensor:
        """Return whether each draft token is right, given the text before it.

        Returns:
            `[A, K]` int64 over all anchors, 1 where the k-th draft token after an anchor is the token of the text. K is
            the same for all checks.
        """

    @abstractmethod
    def lengths(self, tokens: Tensor, anchors: Sequence[int]) -> list[int]:
        """Return for each anchor the number of right draft tokens before the first wrong one, as in decoding."""

    def hidden_states(self, target_layers: tuple[int, ...], tokens: Tensor) -> Tensor:
        """Return the hidden states of a text, `[S, m * H]` for m target layers, in the target's dtype."""
        if (target_layers, tokens) not in self._hidden_states:
            self._hidden_states[target_layers, tokens] = target_hidden_states(self.target, target_layers, [tokens])[0]
        return self._hidden_states[target_layers, tokens]


class VariantChecker(Checker):
    """A checker that drafts with the training variant.

    It suits drafters whose draft tokens depend on the hidden states before the anchor and on the text before them.

    Attributes:
        network: Class of the drafter's network.
        compared: K of `right`.
    """

    network: ClassVar[type[nn.Module]]

    def __init__(self, target: Target, checkpoint: Checkpoint) -> None:
        super().__init__(target, checkpoint)
        variant: Any = find_variant(variant_of(self.network))
        self._variant = variant(variant.recipe_class(block_size=self.block_size))

    @property
    def compared(self) -> int:
        return self.block_size - 1

    @torch.no_grad()
    def right(self, check: Assumption, texts: Sequence[Text]) -> Tensor:
        network, count, first = self._network(check), self.compared, check.shift
        passes = (draft for text in texts for draft in self._passes(network, check, *text))
        return torch.cat(
            [(drafted[:, first : first + count] == text[:, :count]).long().cpu() for drafted, text in passes]
        )

    @torch.no_grad()
    def lengths(self, tokens: Tensor, anchors: Sequence[int]) -> list[int]:
        check, lengths = Assumption(self.config), list[int]()
        for drafted, text in self._passes(self._network(check), check, tokens, anchors):
            lengths += (drafted == text).long().cumprod(dim=1).sum(dim=1).tolist()
        return lengths

    def _network(self, check: Assumption) -> nn.Module:
        network = self.network(check.config).float().to(self.target.device).eval()
        network.load_state_dict(check.tensors(self.checkpoint.tensors))  # casts
        return network

    def _passes(
        self, network: nn.Module, check: Assumption, tokens: Tensor, anchors: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield draft tokens `[C, K]` for up to `CHUNK` anchors, and the tokens of the text there, -1 after its end."""
        device, count = self.target.device, self.block_size - 1
        target_layers = self.config.target_layers if check.target_layers is None else check.target_layers
        hidden_states = self.hidden_states(target_layers, tokens).float().roll(check.lag, dims=0)[None]
        row = tokens.to(device)[None]
        padded = torch.cat([row[0], row.new_full((count,), -1)])
        positions = torch.arange(len(tokens), device=device)[None]
        for chunk in torch.tensor(anchors, dtype=torch.int64, device=device).split(CHUNK):
            text = torch.stack([padded[chunk + k] for k in range(count + 1)], dim=1)
            blocks, is_text = text.clamp(min=0), text[:, 1:] >= 0
            rows = PackedSequences(row, positions, torch.zeros_like(row), chunk[None], blocks[None], is_text[None])
            with self._precision(check):
                hidden = self._variant.hidden(network, self.target, hidden_states, rows)[0]
                logits = self._variant.logits(network, self.target, hidden).float()
                slots = Slots(hidden, logits, blocks, is_text)
                yield self._variant.draft_tokens(network, slots), text[:, 1:]

    def _precision(self, check: Assumption) -> AbstractContextManager[Any]:
        """Return a context with the precision of decoding, as closely as a float32 network can follow it."""
        dtype = check.dtype or self.target.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.target.device.type, dtype)


def variant_of(network: type[nn.Module]) -> str:
    """Return the variant that trains a network of this class."""
    return next(name for name, entry in entries().items() if entry.network is network)


def neighbour_target_layers(config: Any) -> Iterator[Assumption]:
    """Yield checks with target layers one higher and one lower."""
    for step in (1, -1):
        target_layers = tuple(target_layer + step for target_layer in config.target_layers)
        if min(target_layers) >= 0 and max(target_layers) < config.num_target_layers:
            assumption = f"target layers {list(target_layers)} in place of {list(config.target_layers)}"
            remedy = f"Set the target layers in config.json to {list(target_layers)}; some formats count from 1."
            yield Assumption(
                config, fault="target_layers", assumption=assumption, remedy=remedy, target_layers=target_layers
            )


def lags(config: Any) -> Iterator[Assumption]:
    """Yield checks with hidden states of one token earlier or later than the token before an input."""
    for lag, assumption in ((1, "of two tokens before its own"), (-1, "of its own token")):
        remedy = (
            "Train the drafter again with the hidden state of the previous token: in decoding, here and in other "
            "engines, that is the latest one."
        )
        yield Assumption(
            config, fault="shift", assumption=f"each input with the hidden state {assumption}", remedy=remedy, lag=lag
        )


def before_norm(config: Any) -> Assumption:
    """Return the check for the output of the last layer, for drafters that read the input of the target's head."""
    return Assumption(
        config,
        fault="target_layers",
        assumption="the target's last hidden state before its norm",
        remedy="Train the drafter again on the input of the target's head, which comes after the last norm.",
        target_layers=(config.num_target_layers - 1,),
    )


def rope(config: Any, shape: Mapping[str, Any]) -> Iterator[Assumption]:
    """Yield checks with other rotary bases: the target's, and common ones.

    Args:
        shape: `Target.shape`.
    """
    for theta in dict.fromkeys((shape.get("rope_theta", config.rope_theta), *THETAS)):
        if theta != config.rope_theta:
            assumption = f"rope_theta {theta:g} in place of {config.rope_theta:g}"
            remedy = f"Set rope_theta in config.json to {theta:g}."
            yield Assumption(
                replace(config, rope_theta=float(theta)), fault="rope", assumption=assumption, remedy=remedy
            )


def precision(config: Any, dtype: torch.dtype) -> Iterator[Assumption]:
    """Yield the check with a draft pass in float32, if the target has a smaller dtype."""
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        assumption = f"the draft pass in float32 in place of {name}"
        remedy = f"The drafter's numbers exceed the range of {name}; run the pair in bfloat16 or float32 (--dtype)."
        yield Assumption(config, fault="dtype", assumption=assumption, remedy=remedy, dtype=torch.float32)


def halves_swapped(*names: str) -> Callable[[Tensors], Tensors]:
    """Return a function that swaps the two halves of the columns of these matrices."""
    return lambda tensors: {
        **tensors,
        **{name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in names},
    }


def checker_of(path: str | Path, target: Target) -> tuple[Checker, str | None]:
    """Return the checker of a drafter, and the fingerprint of the target it was trained for, if known.

    Args:
        path: Folder or GGUF file of a drafter.

    Raises:
        UsageError: The drafter cannot be read, or its kind has no checks.
    """
    if not Path(path).exists():
        raise UsageError(f"There is no {path}; give the folder or GGUF file of a drafter, which must have a network.")
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    checkpoint = read_drafter(path, vocabulary, target.num_layers)
    modules = plugins(__package__) | load_all("blockdraft_train.checkers")
    kinds: list[type[Checker]] = [kind for module in modules.values() for kind in getattr(module, "CHECKERS", ())]
    for kind in kinds:
        if type(checkpoint.config) is kind.examines:
            return kind(target, checkpoint), checkpoint.trained.target
    raise UsageError(
        f"{path} holds a {type(checkpoint.config).__name__}, which cannot be examined; give another drafter."
    )
