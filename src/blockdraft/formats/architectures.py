"""The architectures that z-lab's layout holds, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor

from blockdraft.nn.draft_config import DFlash2Config, DraftConfig, DSparkConfig

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """What is an architecture's own in config.json and among the tensors.

    Attributes:
        names: Its spellings under `architectures`; the first one is written.
        config: Its configuration. The fields are keys of config.json, at the top level or in `dflash_config`.
        shapes: Name and shape of every tensor of a checkpoint.
        nested: Fields that are written in `dflash_config` and nowhere else.
        adapted: From tensors as other writers name and shape them to ours.
        marks: What `dflash_config` says of such a model besides.
        inert: Values of further keys that go with this architecture, as in `zlab_config.INERT`.
        training: Keys of `dflash_config` that matter to training only.
    """

    names: tuple[str, ...]
    config: type[DraftConfig]
    shapes: Callable[[Any], Shapes]
    nested: tuple[str, ...] = ()
    adapted: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]] = lambda config, tensors: dict(tensors)
    marks: Mapping[str, Any] = field(default_factory=dict)
    inert: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    training: tuple[str, ...] = ()

    def own_keys(self) -> set[str]:
        """Keys of config.json that DFlash v1 does not have."""
        return {field.name for field in fields(self.config)} - {field.name for field in fields(DraftConfig)}


def dflash_shapes(config: DraftConfig) -> Shapes:
    """DFlash v1: 11 tensors a layer (15 with biases) and 3 more."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkvo"}
    top = {"fc.weight": (hidden, len(config.taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return top | {f"layers.{i}.{name}": layer[name] for i in range(config.num_hidden_layers) for name in layer}


def dflash2_shapes(config: DFlash2Config) -> Shapes:
    """DFlash2: those of v1, 4 more a layer and 3 more for the selector."""
    hidden, taps, codebook = config.hidden_size, config.conv_kernel_size, (config.vocab_size, config.selector_rank)
    shapes = dflash_shapes(config)
    for name in _convolutions(config):
        shapes[f"{name}.base_kernel"] = (2, taps, hidden)
        shapes[f"{name}.kernel_projection.weight"] = (2 * taps * (hidden // config.conv_group_size), hidden)
    return shapes | {
        "candidate_selector.hidden_projection.weight": (config.selector_rank, hidden),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
    }


def _dflash2_adapted(config: DFlash2Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some trainers keep the codebooks in embedding layers, and some the base kernels without their axis of sides: then
    either both sides share one kernel, or their taps follow each other."""
    found = dict(tensors)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        if f"{name}.weight" in found and name not in found:
            found[name] = found.pop(f"{name}.weight")
    taps, hidden = config.conv_kernel_size, config.hidden_size
    for name in _convolutions(config):
        kernel = found.get(f"{name}.base_kernel")
        if kernel is not None and kernel.shape in ((taps, hidden), (2 * taps, hidden)):
            found[f"{name}.base_kernel"] = kernel.view(-1, taps, hidden).expand(2, -1, -1)
    return found


def _convolutions(config: DFlash2Config) -> list[str]:
    return [f"layers.{i}.{part}_conv" for i in range(config.num_hidden_layers) for part in ("attention", "mlp")]


def dspark_shapes(config: DSparkConfig) -> Shapes:
    """DSpark: those of DFlash v1, 2 more for the Markov head and 2 for the confidence head."""
    factor = (config.vocab_size, config.markov_rank)
    shapes = dflash_shapes(config) | {"markov_head.markov_w1.weight": factor, "markov_head.markov_w2.weight": factor}
    if config.enable_confidence_head:
        width = config.hidden_size + config.confidence_head_with_markov * config.markov_rank
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _dspark_adapted(config: DSparkConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Early SpecForge files put both heads into `logit_head`, ModelOpt names them otherwise, and DeepSpec keeps the
    copy of the target's head that it trained with."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("logit_head.").replace("confidence_proj.", "confidence_head.proj.")
        found[f"markov_head.{name}" if name.startswith("markov_w") else name] = tensor
    found.pop("lm_head.weight", None)
    return found


_DSPARK = Architecture(
    ("DSparkDraftModel", "Qwen3DSparkModel"),
    DSparkConfig,
    dspark_shapes,
    ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    _dspark_adapted,
    marks={"projector_type": "dspark"},
    inert={"projector_type": ("dspark",), "shift_label": (True,), "sample_from_anchor": (True,)},
    training=("confidence_head_alpha", "num_anchors"),
)
# z-lab's DFlash2 files and their readers keep all that is the drafter's own in dflash_config.
_DFLASH2_NESTED: tuple[str, ...] = (
    "block_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
_DFLASH2_NESTED += ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")

ARCHITECTURES = (
    Architecture(("DFlashDraftModel",), DraftConfig, dflash_shapes),
    Architecture(("DFlash2DraftModel",), DFlash2Config, dflash2_shapes, _DFLASH2_NESTED, _dflash2_adapted),
    _DSPARK,
)
BY_NAME = {name: architecture for architecture in ARCHITECTURES for name in architecture.names}


def architecture_of(config: DraftConfig) -> Architecture:
    """The architecture that a configuration belongs to."""
    return next(architecture for architecture in ARCHITECTURES if architecture.config is type(config))


def tensor_shapes(config: DraftConfig) -> Shapes:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    return architecture_of(config).shapes(config)
