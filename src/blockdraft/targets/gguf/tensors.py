"""Conversion between the tensors of GGUF files and those of the native decoder."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import gguf
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import FLOATS, READERS, GGUFFile, GGUFTensor, bytes_held, read_values
from blockdraft.formats.gguf.blocks import empty_interleaved
from blockdraft.formats.gguf.rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, paired
from blockdraft.formats.stored import TensorFiles
from blockdraft.kernels.cpu.library import Library
from blockdraft.nn.decoder_config import DecoderConfig, DeltaNet, Rope
from blockdraft.nn.packed import PackedWeight
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets.base import NotCovered
from blockdraft.targets.fingerprint import sampled_fingerprint, sampled_positions
from blockdraft.targets.latent_tensors import rows_in_halves

KEYS = ("attn_k", "attn_v", "attn_k_norm")  # parts that a layer with keys of another may hold, unused
SIMILAR_KINDS = {"Q4_K", "Q5_K", "Q6_K"}  # types that the library also packs for one product
PACKED_KINDS = SIMILAR_KINDS | {"MXFP4", "Q4_0", "Q4_1", "Q8_0"}  # types that the library packs
HALF_EXPONENTS = (104, 143)  # of scales in MXFP4 that are exact in float16
GATE_UP = "blk.0.ffn_gate_up_exps.weight"  # Gemma 4's, where the file does not hold two matrices
LOGARITHM = ".A_log"
INTERLEAVED = (
    "llama",
    "granite",
    "granitehybrid",
    "mistral3",
    "nemotron_h",
    "nemotron_h_moe",
    "smollm3",
)  # architectures that rotate neighbouring channels together
# Parts of our names, and what the converter has for them.
SHOWN = (
    (".dt_bias", ".dt_proj.bias"),
    (".expert_bias", ".expert_bias.bias"),
    (".layer_scalar", ".layer_scalar.weight"),
    ("self_attn.sinks", "self_attn.sinks.weight"),
    (".router.scale", ".router.proj.scale"),
    (".router.per_expert_scale", ".experts.down_proj.scale"),
)
SAMPLED_AT_ONCE = 128  # tensors
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in our names; files hold all experts of a layer as one tensor
# Gemma 4's gate and up projections of experts where a file holds them apart, which the converter does not know.
SPLIT, SPLIT_NAME = re.compile(r"model\.layers\.(\d+)\.experts\.(gate|up)_proj\."), r"blk.\1.ffn_\2_exps."
# For users who have only the file.
REQUANTIZE = "make another of this file with llama.cpp (llama-quantize --allow-requantize FILE NEW.gguf Q8_0)"


@dataclass(frozen=True)
class GGUFWeights(TensorFiles):
    """Tensors of a file that a decoder reads, by our names; see `decoder_weights`.

    Attributes:
        expanded: Names of quantized tensors that are read as float32, since they share a matrix product with
            unquantized ones.
    """

    tensors: Mapping[str, GGUFTensor]
    expanded: frozenset[str] = frozenset()

    def nbytes(self, floats: torch.dtype, few: bool = True, held: Callable[[str], float] = bytes_held) -> int:
        """Return the bytes of the weights, with unquantized ones (or all, without `few`) in the dtype `floats`.

        Args:
            held: Bytes per value of a quantized matrix of some type.
        """
        total = 0.0
        for name, tensor in self.tensors.items():
            is_float = not few or tensor.kind in FLOATS or name in self.expanded
            total += math.prod(tensor.shape) * (floats.itemsize if is_float else held(tensor.kind))
        return round(total)

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """Read a weight onto the CPU, in its own dtype or quantized."""
        tensor = self.tensors[name]
        if name.endswith(LOGARITHM):  # files hold -exp(A_log)
            return _logarithm(tensor.tensor())
        return tensor.tensor() if name in self.expanded else tensor.read()

    def packed(self, names: Sequence[str], library: Library) -> PackedWeight | None:
        """Pack the matrices of one product straight from the file. Return None where that takes another way."""
        parts, lanes = [self.tensors[name] for name in names], library.lanes
        kinds, inputs = {part.kind for part in parts}, parts[0].shape[1]
        if not (kinds <= SIMILAR_KINDS or (len(kinds) == 1 and kinds <= PACKED_KINDS)):
            return None
        if any(part.shape[0] % lanes or part.shape[1] != inputs for part in parts) or self.expanded & {*names}:
            return None
        if kinds == {"MXFP4"} and not all(map(_has_half_scales, parts)):
            return None
        begin, outputs = 0, sum(part.shape[0] for part in parts)
        wide = 0 if len(kinds) == 1 else 16 if "Q6_K" in kinds else 8
        whole = empty_interleaved(sorted(kinds), outputs, inputs, lanes)
        for part in parts:
            own = whole.blocks(begin // lanes, (begin + part.shape[0]) // lanes)
            with part.mapped() as raw:
                library.pack_blocks(GGMLQuantizationType[part.kind], raw, part.order, own, inputs, wide)
            begin += part.shape[0]
        return PackedWeight(library, whole, outputs, inputs)

    def fingerprint(self) -> str:
        """Return `Target.source_fingerprint` of the target in the file."""
        return sampled_fingerprint(self._samples())

    def _samples(self) -> Iterator[tuple[str, Sequence[int], Tensor]]:
        """Yield the values at `sampled_positions`. Experts have thousands of tensors, so many are read at once."""
        alike = defaultdict[tuple[int, str], list[str]](list)
        for name, tensor in self.tensors.items():
            alike[id(tensor.file), tensor.kind].append(name)
        for names in alike.values():
            for first in range(0, len(names), SAMPLED_AT_ONCE):
                own = names[first : first + SAMPLED_AT_ONCE]
                tensors = [self.tensors[name] for name in own]
                positions = [sampled_positions(math.prod(tensor.shape)) for tensor in tensors]
                for name, values in zip(own, read_values(tensors, positions), strict=True):
                    yield name, self.tensors[name].shape, _logarithm(values) if name.endswith(LOGARITHM) else values


def _has_half_scales(tensor: GGUFTensor) -> bool:
    """Return whether the scales of a matrix in MXFP4, powers of two, are exact in float16."""
    with tensor.mapped() as raw:
        exponents = raw.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType.MXFP4][1])[:, 0]
        return bool(HALF_EXPONENTS[0] <= exponents.min() and exponents.max() <= HALF_EXPONENTS[1])


def _logarithm(weight: Tensor) -> Tensor:
    return weight.float().neg().log()


def decoder_weights(file: GGUFFile, config: DecoderConfig) -> GGUFWeights:
    """Return the tensors of a decoder in a file.

    Raises:
        NotCovered: A tensor is missing, unknown or of another shape.
        UsageError: A tensor is of an unsupported type.
    """
    check_kinds(file)  # first, since the sizes of unknown types were not checked
    architecture = file.metadata["general.architecture"]
    known = {*our_names(architecture, config).values(), ROPE_FACTORS}
    if architecture == "phi3" and SHORT_FACTORS in file.tensors:
        known |= {SHORT_FACTORS, LONG_FACTORS}
    strange = sorted(set(file.tensors) - known)
    unused = {
        f"blk.{n}.{part}.weight" for n, kind in enumerate(config.layers) if kind.keys_of is not None for part in KEYS
    }
    strange = [name for name in strange if name not in unused]
    heads = min(file.metadata.get(f"{architecture}.nextn_predict_layers") or 0, len(file.tensors))
    mtp_layers = tuple(f"blk.{len(config.layers) + number}." for number in range(heads))
    strange = [name for name in strange if not name.startswith(mtp_layers)]
    if strange:
        raise NotCovered(f"it holds tensors that the decoder does not know, such as {strange[0]}")
    return _weights(file, config, config.tensor_shapes(), range(len(config.layers)))


def _same_values(tensor: GGUFTensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor holds the values of this shape in order.

    The converter drops and adds dimensions of one, splits norms of Mamba-2 into groups, and the matrices of latent
    attention into those of each head.
    """
    one_row = len([size for size in shape if size != 1]) == 1 and tensor.kind in FLOATS
    alike = tensor.shape == tuple(size for size in shape if size != 1)
    of_heads = len(tensor.shape) == 3 and (math.prod(tensor.shape[:2]), *tensor.shape[2:]) == shape
    return alike or of_heads or (one_row and math.prod(tensor.shape) == math.prod(shape))


def layer_weights(file: GGUFFile, config: DecoderConfig, layer: int) -> GGUFWeights:
    """Return the tensors of one layer. Errors as in `decoder_weights`."""
    check_kinds(file)
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if f".layers.{layer}." in name}
    return _weights(file, config, shapes, [layer])


def _weights(
    file: GGUFFile, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], layers: Iterable[int]
) -> GGUFWeights:
    architecture = file.metadata["general.architecture"]
    names, orders, weights = our_names(architecture, config), row_orders(architecture, config), {}
    for ours, shape in shapes.items():
        theirs, expert = names[ours], EXPERT.search(ours)
        if theirs not in file.tensors:
            raise NotCovered(f"it lacks {theirs}")
        tensor = file.tensors[theirs]
        if expert is not None and config.experts is not None:
            shape = (config.experts.count, *shape)
        elif _same_values(tensor, shape):
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise NotCovered(f"{theirs} has the shape {list(tensor.shape)} instead of {list(shape)}")
        if ours.endswith(".bias") and tensor.kind not in FLOATS:
            raise NotCovered(f"{theirs} is of the type {tensor.kind} instead of {', '.join(FLOATS)}")
        weights[ours] = replace(tensor if expert is None else tensor.part(int(expert[1])), order=orders.get(ours))
    expanded = set[str]()
    for layer in layers:
        for parts in config.projections(layer).values():
            names_of_one = {f"{name}.weight" for name, _ in parts}
            few = {name for name in names_of_one if weights[name].kind not in FLOATS}
            expanded |= few if few != names_of_one else set()
    return GGUFWeights(file.files, weights, frozenset(expanded))


def row_orders(architecture: str, config: DecoderConfig) -> dict[str, Tensor]:
    """Return `GGUFTensor.order` of a decoder's tensors in files of this architecture, where rows differ."""
    orders = {}
    if architecture in INTERLEAVED:
        counts = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        orders = {part: paired(heads * config.head_dim, heads) for part, heads in counts.items()}
    if config.latent is not None:
        orders = rows_in_halves(config.latent, config.num_heads)
    net = config.recurrent_net
    if net is not None and net.joint_gates:  # files have both gates of a key head side by side
        rows = torch.arange(2 * net.value_heads).view(net.key_heads, 2, -1)
        orders["in_proj_ba"] = rows.transpose(0, 1).flatten()
    return {name: order for name in config.tensor_shapes() for part, order in orders.items() if f".{part}." in name}


def check_kinds(file: GGUFFile) -> None:
    """Raise a UsageError unless all tensors are of supported types, and only matrices quantized."""
    for tensor in file.tensors.values():
        matrix = len(tensor.shape) in (2, 3)
        if tensor.kind not in READERS or (tensor.kind not in FLOATS and not matrix):
            what = f"{', '.join(READERS)} are read" if matrix else f"vectors are read in {', '.join(FLOATS)}"
            raise UsageError(
                f"{file.path}: {tensor.name} is of the type {tensor.kind}, and {what}; use a file of this model in "
                f"another type, such as Q4_K_M or Q8_0, or {REQUANTIZE}."
            )


def our_names(architecture: str, config: DecoderConfig) -> dict[str, str]:
    """Return the names of a decoder's tensors in GGUF files of this architecture, by our names."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(kinds[architecture], len(config.layers))
    names = {}
    for name in config.tensor_shapes():
        shown = EXPERT.sub(".experts.", name)
        for ours, theirs in SHOWN:
            shown = shown.replace(ours, theirs)
        spellings = (shown, shown.removeprefix("model."))
        candidates = (known.get_name(spelling, (".weight", ".bias", ".scale")) for spelling in spellings)
        names[name] = next((theirs for theirs in candidates if theirs is not None), SPLIT.sub(SPLIT_NAME, shown))
    return names


def fitted(config: DecoderConfig, file: GGUFFile) -> DecoderConfig:
    """Return a configuration adapted to a file's tensors: biases, frequency factors, and norms with one added.

    Raises:
        NotCovered: There is not one factor for each pair of a head's channels.
    """
    layers = config.layers
    if ROPE_FACTORS in file.tensors and not config.mixed:
        factors = file.tensors[ROPE_FACTORS].tensor()
        if factors.shape != (config.rotated // 2,):
            raise NotCovered(f"{ROPE_FACTORS} has the shape {list(factors.shape)} instead of [{config.rotated // 2}]")
        layers = tuple(replace(kind, rope=_slowed(kind.rope, factors)) for kind in layers)
    net, experts = config.recurrent_net, config.experts
    if isinstance(net, DeltaNet):
        joint_gates = any(".ssm_ba." in name for name in file.tensors)  # Qwen3-Next
        net = replace(net, tiled=not joint_gates, joint_gates=joint_gates)
    if experts is not None:
        experts = replace(experts, fused=GATE_UP in file.tensors)
    biased = {part: f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_output", "ffn_up")}
    return replace(
        config,
        layers=layers,
        norm_plus_one=False,
        recurrent_net=net,
        experts=experts,
        qkv_bias=biased["attn_q"],
        output_bias=biased["attn_output"],
        mlp_bias=biased["ffn_up"],
    )


def _slowed(rope: Rope, factors: Tensor) -> Rope:
    frequencies = torch.tensor(rope.inverse_frequencies) / factors.float()
    return Rope(tuple(frequencies.tolist()), rope.scale)
