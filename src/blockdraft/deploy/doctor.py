"""What is wrong where a drafter's guesses are refused.

Prompts are decoded, and at the places where a cycle began the drafter is asked again on the finished text, as training
asks it. Both must accept as much, or decoding is at fault. Then the drafter is read in other ways; if it guesses
clearly more in one of them, that is how it was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from blockdraft.data.features import tapped_features
from blockdraft.deploy.readings import Reading, readings
from blockdraft.deploy.settings import DoctorSettings
from blockdraft.drafters import Entry, entries, load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, read_drafter
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.nn.reduced_head import ReducedHead
from blockdraft.targets import Target, other_target_warning
from blockdraft.training.blocks import draft_hidden
from blockdraft.training.objectives import Slots
from blockdraft.training.variants import find_variant
from blockdraft.types import Drafting, SamplingParams

ROWS = 4  # answers at a time
CHUNK = 16  # anchors of a draft pass
SURE = 4.0  # standard errors by which a reading must be better
GAIN = 0.1  # share of the right guesses by which it must be better too
LEAST = 0.05  # and right guesses
NOTHING = 0.1  # S_1 below which a drafter guesses nothing of this target
ALIKE = 0.9  # share of the cycles in which decoding and the drafter alone must accept as many guesses

# Told which reading is tried, how many are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tried:
    """Attributes:
    accepted: Right guesses before the first wrong one, as a mean over anchors.
    by_position: S_1, S_2, ... over the same anchors.
    """

    fault: str
    told: str
    accepted: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Attributes:
    cycles: That were compared.
    decoded, own: S_1, S_2, ... over these cycles: as the engine accepted, and as the drafter guesses on the text.
    alike: Share of the cycles in which both accept as many.
    tried: Readings; the first is that of the configuration.
    fault: "decoding", "taps", "shift", "window", "causality", "rope", "dtype" or "target"; None where nothing is wrong.
    finding: The same in a sentence.
    remedy: What to do.
    """

    cycles: int
    decoded: tuple[float, ...]
    own: tuple[float, ...]
    alike: float
    tried: tuple[Tried, ...]
    fault: str | None
    finding: str
    remedy: str


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer.

    Attributes:
        tokens: `[S]` int64, of both.
        first: Where the answer begins.
        cycles: Place of the anchor, guesses that were drafted, and those accepted. The last cycle, which the answer's
            end may have cut, is left out.
    """

    tokens: Tensor
    first: int
    cycles: tuple[tuple[int, int, int], ...]

    def anchors(self, count: int) -> list[int]:
        """Up to so many places of the answer, evenly spread."""
        places = range(self.first, len(self.tokens) - 1)
        return [places[i * len(places) // count] for i in range(count)] if len(places) > count else list(places)


def examine(
    target: Target,
    drafter: str | Path,
    prompts: Sequence[str],
    how: DoctorSettings,
    progress: Progress = lambda stage, done, total: None,
) -> Diagnosis:
    """Examine a pair.

    Args:
        drafter: Folder of a drafter of the DFlash family.

    Raises:
        ValueError: The drafter is of another kind, does not fit the target or cannot be read, or the answers hold no
            cycle to look at.
    """
    bench = Bench(target, Path(drafter))
    answers = decode(target, drafter, prompts, how.max_new_tokens)
    count = sum(len(each.cycles) for each in answers)
    if not count:
        raise UsageError("The answers are too short to tell anything; give other prompts.")
    longest = max(len(each.tokens) for each in answers)
    ways = list(readings(bench.config, bench.first_slot, target.shape, target.dtype, longest))
    texts = [(each.tokens, each.anchors(how.anchors)) for each in answers]
    runs = list[Tensor]()
    for number, reading in enumerate(ways):
        progress(reading.told, number, len(ways))
        runs.append(bench.right(reading, texts).cumprod(dim=1))
    progress("compared", len(ways), len(ways))
    tried = tuple(
        Tried(one.fault, one.told, float(run.sum(1).double().mean()), tuple(run.double().mean(0).tolist()))
        for one, run in zip(ways, runs, strict=True)
    )
    own = [
        [min(run, drafted) for run, (_, drafted, _) in zip(bench.lengths(each), each.cycles, strict=True)]
        for each in answers
    ]
    pairs = [
        (mine, accepted)
        for each, found in zip(answers, own, strict=True)
        for mine, (_, _, accepted) in zip(found, each.cycles, strict=True)
    ]
    alike = sum(mine == accepted for mine, accepted in pairs) / count
    told = bench.other_target
    fault, finding, remedy = conclude(ways, runs, [mine for mine, _ in pairs], [got for _, got in pairs], alike, told)
    size = bench.config.block_size
    decoded, guessed = (tuple(_survival([pair[i] for pair in pairs], size)) for i in (1, 0))
    return Diagnosis(count, decoded, guessed, alike, tried, fault, finding, remedy)


def conclude(
    ways: Sequence[Reading],
    runs: Sequence[Tensor],
    own: Sequence[int],
    decoded: Sequence[int],
    alike: float,
    other_target: str | None,
) -> tuple[str | None, str, str]:
    """Fault, finding and remedy.

    Args:
        runs: For each reading `[A, K]`, whether the first k guesses were right.
        own, decoded: Guesses accepted in each cycle, by the drafter alone and by the engine.
        other_target: What to say where the drafter was trained for another target.
    """
    usual = runs[0].sum(1).double()
    better = []
    for reading, run in zip(ways[1:], runs[1:], strict=True):
        gains = run.sum(1).double() - usual
        gain, error = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        if gain > max(SURE * error, GAIN * float(usual.mean()), LEAST):
            better.append((gain, reading))
    if better:
        best = max(gain for gain, _ in better)
        gain, reading = next(pair for pair in better if pair[0] >= 0.9 * best)  # of those that are alike the plainest
        now = float(usual.mean())
        finding = f"It guesses {now:.2f} tokens right on average, and {now + gain:.2f} with {reading.told}."
        return reading.fault, finding, reading.remedy
    if alike < ALIKE and sum(decoded) < (1 - GAIN) * sum(own):
        finding = (
            f"Decoding accepted {sum(decoded)} guesses in {len(own)} cycles, and the drafter alone guesses {sum(own)} "
            "right at the same places."
        )
        return "decoding", finding, "That is a fault of this package; please report it with the pair."
    if float(runs[0][:, 0].double().mean()) < NOTHING:
        finding = "It guesses next to nothing in any reading: it was made for another target, or not trained."
        remedy = "Use the target that it was trained for, or train one for this (blockdraft fit)."
        return "target", f"{finding} {other_target}" if other_target else finding, remedy
    return None, "Decoding accepts what the drafter guesses, and no other reading guesses more.", other_target or ""


def decode(target: Target, drafter: str | Path, prompts: Sequence[str], tokens: int) -> list[Answered]:
    """Answer prompts greedily, with chains of all guesses that the drafter has."""
    encoded = [encode(prompt, target) for prompt in prompts]
    with Engine(target, load_drafter(drafter, target=target), ROWS, Drafting()) as engine:
        completions = [each.checked() for each in engine.generate(encoded, SamplingParams(max_new_tokens=tokens))]
    found = []
    for prompt, completion in zip(encoded, completions, strict=True):
        place, cycles = len(prompt), []
        for drafted, committed in zip(completion.stats.drafted, completion.stats.committed, strict=True):
            cycles.append((place, drafted, committed - 1))
            place += committed
        text = torch.tensor([*prompt, *completion.token_ids])
        found.append(Answered(text, len(prompt), tuple(cycles[:-1])))
    return found


def _survival(accepted: Sequence[int], block_size: int) -> list[float]:
    return [sum(count >= i for count in accepted) / len(accepted) for i in range(1, block_size)]


class Bench:
    """A drafter's network beside its target, as training runs it."""

    def __init__(self, target: Target, path: Path) -> None:
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
        self._target = target
        self._found: Checkpoint = read_drafter(path, vocabulary, target.num_layers)
        self.config = self._found.config
        kind = _entry(self.config)
        assert kind.network is not None and kind.variant is not None
        self._kind = cast("type[DFlashNetwork]", kind.network)
        variant: Any = find_variant(kind.variant)
        self._variant = variant(variant.recipe_class(block_size=self.config.block_size))
        self.first_slot = int(self._variant.first_slot)
        self.other_target = other_target_warning(path, self._found.trained_for, target)
        self._features: dict[tuple[tuple[int, ...], Tensor], Tensor] = {}
        borrowed, self._head = self._found.borrowed, target.head
        if borrowed is not None and borrowed.kept is not None and borrowed.head is not None:
            reduced = ReducedHead(borrowed.head, borrowed.kept, target.vocab_size)
            self._head = reduced.to(target.device, target.dtype)

    @torch.no_grad()
    def right(self, reading: Reading, texts: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
        """`[A, K]` int64 over all anchors, 1 where the k-th guess behind an anchor is the text's own token. K is the
        same for all readings, and the guesses are the best tokens of each slot by itself.

        Args:
            texts: Tokens `[S]` and the places of anchors.
        """
        count = max(1, self.config.block_size - 2)
        first = self.first_slot - reading.shift
        network = self._network(reading)
        return torch.cat(
            [
                (logits[:, first : first + count].argmax(dim=-1) == tokens[:, 1:]).long().cpu()
                for text in texts
                for _, logits, tokens in self._passes(network, *text, count)
            ]
        )

    @torch.no_grad()
    def lengths(self, answered: Answered) -> list[int]:
        """At each cycle's anchor, the right guesses before the first wrong one, guessed as in decoding."""
        network, count = self._network(Reading("", "", "", self.config)), self._variant.taught_slots
        slots, found = slice(self.first_slot, self.first_slot + count), list[int]()
        anchors = [place for place, _, _ in answered.cycles]
        for hidden, logits, tokens in self._passes(network, answered.tokens, anchors, count):
            seen = Slots(hidden[:, slots], logits[:, slots], tokens.clamp(min=0), tokens[:, 1:] >= 0)
            right = self._variant.guesses(network, seen) == tokens[:, 1:]
            found += right.long().cumprod(dim=1).sum(dim=1).tolist()
        return found

    def _network(self, reading: Reading) -> DFlashNetwork:
        dtype = reading.dtype or self._target.dtype
        network = self._kind(reading.config).to(self._target.device, dtype).eval()
        network.load_state_dict(self._found.tensors)  # casts
        return network

    def _passes(
        self, network: DFlashNetwork, tokens: Tensor, anchors: Sequence[int], count: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For some anchors at a time hidden states `[C, N, H]`, logits `[C, N, V]`, and the anchors' tokens with the
        `count` tokens behind them, `[C, 1 + count]`, -1 behind the end of the text."""
        target, taps = self._target, network.config.taps
        if (taps, tokens) not in self._features:
            self._features[taps, tokens] = tapped_features(target, taps, [tokens])[0]
        dtype, device = next(network.parameters()).dtype, target.device
        features = self._features[taps, tokens].to(dtype)[None]
        padded = torch.cat([tokens, tokens.new_full((count,), -1)]).to(device)
        mask = target.embed(torch.tensor(network.config.mask_token_id, device=device)).to(dtype)
        places = torch.arange(len(tokens), device=device)[None]
        for some in torch.tensor(anchors, dtype=torch.int64, device=device).split(CHUNK):
            embedded = target.embed(padded[some]).to(dtype)[None]
            documents = torch.zeros_like(places)
            hidden = draft_hidden(network, features, documents, places, some[None], embedded, mask)[0]
            logits = network.adjust_logits(self._head(hidden.to(target.dtype)))
            yield hidden, logits, torch.stack([padded[some + k] for k in range(count + 1)], dim=1)


def _entry(config: Any) -> Entry:
    for entry in entries().values():
        network = entry.network
        if network is not None and issubclass(network, DFlashNetwork) and network.config_class is type(config):
            return entry
    raise UsageError("This drafter is none of the DFlash family, and no other can be examined.")
