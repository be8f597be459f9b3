"""Ways in which checkpoints of a kind of drafter are read wrongly, and how the drafter is asked in each of them: the
`BENCH` of `checks.py` in its folder, a `Bench` that is found by the configuration that it examines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockdraft.data.taps import tapped_features
from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, read_drafter
from blockdraft.plugins import parts
from blockdraft.targets import Target
from blockdraft.training.batches import Rows
from blockdraft.training.objectives import Slots
from blockdraft.training.variant import find_variant

CHUNK = 16  # anchors of a draft pass
THETAS = (10_000.0, 1_000_000.0, 10_000_000.0)

Tensors = Mapping[str, Tensor]
# Tokens `[S]` int64, and the places of anchors.
Text = tuple[Tensor, Sequence[int]]


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint.

    Attributes:
        fault: What would be wrong with the checkpoint if this reading is right, in a word, such as "taps"; empty for
            the reading as its configuration says.
        told: The reading in words.
        remedy: What to do then.
        config: Of the network.
        shift: By how many tokens a guess stands behind the place that its configuration says.
        lag: By how many tokens the features that a guess is made of are older than its kind says.
        taps: In place of those of the configuration; None keeps them.
        tensors: What this reading makes of the checkpoint's tensors.
        dtype: Of the draft pass; None is the target's.
    """

    fault: str
    told: str
    remedy: str
    config: Any
    shift: int = 0
    lag: int = 0
    taps: tuple[int, ...] | None = None
    tensors: Callable[[Tensors], Tensors] = dict
    dtype: torch.dtype | None = None


USUAL = "as its configuration says"


class Bench(ABC):
    """A drafter beside its target, asked as training asks it.

    Attributes:
        examines: Class of the configurations that it knows, and not those derived from it.
    """

    examines: ClassVar[type]

    def __init__(self, target: Target, found: Checkpoint) -> None:
        self.target, self.found, self.config = target, found, found.config
        self._features: dict[tuple[tuple[int, ...], Tensor], Tensor] = {}

    @property
    def block_size(self) -> int:
        """Of the drafter, anchor included."""
        return int(self.config.block_size)

    @abstractmethod
    def readings(self, longest: int) -> Iterator[Reading]:
        """The reading as the configuration says, and then the others.

        Args:
            longest: Tokens of the longest text that they are tried on.
        """

    @abstractmethod
    def right(self, reading: Reading, texts: Sequence[Text]) -> Tensor:
        """`[A, K]` int64 over all anchors, 1 where the k-th guess behind an anchor is the text's own token, given those
        before it. K is the same for all readings."""

    @abstractmethod
    def lengths(self, tokens: Tensor, anchors: Sequence[int]) -> list[int]:
        """At each anchor, the right guesses before the first wrong one, guessed as in decoding."""

    def features(self, taps: tuple[int, ...], tokens: Tensor) -> Tensor:
        """Features of a text, `[S, m * H]`, in the target's dtype."""
        if (taps, tokens) not in self._features:
            self._features[taps, tokens] = tapped_features(self.target, taps, [tokens])[0]
        return self._features[taps, tokens]


class TaughtBench(Bench):
    """For drafters whose training says itself what they guess: each guess is made of the features before the anchor,
    and of the text's own tokens before the one that is guessed.

    Attributes:
        network: Class of the drafter's network.
        compared: K of `right`.
    """

    network: ClassVar[type[nn.Module]]

    def __init__(self, target: Target, found: Checkpoint) -> None:
        super().__init__(target, found)
        variant: Any = find_variant(variant_of(self.network))
        self._variant = variant(variant.recipe_class(block_size=self.block_size))

    @property
    def compared(self) -> int:
        return self.block_size - 1

    @torch.no_grad()
    def right(self, reading: Reading, texts: Sequence[Text]) -> Tensor:
        network, count, first = self._network(reading), self.compared, reading.shift
        passes = (one for text in texts for one in self._passes(network, reading, *text))
        return torch.cat([(told[:, first : first + count] == said[:, :count]).long().cpu() for told, said in passes])

    @torch.no_grad()
    def lengths(self, tokens: Tensor, anchors: Sequence[int]) -> list[int]:
        reading, found = Reading("", "", "", self.config), list[int]()
        for told, said in self._passes(self._network(reading), reading, tokens, anchors):
            found += (told == said).long().cumprod(dim=1).sum(dim=1).tolist()
        return found

    def _network(self, reading: Reading) -> nn.Module:
        network = self.network(reading.config).float().to(self.target.device).eval()
        network.load_state_dict(reading.tensors(self.found.tensors))  # casts
        return network

    def _passes(
        self, network: nn.Module, reading: Reading, tokens: Tensor, anchors: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For some anchors at a time the guesses `[C, K]` and the text's own tokens there, -1 behind its end."""
        device, count = self.target.device, self.block_size - 1
        taps = self.config.taps if reading.taps is None else reading.taps
        features = self.features(taps, tokens).float().roll(reading.lag, dims=0)[None]
        row = tokens.to(device)[None]
        padded = torch.cat([row[0], row.new_full((count,), -1)])
        for some in torch.tensor(anchors, dtype=torch.int64, device=device).split(CHUNK):
            said = torch.stack([padded[some + k] for k in range(count + 1)], dim=1)
            blocks, places = said.clamp(min=0), torch.arange(len(tokens), device=device)[None]
            rows = Rows(row, places, torch.zeros_like(row), some[None], blocks[None], (said[:, 1:] >= 0)[None])
            with self._precision(reading):
                hidden = self._variant.hidden(network, self.target, features, rows)[0]
                logits = self._variant.logits(network, self.target, hidden).float()
                slots = Slots(hidden, logits, blocks, said[:, 1:] >= 0)
                yield self._variant.guesses(network, slots), said[:, 1:]

    def _precision(self, reading: Reading) -> AbstractContextManager[Any]:
        """The target's own, as in decoding, as nearly as training can have it."""
        dtype = reading.dtype or self.target.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.target.device.type, dtype)


def variant_of(network: type[nn.Module]) -> str:
    """The variant that trains a network of this class."""
    return next(name for name, entry in entries().items() if entry.network is network)


def neighbours(config: Any) -> Iterator[Reading]:
    """Taps that are one layer off."""
    for step in (1, -1):
        taps = tuple(tap + step for tap in config.taps)
        if min(taps) >= 0 and max(taps) < config.num_target_layers:
            told = f"taps {list(taps)} in place of {list(config.taps)}"
            remedy = f"Write {list(taps)} as the target's layers into config.json; some formats count from 1."
            yield Reading("taps", told, remedy, config, taps=taps)


def lags(config: Any) -> Iterator[Reading]:
    """Features of another token than the one before a row's own."""
    for lag, told in ((1, "of two tokens before its own"), (-1, "of its own token")):
        remedy = (
            "Train it anew with the feature of the token before: that is what there is while drafting, here and in "
            "other engines."
        )
        yield Reading("shift", f"each row with the feature {told}", remedy, config, lag=lag)


def before_norm(config: Any) -> Reading:
    """The last layer's own output, where a drafter reads what the target's head reads."""
    remedy = "Train it anew on the input of the target's head, which is behind the target's last norm."
    taps = (config.num_target_layers - 1,)
    return Reading("taps", "the target's last hidden state before its norm", remedy, config, taps=taps)


def rope(config: Any, shape: Mapping[str, Any]) -> Iterator[Reading]:
    """Other rotary bases.

    Args:
        shape: As in `Target`.
    """
    for theta in dict.fromkeys((shape.get("rope_theta", config.rope_theta), *THETAS)):
        if theta != config.rope_theta:
            told = f"rope_theta {theta:g} in place of {config.rope_theta:g}"
            remedy = f"Write {theta:g} as rope_theta into config.json."
            yield Reading("rope", told, remedy, replace(config, rope_theta=float(theta)))


def precision(config: Any, dtype: torch.dtype) -> Iterator[Reading]:
    """More of it, where the target has less."""
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        told = f"the draft pass in float32 in place of {name}"
        remedy = f"Its numbers do not fit {name}; run the pair in bfloat16 or float32 (--dtype)."
        yield Reading("dtype", told, remedy, config, dtype=torch.float32)


def halves_swapped(*names: str) -> Callable[[Tensors], Tensors]:
    """Of these matrices the first half of the columns behind the second."""
    return lambda tensors: {
        **tensors,
        **{name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in names},
    }


def bench_of(path: str | Path, target: Target) -> tuple[Bench, str | None]:
    """A drafter beside its target, and the fingerprint of the target that it was trained for, where it is known.

    Args:
        path: Folder or GGUF file.

    Raises:
        ValueError: It cannot be read, or no drafter's folder has `checks.py` for its kind.
    """
    if not Path(path).exists():
        raise UsageError(f"There is no {path}; give the folder or GGUF file of a drafter that has a network.")
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    found = read_drafter(path, vocabulary, target.num_layers)
    kinds: list[type[Bench]] = [module.BENCH for module in parts("checks").values()]
    for kind in kinds:
        if type(found.config) is kind.examines:
            return kind(target, found), found.trained_for
    raise UsageError(f"{path} is of a kind ({type(found.config).__name__}) that cannot be examined here.")
