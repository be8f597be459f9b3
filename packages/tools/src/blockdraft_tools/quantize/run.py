"""Quantization of a checkpoint in 16 or 32 bits, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, gcd, prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.formats.quantized.compressed_tensors import PACKED
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.decoder import layer_class, rope_angles, rope_frequencies
from blockdraft.nn.decoder_config import GATES, DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Memory, Norm
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import QuantizedWeight, best_group, check_group
from blockdraft.nn.quantize_weight import quantize_weight
from blockdraft.nn.recurrent_mixer import Ancestry, TreeRecurrence
from blockdraft.nn.short_convolution import ConvolutionMemory, ConvolutionWindow
from blockdraft.targets import HEAD, SOURCE, TABLE
from blockdraft_tools.checkpoint import OpenCheckpoint, open_checkpoint
from blockdraft_tools.model_folder import ModelWriter, new_folder
from blockdraft_tools.quantize.gptq import quantize_weight_gptq
from blockdraft_tools.quantize.settings import QuantizeSettings
from blockdraft_tools.quantize.text import Text

Weight: TypeAlias = Tensor | QuantizedWeight
Progress: TypeAlias = Callable[[str, int, int], None]
TABLE_BITS = 8
TOKENS = 4096  # per forward pass of a layer
LOGITS = 1 << 24  # per matrix product of a head


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of the held-out text.

    Attributes:
        source: Of the original model.
        nearest: With each weight rounded to the nearest.
        calibrated: With rounding errors that compensate each other.
    """

    source: float
    nearest: float
    calibrated: float


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint.

    Attributes:
        group: Inputs that share a scale.
        bytes: Bytes of the weights.
        bytes_before: Bytes of the original weights.
        perplexity: Perplexity of the held-out text; None without a text.
    """

    group: int
    bytes: int
    bytes_before: int
    perplexity: Perplexity | None

    @property
    def is_calibrated(self) -> bool:
        """Whether the weights with compensated errors were written, since they have the lower perplexity."""
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
    """Quantize a checkpoint, and write it in a layout that `load_target` and other engines read.

    Weights are read and written one layer at a time. With a text, rounding errors of one weight are compensated by
    others if that lowers the text's perplexity; otherwise each weight is rounded to the nearest.

    Args:
        path: A model folder or hub name, of a family that the native decoder supports.
        out: A new or empty folder, which appears completely or not at all.
        revision, adapter: As for `load_target`.

    Raises:
        UsageError: The model cannot be read or quantized like this, `out` is not empty, or the disk is full.
    """
    with open_checkpoint(path, revision, adapter) as source, torch.no_grad():
        group, perplexity = _group(source.wanted, settings), None
        raw = {**source.raw, "quantization_config": quantization_config(source, settings, group)}
        with new_folder(Path(out), _bytes(source, settings, group)) as folder:
            writer = ModelWriter(folder)
            if text is not None:
                calibrated = _CalibratedRounding(source, settings, group, text)
                writer.take(calibrated.weights(progress))
                perplexity = calibrated.perplexity
            if perplexity is None or not perplexity.calibrated < perplexity.nearest:  # it may be NaN
                writer.clear()
                writer.take(_nearest(source, settings, group, progress))
            writer.finish(raw, source.files)
        before = sum(source.tensors[name].tensor().nbytes for name in source.wanted.tensor_shapes())
    return Quantized(group=group, bytes=writer.bytes, bytes_before=before, perplexity=perplexity)


def quantization_config(source: OpenCheckpoint, settings: QuantizeSettings, group: int) -> dict[str, Any]:
    """Return `quantization_config` of config.json in the layout of compressed-tensors."""

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
    gates = sorted(name.removesuffix(".weight") for name in source.wanted.gates)
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*([] if own_head and settings.tables == "8" else ["lm_head"]), *gates],
        "kv_cache_scheme": None,
        SOURCE: source.source_fingerprint,
    }


def _group(wanted: DecoderConfig, settings: QuantizeSettings) -> int:
    widths = {shape[1] for name, shape in wanted.tensor_shapes().items() if _bits(wanted, name, shape, settings)}
    if settings.group is None:
        return best_group(gcd(*widths))
    for width in sorted(widths):
        check_group(width, settings.group)
    return settings.group


def _bits(wanted: DecoderConfig, name: str, shape: tuple[int, ...], settings: QuantizeSettings) -> int | None:
    """Return the bits of a tensor, or None if it is not quantized."""
    if name in wanted.gates:
        return None
    if name in (TABLE, HEAD):
        return TABLE_BITS if settings.tables == "8" else None
    return settings.bits if len(shape) == 2 else None


def _bytes(source: OpenCheckpoint, settings: QuantizeSettings, group: int) -> int:
    """Estimate the bytes of the written weights."""
    total = 0
    for name, shape in source.wanted.tensor_shapes().items():
        bits = _bits(source.wanted, name, shape, settings)
        total += prod(shape) * (bits or 32) // 8 + (prod(shape) // group * 3 if bits else 0)
    return total


def _nearest(
    source: OpenCheckpoint, settings: QuantizeSettings, group: int, progress: Progress
) -> Iterator[tuple[str, Weight]]:
    """Yield all tensors of a checkpoint, each weight rounded to the nearest."""
    shapes = source.wanted.tensor_shapes()
    for done, (name, shape) in enumerate(shapes.items()):
        progress("rounding", done, len(shapes))
        bits, tensor = _bits(source.wanted, name, shape, settings), source.tensors[name].tensor()
        yield name, tensor if bits is None else quantize_weight(tensor, bits, group, settings.zero_points)
    progress("rounding", len(shapes), len(shapes))


class LayerwiseForward:
    """Forward pass of a batch in float32, one layer at a time.

    Args:
        length: Tokens per sequence, N.
    """

    def __init__(self, config: DecoderConfig, length: int) -> None:
        self.config, self.length = config, length
        positions = torch.arange(length)[None]
        self._angles = rope_angles(config, rope_frequencies(config), positions, torch.float32)
        within, group = torch.ones(1, length, length).tril().bool(), config.num_heads // config.num_kv_heads
        self._masks: list[Tensor | None] = []
        for window in config.windows:
            reached = window if window is not None and window < length else None
            free = reached is None and config.attention_softcap is None and not config.sinks
            visible = None if free else visible_slots([0], within, positions, reached)
            self._masks.append(None if visible is None else grouped_mask(visible, group, torch.float32))

    def embed(self, table: PackedLinear, tokens: Tensor) -> Tensor:
        """Return embeddings `[B, N, H]` of token ids `[B, N]` int64."""
        return table.lookup(tokens) * self.config.embedding_scale

    def apply(self, layer: DecoderLayer, states: Tensor) -> Tensor:
        """Return the output `[B, N, H]` of a layer for an input of this shape."""
        config, out = self.config, torch.empty_like(states)
        batch = max(1, TOKENS // self.length)
        for begin in range(0, len(states), batch):
            some = states[begin : begin + batch]
            vectors = config.stored_per_head * config.num_kv_heads
            store: Memory = torch.zeros(len(some), vectors, self.length, config.head_dim)
            if layer.convolution is not None:
                starts = torch.arange(0, some.shape[:2].numel(), self.length)[:, None]
                parents = torch.arange(-1, self.length - 1).expand(len(some), -1)
                window = ConvolutionWindow.of(parents, starts, torch.zeros_like(starts), config.conv_kernel)
                store = ConvolutionMemory(torch.zeros_like(some).flatten(0, 1), window)
            elif layer.recurrent_mixer is not None:
                ancestry = Ancestry.of_chains(len(some), self.length, layer.recurrent_mixer.config.kernel)
                store = TreeRecurrence(layer.recurrent_mixer.empty(len(some)), ancestry)
            angles, mask = self._angles[layer.rope], self._masks[layer.mask]
            rows = layer(some.flatten(0, 1), angles, torch.arange(self.length), mask, store)
            out[begin : begin + batch] = rows.view_as(some)
        return out

    def perplexity(self, norm: Norm, head: PackedLinear, states: Tensor, tokens: Tensor) -> float:
        """Compute the perplexity of all tokens but the first of each sequence.

        Args:
            states: Output of the last layer, `[B, N, H]`.
            tokens: Token ids, `[B, N]` int64.
        """
        total, cap = 0.0, self.config.final_softcap
        rows, following = states[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        size = max(1, LOGITS // self.config.vocab_size)
        for some, expected in zip(rows.split(size), following.split(size), strict=True):
            logits: Tensor = head(norm(some)) * self.config.logit_scale
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            total += F.cross_entropy(logits, expected, reduction="sum").item()
        return exp(min(total / len(following), 700))


def moments(forward: LayerwiseForward, layer: DecoderLayer, states: Tensor) -> Mapping[str, Tensor]:
    """Return sums of `x x^T`, `[in, in]`, over the inputs x of the projections of a layer with the input `states`.

    Those of a single expert have the projection's name and the expert's number. Those of single heads are missing.
    """
    sums: dict[str, Tensor] = {}

    def add(module: PackedLinear, given: tuple[Tensor, ...], name: str) -> None:
        product = given[0].T @ given[0]
        sums[name] = sums[name] + product if name in sums else product

    def watched(projection: str, expert: int) -> PackedLinear:
        part = DecoderLayer.expert_part(layer, projection, expert)
        if projection == "down":
            part.register_forward_pre_hook(partial(add, name=f"down {expert}"))
        return part

    hooks = [
        getattr(layer, name).register_forward_pre_hook(partial(add, name=name))
        for name in forward.config.projections(layer.number)
    ]
    layer.expert_part = watched  # type: ignore[method-assign]
    try:
        forward.apply(layer, states)
    finally:
        del layer.expert_part
        for hook in hooks:
            hook.remove()
    return sums


def by_inputs(
    layer: DecoderLayer, projection: str, sums: Mapping[str, Tensor]
) -> list[tuple[Sequence[tuple[str, int]], Tensor | None]]:
    """Return the matrices of a projection that have the same inputs, and the sums of `moments` for these, if known."""
    parts = layer.config.projections(layer.number)[projection]
    if layer.experts is not None and projection == "down":
        return [([part], sums.get(f"down {expert}")) for expert, part in enumerate(parts)]
    of_all_experts = layer.experts is not None and projection == "gate_up"
    return [(parts, sums.get("router" if of_all_experts else projection))]


class _CalibratedRounding:
    """Quantization, layer by layer, with errors compensated for the layer's inputs on a text.

    Attributes:
        perplexity: Perplexity of the held-out text, set after the last of `weights`.
    """

    perplexity: Perplexity

    def __init__(self, source: OpenCheckpoint, settings: QuantizeSettings, group: int, text: Text) -> None:
        self.source, self.settings, self.group, self.text = source, settings, group, text

    def weights(self, progress: Progress) -> Iterator[tuple[str, Weight]]:
        """Yield all tensors, layer by layer."""
        source, wanted, text = self.source, self.source.wanted, self.text
        forward, layers = LayerwiseForward(wanted, text.held_out.size(1)), len(wanted.layers)
        made = layer_class(wanted)
        exact_table = PackedLinear(self._exact(TABLE))
        table = self._nearest(TABLE)
        yield TABLE, table
        rounded_table = PackedLinear(_in_float(table))
        calibration = forward.embed(rounded_table, text.calibration)
        # Tables and states of the held-out text, by the names of `Perplexity`.
        heads = {"source": exact_table, "nearest": rounded_table, "calibrated": rounded_table}
        states = {name: forward.embed(embedding, text.held_out) for name, embedding in heads.items()}
        for number in range(layers):
            progress("layers", number, layers)
            exact = made(wanted, number, self._exact)
            nearest = made(wanted, number, lambda name: _in_float(self._nearest(name)))
            sums = moments(forward, exact, calibration)
            weights = dict(self._compensated(number, exact, sums))
            yield from weights.items()
            calibrated = made(wanted, number, lambda name, weights=weights: _in_float(weights[name]))  # type: ignore[misc]
            calibration = forward.apply(calibrated, calibration)
            for name, layer in {"source": exact, "nearest": nearest, "calibrated": calibrated}.items():
                states[name] = forward.apply(layer, states[name])
        progress("layers", layers, layers)
        norm = Norm(wanted, [self._exact(wanted.last_norm)])
        yield wanted.last_norm, source.tensors[wanted.last_norm].tensor()
        if not wanted.tied_head:
            head = self._nearest(HEAD)
            yield HEAD, head
            rounded_head = PackedLinear(_in_float(head))
            heads = {"source": PackedLinear(self._exact(HEAD)), "nearest": rounded_head, "calibrated": rounded_head}
        self.perplexity = Perplexity(
            **{name: forward.perplexity(norm, heads[name], states[name], text.held_out) for name in states}
        )

    def _compensated(
        self, number: int, layer: DecoderLayer, sums: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Weight]]:
        """Yield all tensors of a layer, with weights whose rounding errors compensate each other.

        Gate and up projections of experts are calibrated on all inputs of their router. Weights whose inputs are
        unknown are rounded to the nearest.
        """
        wanted, settings = self.source.wanted, self.settings
        for projection, parts in wanted.projections(number).items():
            begin, whole = 0, getattr(layer, projection).weight
            for alike, inputs in by_inputs(layer, projection, sums):
                rows = [size for _, size in alike]
                own = whole[begin : begin + sum(rows)]
                begin += sum(rows)
                if inputs is None or projection in GATES:
                    yield from ((f"{name}.weight", self._nearest(f"{name}.weight")) for name, _ in alike)
                    continue
                weight = quantize_weight_gptq(own, inputs, settings.bits, self.group, settings.zero_points)
                for (name, _), channels in zip(alike, torch.arange(len(own)).split(rows), strict=True):
                    yield f"{name}.weight", weight.channels(channels)
            if wanted.has_bias(number, projection):
                for name, _ in parts:
                    yield f"{name}.bias", self.source.tensors[f"{name}.bias"].tensor()
        for name in (*wanted.norms(number).values(), *wanted.other_tensors(number)):
            yield name, self.source.tensors[name].tensor()

    def _exact(self, name: str) -> Tensor:
        return self.source.tensors[name].tensor().float()

    def _nearest(self, name: str) -> Weight:
        stored = self.source.tensors[name]
        bits = _bits(self.source.wanted, name, stored.shape, self.settings)
        return (
            stored.tensor()
            if bits is None
            else quantize_weight(stored.tensor(), bits, self.group, self.settings.zero_points)
        )


def _in_float(weight: Weight) -> Weight:
    return weight if isinstance(weight, QuantizedWeight) else weight.float()
