"""From a checkpoint in 16 or 32 bits to one of few bits, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, gcd, prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.formats.model_folder import ModelWriter, new_folder
from blockdraft.formats.quantized.compressed_tensors import PACKED
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.decoder import rope_angles, rope_frequencies
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Norm
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantized import QuantizedWeight, best_group, check_group
from blockdraft.nn.rounding import compensated, rounded
from blockdraft.targets import HEAD, SOURCE, TABLE, OpenCheckpoint, open_checkpoint
from blockdraft.tools.quantize.settings import QuantizeSettings
from blockdraft.tools.quantize.text import Text

Weight: TypeAlias = Tensor | QuantizedWeight
Progress: TypeAlias = Callable[[str, int, int], None]
TABLE_BITS = 8
TOKENS = 4096  # that go through a layer at once
LOGITS = 1 << 24  # numbers that a head makes at once


@dataclass(frozen=True)
class Perplexity:
    """Of the held-out text, by the model as it was, with each number rounded to the nearest, and with errors that make
    up for each other."""

    source: float
    nearest: float
    calibrated: float


@dataclass(frozen=True)
class Quantized:
    """Attributes:
    group: Inputs that share a scale.
    bytes: Of the weights.
    bytes_before: Of the weights as they were.
    perplexity: None without a text.
    is_calibrated: Whether the text helped, and what was written follows it.
    """

    group: int
    bytes: int
    bytes_before: int
    perplexity: Perplexity | None

    @property
    def is_calibrated(self) -> bool:
        """Whether the text helped, and what was written follows it."""
        return self.perplexity is not None and self.perplexity.calibrated < self.perplexity.nearest


def quantize(
    path: str | Path,
    out: str | Path,
    settings: QuantizeSettings = QuantizeSettings(),  # noqa: B008 (frozen)
    text: Text | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Quantized:
    """Round a checkpoint to few bits, and write it where `load_target` and other engines find it.

    Weights are read and written a layer at a time. With a text, errors of one weight are made up for by others, as far
    as the text's perplexity is lower for it; else each number is rounded to the nearest.

    Args:
        path: A model folder or hub name, of a family that the native decoder knows.
        out: A new or empty folder, which appears whole or not at all.
        revision, adapter: As for `load_target`.

    Raises:
        UsageError: The model cannot be read or rounded so, `out` holds something, or the disk is full.
    """
    with open_checkpoint(path, revision, adapter) as source, torch.no_grad():
        group, found = _group(source.wanted, settings), None
        raw = {**source.raw, "quantization_config": quantization_config(source, settings, group)}
        with new_folder(Path(out), _bytes(source, settings, group)) as folder:
            writer = ModelWriter(folder)
            if text is not None:
                passing = _Passing(source, settings, group, text)
                writer.take(passing.weights(progress))
                found = passing.perplexity
            if found is None or found.calibrated >= found.nearest:
                writer.clear()
                writer.take(_nearest(source, settings, group, progress))
            writer.finish(raw, source.files)
        before = sum(source.tensors[name].tensor().nbytes for name in source.wanted.tensor_shapes())
    return Quantized(group, writer.bytes, before, found)


def quantization_config(source: OpenCheckpoint, settings: QuantizeSettings, group: int) -> dict[str, Any]:
    """What config.json says, in the words of compressed-tensors."""

    def rounding(targets: list[str], bits: int) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": not settings.zero_points,
            "strategy": "group",
            "group_size": group,
            "dynamic": False,
        }
        return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}

    groups = {"group_0": rounding(["Linear"], settings.bits)}
    own_head = not source.wanted.tied_head
    if settings.tables == "8":
        groups["group_1"] = rounding(["re:.*embed_tokens$", *(["lm_head"] if own_head else [])], TABLE_BITS)
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if own_head and settings.tables == "8" else ["lm_head"],
        "kv_cache_scheme": None,
        SOURCE: source.source_fingerprint,
    }


def _group(wanted: DecoderConfig, settings: QuantizeSettings) -> int:
    widths = {shape[1] for name, shape in wanted.tensor_shapes().items() if _bits(name, shape, settings)}
    if settings.group is None:
        return best_group(gcd(*widths))
    for width in sorted(widths):
        check_group(width, settings.group)
    return settings.group


def _bits(name: str, shape: tuple[int, ...], settings: QuantizeSettings) -> int | None:
    """Of a tensor; None where it stays as it is."""
    if name in (TABLE, HEAD):
        return TABLE_BITS if settings.tables == "8" else None
    return settings.bits if len(shape) == 2 else None


def _bytes(source: OpenCheckpoint, settings: QuantizeSettings, group: int) -> int:
    """Of the weights that will be written, about."""
    total = 0
    for name, shape in source.wanted.tensor_shapes().items():
        bits = _bits(name, shape, settings)
        total += prod(shape) * (bits or 32) // 8 + (prod(shape) // group * 3 if bits else 0)
    return total


def _nearest(
    source: OpenCheckpoint, settings: QuantizeSettings, group: int, progress: Progress
) -> Iterator[tuple[str, Weight]]:
    """All tensors of a checkpoint, of which each number is rounded to the nearest."""
    shapes = source.wanted.tensor_shapes()
    for done, (name, shape) in enumerate(shapes.items()):
        progress("rounding", done, len(shapes))
        bits, tensor = _bits(name, shape, settings), source.tensors[name].tensor()
        yield name, tensor if bits is None else rounded(tensor, bits, group, settings.zero_points)
    progress("rounding", len(shapes), len(shapes))


class Passage:
    """Rows of one length `[rows, N]` as they pass through the layers, with float32 arithmetic.

    Args:
        length: N.
    """

    def __init__(self, config: DecoderConfig, length: int) -> None:
        self.config, self.length = config, length
        positions = torch.arange(length)[None]
        self._angles = rope_angles(config, rope_frequencies(config), positions, torch.float32)
        within, group = torch.ones(1, length, length).tril().bool(), config.num_heads // config.num_kv_heads
        self._masks: list[Tensor | None] = []
        for window in config.windows:
            reached = window if window is not None and window < length else None
            free = reached is None and config.attention_softcap is None
            visible = None if free else visible_slots([0], within, positions, reached)
            self._masks.append(None if visible is None else grouped_mask(visible, group, torch.float32))

    def embed(self, table: PackedLinear, tokens: Tensor) -> Tensor:
        """`[rows, N]` int64 to `[rows, N, H]`."""
        return table.lookup(tokens) * self.config.embedding_scale

    def through(self, layer: DecoderLayer, states: Tensor) -> Tensor:
        """States `[rows, N, H]` behind a layer."""
        config, out = self.config, torch.empty_like(states)
        batch = max(1, TOKENS // self.length)
        for begin in range(0, len(states), batch):
            some = states[begin : begin + batch]
            store = torch.zeros(len(some), 2 * config.num_kv_heads, self.length, config.head_dim)
            rows = layer(some.flatten(0, 1), self._angles, torch.arange(self.length), self._masks, store)
            out[begin : begin + batch] = rows.view_as(some)
        return out

    def perplexity(self, norm: Norm, head: PackedLinear, states: Tensor, tokens: Tensor) -> float:
        """Of tokens `[rows, N]`, each after those before it, by the states behind the last layer."""
        total, cap = 0.0, self.config.final_softcap
        rows, following = states[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        size = max(1, LOGITS // self.config.vocab_size)
        for some, expected in zip(rows.split(size), following.split(size), strict=True):
            logits: Tensor = head(norm(some))
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            total += F.cross_entropy(logits, expected, reduction="sum").item()
        return exp(min(total / len(following), 700))


def moments(passage: Passage, layer: DecoderLayer, states: Tensor) -> Mapping[str, Tensor]:
    """The sum of `x x^T` over the inputs x of each projection of a layer, `[in, in]`."""
    found: dict[str, Tensor] = {}
    hooks = []
    for name in passage.config.projections(layer.number):

        def add(module: PackedLinear, given: tuple[Tensor, ...], name: str = name) -> None:
            product = given[0].T @ given[0]
            found[name] = found[name] + product if name in found else product

        hooks.append(getattr(layer, name).register_forward_pre_hook(add))
    try:
        passage.through(layer, states)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Passing:
    """A text on its way through a checkpoint, whose layers are rounded as it comes by.

    Attributes:
        perplexity: Of the held-out text, once all `weights` were taken.
    """

    perplexity: Perplexity

    def __init__(self, source: OpenCheckpoint, settings: QuantizeSettings, group: int, text: Text) -> None:
        self.source, self.settings, self.group, self.text = source, settings, group, text

    def weights(self, progress: Progress) -> Iterator[tuple[str, Weight]]:
        """All tensors, layer by layer."""
        source, wanted, text = self.source, self.source.wanted, self.text
        passage, layers = Passage(wanted, text.held_out.size(1)), len(wanted.layers)
        plain = PackedLinear(self._exact(TABLE))
        table = self._nearest(TABLE)
        yield TABLE, table
        few = PackedLinear(_in_float(table))
        learnt = passage.embed(few, text.calibration)
        # Of the held-out text, in the order of `Perplexity`.
        states = [passage.embed(embedding, text.held_out) for embedding in (plain, few, few)]
        for number in range(layers):
            progress("layers", number, layers)
            exact = DecoderLayer(wanted, number, self._exact)
            nearest = DecoderLayer(wanted, number, lambda name: _in_float(self._nearest(name)))
            sums = moments(passage, exact, learnt)
            found = dict(self._compensated(number, exact, sums))
            yield from found.items()
            ours = DecoderLayer(wanted, number, lambda name, found=found: _in_float(found[name]))  # type: ignore[misc]
            learnt = passage.through(ours, learnt)
            for at, layer in enumerate((exact, nearest, ours)):
                states[at] = passage.through(layer, states[at])
        progress("layers", layers, layers)
        norm = Norm(wanted, [self._exact("model.norm.weight")])
        yield "model.norm.weight", source.tensors["model.norm.weight"].tensor()
        heads = [plain, few, few]
        if not wanted.tied_head:
            head = self._nearest(HEAD)
            yield HEAD, head
            heads = [PackedLinear(self._exact(HEAD)), *[PackedLinear(_in_float(head))] * 2]
        self.perplexity = Perplexity(
            *(passage.perplexity(norm, head, of, text.held_out) for head, of in zip(heads, states, strict=True))
        )

    def _compensated(
        self, number: int, layer: DecoderLayer, sums: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Weight]]:
        """The tensors of a layer."""
        wanted, settings = self.source.wanted, self.settings
        for projection, parts in wanted.projections(number).items():
            whole: PackedLinear = getattr(layer, projection)
            weight = compensated(whole.weight, sums[projection], settings.bits, self.group, settings.zero_points)
            begin = 0
            for name, rows in parts:
                yield f"{name}.weight", weight.channels(torch.arange(begin, begin + rows))
                begin += rows
                if wanted.has_bias(number, projection):
                    yield f"{name}.bias", self.source.tensors[f"{name}.bias"].tensor()
        for name in wanted.norms(number).values():
            yield name, self.source.tensors[name].tensor()

    def _exact(self, name: str) -> Tensor:
        return self.source.tensors[name].tensor().float()

    def _nearest(self, name: str) -> Weight:
        stored = self.source.tensors[name]
        bits = _bits(name, stored.shape, self.settings)
        return (
            stored.tensor() if bits is None else rounded(stored.tensor(), bits, self.group, self.settings.zero_points)
        )


def _in_float(weight: Weight) -> Weight:
    return weight if isinstance(weight, QuantizedWeight) else weight.float()
