"""Families of models that the native decoder supports, in the table `FAMILIES` by `model_type`.

To add a family, write its entry: the kinds of its layers, and the fields of `DecoderConfig` in which it differs from
Llama. Raise `NotCovered` for what these cannot express; transformers then runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

import torch.nn.functional as F

from blockdraft.formats.stored import StoredTensor
from blockdraft.nn.decoder_config import ClampedSwiGLU, DecoderConfig, DeltaNet, Experts, LayerKind, Mamba2, Rope
from blockdraft.nn.decoder_layer import ACTIVATIONS
from blockdraft.nn.rotary import default_frequencies, rotary_frequencies
from blockdraft.targets.base import NotCovered
from blockdraft.targets.gpt_oss import gpt_oss_tensors
from blockdraft.targets.latent_tensors import latent_config, latent_tensors
from blockdraft.targets.mamba2_tensors import granite_hybrid_tensors, nemotron_h_tensors
from blockdraft.targets.model_config import AnyConfig
from blockdraft.targets.qwen3_next import qwen3_next_tensors

# Rotary scalings whose frequencies do not depend on the sequence length, within the context.
STATIC_ROPES = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


@dataclass(frozen=True)
class Family:
    """A family of models. Its functions take a model's configuration.

    Attributes:
        name: Name of its classes in transformers, such as `LlamaForCausalLM`, without the ending.
        layers: Kind of each layer.
        differences: Fields of `DecoderConfig` that differ from those of Llama without biases.
        rotates_all: Whether all channels of a head are rotated.
        has_other_parts: Whether models of this `..._text` family have other parts, such as a vision encoder, that are
            not part of the causal language model.
        tensors: Returns the tensors of a checkpoint under our names, where theirs differ. It takes the tensors and the
            configuration.
        gguf: Architectures of llama.cpp. Files are written as the last.
    """

    name: str
    layers: Callable[[AnyConfig], tuple[LayerKind, ...]]
    differences: Callable[[AnyConfig], dict[str, Any]]
    rotates_all: bool = True
    has_other_parts: bool = False
    tensors: Callable[[Mapping[str, StoredTensor], AnyConfig], dict[str, StoredTensor]] | None = None
    gguf: tuple[str, ...] = ()

    @property
    def causal_lm(self) -> str:
        return f"{self.name}ForCausalLM"


def text_part(config: AnyConfig) -> AnyConfig:
    """Return the configuration of a model's text part, or of the model if it has no other parts."""
    family = FAMILIES.get(f"{config.model_type}_text")
    return config.get_text_config() if family is not None and family.has_other_parts else config


def own_tensors(config: AnyConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint under our names."""
    family = FAMILIES.get(text_part(config).model_type)
    return tensors if family is None or family.tensors is None else family.tensors(tensors, text_part(config))


def decoder_config(config: AnyConfig) -> DecoderConfig:
    """Return the configuration of the decoder that runs a model.

    Raises:
        NotCovered: The native decoder does not support the model's family or one of its settings.
    """
    config = text_part(config)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotCovered(f"{config.model_type} is none of its families: {', '.join(FAMILIES)}")
    if getattr(config, "use_bidirectional_attention", None) not in (
        None,
        False,
        "vision",
    ):  # text of the last is causal
        raise NotCovered("its attention is bidirectional")
    layers, differences = family.layers(config), family.differences(config)
    if not any(kind.attends for kind in layers):
        raise NotCovered("none of its layers has attention")
    heads: int = config.num_attention_heads
    head_dim: int = (
        differences.pop("head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    )
    activation: str = differences.pop("activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise NotCovered(f"its activation {activation} is none of {', '.join(ACTIVATIONS)}")
    if family.rotates_all and any(2 * len(kind.rope.inverse_frequencies) != head_dim for kind in layers):
        raise NotCovered("it rotates a part of each head only")
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=differences.pop("intermediate_size", None) or getattr(config, "intermediate_size", 0),
        num_heads=heads,
        num_kv_heads=differences.pop("num_kv_heads", None) or config.num_key_value_heads,
        head_dim=head_dim,
        layers=layers,
        norm_eps=differences.pop("norm_eps", None) or config.rms_norm_eps,
        activation=activation,
        query_scale=differences.pop("query_scale", None) or head_dim**-0.5,
        tied_head=config.tie_word_embeddings,
        **differences,
    )


def context_limit(config: AnyConfig) -> int | None:
    """Return the tokens beyond which the native decoder does not compute what the model does, or None.

    Ministral 3 scales queries at positions beyond its original context.
    """
    rope: Mapping[str, Any] = getattr(text_part(config), "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("llama_4_scaling_beta") else None


def logit_factor(config: AnyConfig) -> float:
    """Return the factor on what the output head computes, for any family of transformers."""
    config = config.get_text_config()
    if config.model_type.startswith("cohere"):
        return float(config.logit_scale)
    if config.model_type.startswith("falcon_h1"):
        return float(config.lm_head_multiplier)
    scale = float(getattr(config, "logits_scaling", 1))
    return scale if config.model_type.startswith("hyperclovax") else 1 / scale  # Granite divides


# Layers.


def equal_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return layers with full attention."""
    return (LayerKind(rope(config)),) * int(config.num_hidden_layers)


def windowed_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return layers that all have the same sliding window, or none."""
    return (LayerKind(rope(config), config.sliding_window),) * int(config.num_hidden_layers)


def mixed_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return layers with or without a sliding window, by `layer_types`; each kind has its own rotary embeddings."""
    return _by_type(
        config,
        full_attention=lambda: LayerKind(rope(config, "full_attention")),
        sliding_attention=lambda: LayerKind(rope(config, "sliding_attention"), config.sliding_window),
    )


def partly_rotated_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of SmolLM3: where `no_rope_layers` holds a 0, attention does not depend on positions."""
    layers = mixed_layers(config) if config.use_sliding_window else equal_layers(config)
    if len(config.no_rope_layers) < len(layers):
        raise NotCovered("no_rope_layers has no value for each layer")
    still = unrotated(len(layers[0].rope.inverse_frequencies))
    pairs = zip(layers, config.no_rope_layers, strict=False)
    return tuple(kind if rotates else replace(kind, rope=still) for kind, rotates in pairs)


def routed_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Qwen's mixtures of experts, some of them with routed experts for an MLP."""
    layers = mixed_layers(config) if getattr(config, "layer_types", None) else windowed_layers(config)
    return tuple(
        replace(
            kind,
            routed=number not in config.mlp_only_layers
            and config.num_experts > 0
            and (number + 1) % config.decoder_sparse_step == 0,
        )
        for number, kind in enumerate(layers)
    )


def sparse_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of gpt-oss, all with routed experts."""
    return tuple(replace(kind, routed=True) for kind in mixed_layers(config))


def recurrent_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Qwen3.5: full attention, or a gated delta net."""
    own = rope(config)
    return _by_type(
        config,
        full_attention=lambda: LayerKind(own),
        linear_attention=lambda: LayerKind(own, recurrent=True),
    )


def convolved_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of LFM2: full attention, or a short convolution. Behind some layers all have routed experts."""
    own = rope(config)
    layers = _by_type(config, full_attention=lambda: LayerKind(own), conv=lambda: LayerKind(own, convolved=True))
    dense = getattr(config, "num_dense_layers", len(layers))
    return tuple(replace(kind, routed=number >= dense) for number, kind in enumerate(layers))


def mixed_shape_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Gemma 4. Those with full attention have larger heads, and the last use earlier keys."""
    types, first_shared = list(config.layer_types), int(config.num_hidden_layers - config.num_kv_shared_layers)
    layers = []
    for number, kind in enumerate(types):
        own: Any = config.per_layer_config[number]
        parameters, size, full = config.rope_parameters[kind], int(own.head_dim), kind == "full_attention"
        frequencies = default_frequencies(size, parameters["rope_theta"])
        if parameters.get("rope_type", "default") == "proportional":
            rotates = int(parameters.get("partial_rotary_factor", 1.0) * size // 2)
            frequencies = F.pad(frequencies[:rotates], (0, size // 2 - rotates)) / parameters.get("factor", 1.0)
        elif parameters.get("rope_type", "default") != "default":
            raise NotCovered(f"its rotary embeddings are of the kind {parameters['rope_type']}")
        shares = number >= first_shared
        earlier = [other for other in range(first_shared) if types[other] == kind]
        if shares and not earlier:
            raise NotCovered(f"no layer has keys for its layer {number}")
        layers.append(
            LayerKind(
                Rope(tuple(frequencies.tolist())),
                None if full else config.sliding_window,
                routed=bool(config.enable_moe_block),
                head_dim=size,
                num_kv_heads=int(own.num_key_value_heads),
                intermediate_size=config.intermediate_size * (2 if shares and config.use_double_wide_mlp else 1),
                keys_of=earlier[-1] if shares else None,
                values_are_keys=bool(config.attention_k_eq_v) and full and not shares,
            )
        )
    return tuple(layers)


def granite_hybrid_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Granite 4: attention, which may not depend on positions, or Mamba-2."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = rope(config) if config.position_embedding_type == "rope" else unrotated(head_dim // 2)
    layers = _by_type(
        config,
        full_attention=lambda: LayerKind(own),
        linear_attention=lambda: LayerKind(own, recurrent=True),
    )
    return tuple(replace(kind, routed=config.num_local_experts > 0) for kind in layers)


def nemotron_h_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Nemotron-H: attention, which does not depend on positions, Mamba-2, an MLP, or experts."""
    own = unrotated(config.head_dim // 2)
    return _by_type(
        config,
        full_attention=lambda: LayerKind(own, has_mlp=False),
        linear_attention=lambda: LayerKind(own, recurrent=True, has_mlp=False),
        mlp=lambda: LayerKind(own, has_mixer=False),
        moe=lambda: LayerKind(own, has_mixer=False, routed=True),
    )


def latent_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of DeepSeek-V2, V3 and GLM-4.7-Flash. Behind some layers all have routed experts."""
    own, count = rope(config), int(config.num_hidden_layers)
    types = getattr(config, "mlp_layer_types", None)
    if types is None:
        types = ["sparse" if layer >= config.first_k_dense_replace else "dense" for layer in range(count)]
    return tuple(LayerKind(own, routed=types[layer] == "sparse") for layer in range(count))


def routed_recurrent_layers(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Return the layers of Qwen3.5's mixtures of experts, all of which have routed experts for an MLP."""
    return tuple(replace(kind, routed=True) for kind in recurrent_layers(config))


def _by_type(config: AnyConfig, **kinds: Callable[[], LayerKind]) -> tuple[LayerKind, ...]:
    """Return layers by `layer_types`. Only kinds that occur are created."""
    unknown = set(config.layer_types) - set(kinds)
    if unknown:
        raise NotCovered(f"it has layers of the kinds {', '.join(sorted(unknown))}")
    made = {name: kinds[name]() for name in set(config.layer_types)}
    return tuple(made[name] for name in config.layer_types)


def unrotated(pairs: int) -> Rope:
    """Return rotary embeddings that rotate nothing."""
    return Rope((0.0,) * pairs)


def rope(config: AnyConfig, layer_type: str | None = None) -> Rope:
    """Return the rotary embeddings of a kind of layer, or of all layers if kinds do not differ."""
    parameters: dict[str, Any] = config.rope_parameters
    nested = layer_type is not None and layer_type in parameters
    of_kind: dict[str, Any] = parameters[layer_type] if nested and layer_type else parameters
    name = of_kind.get("rope_type", "default")
    longest = of_kind.get("original_max_position_embeddings") or config.max_position_embeddings
    if str(name) not in STATIC_ROPES or (name == "longrope" and config.max_position_embeddings > longest):
        raise NotCovered(f"its rotary embeddings ({name}) change with the length of the text")
    try:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        share = of_kind.get("partial_rotary_factor", 1.0) if name == "default" else 1.0  # else it is applied below
        channels = int(head * share)
        frequencies, scale = rotary_frequencies(
            channels, config.max_position_embeddings, of_kind["rope_theta"], of_kind
        )
    except Exception as error:  # values that are not numbers, sizes that exceed the memory
        raise NotCovered(f"its rotary embeddings cannot be computed ({error})") from error
    return Rope(tuple(frequencies.float().tolist()), float(scale))


# Differences from Llama without biases.


def _biases(config: AnyConfig) -> dict[str, Any]:
    return {"qkv_bias": bool(config.attention_bias), "output_bias": bool(config.attention_bias)}


def _llama(config: AnyConfig) -> dict[str, Any]:
    return _biases(config) | {"mlp_bias": bool(getattr(config, "mlp_bias", False))}


def _granite(config: AnyConfig) -> dict[str, Any]:
    """Add factors on embeddings, scores, what layers add, and logits."""
    if not config.residual_multiplier > 0 or not config.logits_scaling:  # hidden states are divided by both
        raise NotCovered("its factor on residuals is not above 0, or that on logits is 0")
    return _llama(config) | {
        "query_scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": 1 / config.logits_scaling,
    }


def _phi3(config: AnyConfig) -> dict[str, Any]:
    return {"fused_names": True}


def _mistral(config: AnyConfig) -> dict[str, Any]:
    return {}


def _gemma(config: AnyConfig) -> dict[str, Any]:
    """Scale embeddings, and add one to the weights of norms."""
    return _biases(config) | {"norm_plus_one": True, "embedding_scale": config.hidden_size**0.5}


def _later_gemma(config: AnyConfig) -> dict[str, Any]:
    """Add norms after attention and MLP, and a soft-cap of the logits."""
    return _gemma(config) | {
        "activation": config.hidden_activation,
        "post_norms": True,
        "query_scale": config.query_pre_attn_scalar**-0.5,
        "final_softcap": config.final_logit_softcapping,
    }


def _gemma2(config: AnyConfig) -> dict[str, Any]:
    return _later_gemma(config) | {"attention_softcap": config.attn_logit_softcapping}


def _gemma3(config: AnyConfig) -> dict[str, Any]:
    return _later_gemma(config) | {"qk_norm": True}  # transformers reads no cap of attention here


def _gemma4(config: AnyConfig) -> dict[str, Any]:
    """Add norms of values, factors on the outputs of layers, an embedding of each layer, and experts beside MLPs."""
    if config.attention_bias:
        raise NotCovered("it has biases of attention")
    experts = None
    if config.enable_moe_block:
        experts = Experts(
            count=config.num_experts,
            chosen=config.top_k_experts,
            intermediate_size=config.moe_intermediate_size,
            normed=True,
            shared_size=config.intermediate_size,
            beside=True,
            fused=True,
        )
    last: Any = config.per_layer_config[config.num_hidden_layers - 1]
    return {
        "activation": config.hidden_activation,
        "embedding_scale": config.hidden_size**0.5,
        "experts": experts,
        "final_softcap": config.final_logit_softcapping,
        "head_dim": last.head_dim,
        "layer_input_size": config.hidden_size_per_layer_input or 0,
        "layer_input_vocab": config.vocab_size_per_layer_input,
        "mixed": True,
        "num_kv_heads": last.num_key_value_heads,
        "post_norms": True,
        "qk_norm": True,
        "query_scale": 1.0,
    }


def _qwen2(config: AnyConfig) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: AnyConfig) -> dict[str, Any]:
    return _biases(config) | {"qk_norm": True}


def _experts(config: AnyConfig, shared_size: int = 0) -> Experts:
    return Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normed=bool(getattr(config, "norm_topk_prob", True)),
        shared_size=shared_size,
    )


def _qwen2_moe(config: AnyConfig) -> dict[str, Any]:
    return {"qkv_bias": config.qkv_bias, "experts": _experts(config, config.shared_expert_intermediate_size)}


def _qwen3_moe(config: AnyConfig) -> dict[str, Any]:
    return _qwen3(config) | {"experts": _experts(config)}


def _gpt_oss(config: AnyConfig) -> dict[str, Any]:
    """Add attention sinks, and experts with biases and a clamped activation."""
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normed=True,
        biased=True,
    )
    clamped = ClampedSwiGLU(float(getattr(config, "swiglu_alpha", 1.702)), float(getattr(config, "swiglu_limit", 7.0)))
    return _biases(config) | {"sinks": True, "experts": experts, "clamped": clamped}


def _qwen3_5(config: AnyConfig) -> dict[str, Any]:
    """Add a gate on the attention output, and gated delta nets."""
    if config.hidden_act != "silu":
        raise NotCovered(f"its activation {config.hidden_act} is not silu, the only one of its delta nets")
    net = DeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
    return _qwen3(config) | {"norm_plus_one": True, "gated": True, "recurrent_net": net}


LFM2_NAMES = (
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    (".mlp.", ".feed_forward."),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
)


def _lfm2(config: AnyConfig) -> dict[str, Any]:
    """Add short convolutions."""
    if config.conv_bias or config.conv_L_cache < 1:
        raise NotCovered("its short convolutions have biases, or read no token")
    inner = int(config.intermediate_size)
    if getattr(config, "block_auto_adjust_ff_dim", False):  # as transformers computes it
        inner, unit = int(2 * inner / 3), config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            inner = int(config.block_ffn_dim_multiplier * inner)
            inner = -(-inner // unit) * unit
    return {
        "activation": "silu",
        "conv_kernel": config.conv_L_cache,
        "intermediate_size": inner,
        "norm_eps": config.norm_eps,
        "qk_norm": True,
        "renamed": LFM2_NAMES,
    }


def _lfm2_moe(config: AnyConfig) -> dict[str, Any]:
    if not config.use_expert_bias:
        raise NotCovered("its experts have no biases")
    experts = replace(_experts(config), sigmoid=True, scale=float(config.routed_scaling_factor))
    return _lfm2(config) | {"experts": experts}


def _qwen3_5_moe(config: AnyConfig) -> dict[str, Any]:
    return _qwen3_5(config) | {"experts": _experts(config, config.shared_expert_intermediate_size)}


def _qwen3_next(config: AnyConfig) -> dict[str, Any]:
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise NotCovered("some of its layers have no routed experts")
    return _qwen3_5_moe(config)


def _granite_hybrid(config: AnyConfig) -> dict[str, Any]:
    """Add Mamba-2 layers, and experts beside an MLP that all tokens use."""
    if config.mamba_proj_bias or not config.mamba_conv_bias or config.hidden_act != "silu":
        raise NotCovered("its Mamba-2 layers have biases of projections, none of convolutions, or another activation")
    if tuple(config.time_step_limit or (0.0, inf)) != (0.0, inf):
        raise NotCovered(f"its time_step_limit is {config.time_step_limit}")
    differences = _granite(config) | {
        "intermediate_size": config.shared_intermediate_size,
        "recurrent_net": Mamba2(
            key_heads=config.mamba_n_groups,
            value_heads=config.mamba_n_heads,
            key_dim=config.mamba_d_state,
            value_dim=config.mamba_d_head,
            kernel=config.mamba_d_conv,
        ),
    }
    if not config.num_local_experts:
        return differences
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normed=True,
        shared_size=config.shared_intermediate_size,
        gates_shared=False,
    )
    return differences | {"experts": experts}


def _nemotron_h(config: AnyConfig) -> dict[str, Any]:
    """Add Mamba-2 layers, MLPs without gates, and experts that are chosen by sigmoids.

    Step sizes of Mamba-2 have no lower limit, as in the published models. Transformers has one in prompts alone.
    """
    if config.use_bias or config.mlp_bias or not config.use_conv_bias or config.mamba_hidden_act != "silu":
        raise NotCovered("its Mamba-2 layers or MLPs have biases of projections, or its convolutions have none")
    if config.mlp_hidden_act != "relu2":
        raise NotCovered(f"its MLPs have the activation {config.mlp_hidden_act} without a gate")
    differences: dict[str, Any] = {
        "activation": "relu2",
        "gated_mlp": False,
        "norm_eps": config.layer_norm_epsilon,
        "recurrent_net": Mamba2(
            key_heads=config.n_groups,
            value_heads=config.mamba_num_heads,
            key_dim=config.ssm_state_size,
            value_dim=config.mamba_head_dim,
            kernel=config.conv_kernel,
        ),
    }
    if "moe" not in config.layer_types:
        return differences
    if config.moe_latent_size is not None or config.n_group != 1:
        raise NotCovered("its experts read a latent projection, or are chosen by group")
    experts = Experts(
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normed=bool(config.norm_topk_prob),
        shared_size=config.moe_shared_expert_intermediate_size,
        gates_shared=False,
        sigmoid=True,
        scale=float(config.routed_scaling_factor),
    )
    return differences | {"experts": experts}


def _latent(config: AnyConfig) -> dict[str, Any]:
    """Add latent attention, and experts that are chosen by group."""
    latent, rope_parameters = latent_config(config), config.rope_parameters
    if 2 * len(rope(config).inverse_frequencies) != latent.rotated:
        raise NotCovered(f"it does not rotate all {latent.rotated} rotary channels of a head")
    if config.attention_bias or getattr(config, "mlp_bias", False):
        raise NotCovered("its attention or MLPs have biases")
    by_softmax = config.model_type == "deepseek_v2"
    grouped = not by_softmax or config.topk_method == "group_limited_greedy"
    groups, chosen_groups = (config.n_group or 1, config.topk_group or 1) if grouped else (1, 1)
    count, chosen, best = config.n_routed_experts, config.num_experts_per_tok, 1 if by_softmax else 2
    fits = groups == 1 or (count % groups == 0 and best <= count // groups and 0 < chosen_groups <= groups)
    if not fits or chosen > count // groups * chosen_groups:
        raise NotCovered(f"its {count} experts are no {groups} groups, of which {chosen_groups} hold {chosen} experts")
    experts = Experts(
        count=count,
        chosen=chosen,
        intermediate_size=config.moe_intermediate_size,
        normed=not by_softmax and bool(config.norm_topk_prob),
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        gates_shared=False,
        sigmoid=not by_softmax,
        scale=float(config.routed_scaling_factor),
        groups=groups,
        chosen_groups=chosen_groups,
        group_best=best,
    )
    scale = latent.query_dim**-0.5
    weight, factor = rope_parameters.get("mscale_all_dim"), rope_parameters.get("factor") or 1
    if rope_parameters.get("rope_type", "default") != "default" and weight and factor > 1:  # YaRN (arXiv 2309.00071)
        scale *= (0.1 * weight * log(factor) + 1) ** 2
    return {
        "experts": experts,
        "head_dim": latent.key_dim,
        "latent": latent,
        "num_kv_heads": 1,
        "query_scale": scale,
    }


def _olmo2(config: AnyConfig) -> dict[str, Any]:
    """Norm outputs of attention and MLP in the place of their inputs, and queries and keys of all heads at once."""
    return _biases(config) | {"pre_norms": False, "post_norms": True, "qk_norm": True, "joint_qk_norm": True}


FAMILIES = {
    "deepseek_v2": Family("DeepseekV2", latent_layers, _latent, rotates_all=False, tensors=latent_tensors),
    "deepseek_v3": Family(
        "DeepseekV3", latent_layers, _latent, rotates_all=False, tensors=latent_tensors, gguf=("deepseek2",)
    ),
    "gemma": Family("Gemma", equal_layers, _gemma, gguf=("gemma",)),
    "gemma2": Family("Gemma2", mixed_layers, _gemma2, gguf=("gemma2",)),
    "gemma3_text": Family("Gemma3", mixed_layers, _gemma3, gguf=("gemma3",)),
    "gemma4_text": Family(
        "Gemma4", mixed_shape_layers, _gemma4, rotates_all=False, has_other_parts=True, gguf=("gemma4",)
    ),
    "glm4_moe_lite": Family("Glm4MoeLite", latent_layers, _latent, rotates_all=False, tensors=latent_tensors),
    "gpt_oss": Family("GptOss", sparse_layers, _gpt_oss, tensors=gpt_oss_tensors, gguf=("gpt-oss",)),
    "granite": Family("Granite", equal_layers, _granite, gguf=("granite",)),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        granite_hybrid_layers,
        _granite_hybrid,
        tensors=granite_hybrid_tensors,
        gguf=("granitehybrid",),
    ),
    "lfm2": Family("Lfm2", convolved_layers, _lfm2, gguf=("lfm2",)),
    "lfm2_moe": Family("Lfm2Moe", convolved_layers, _lfm2_moe, gguf=("lfm2moe",)),
    "llama": Family("Llama", equal_layers, _llama, gguf=("llama",)),
    "ministral3": Family("Ministral3", windowed_layers, _mistral, gguf=("mistral3",)),
    "mistral": Family("Mistral", windowed_layers, _mistral),
    "nemotron_h": Family(
        "NemotronH", nemotron_h_layers, _nemotron_h, tensors=nemotron_h_tensors, gguf=("nemotron_h", "nemotron_h_moe")
    ),
    "olmo2": Family("Olmo2", equal_layers, _olmo2, gguf=("olmo2",)),
    "olmo3": Family("Olmo3", mixed_layers, _olmo2),
    "phi3": Family("Phi3", windowed_layers, _phi3, rotates_all=False, gguf=("phi3",)),
    "qwen2": Family("Qwen2", mixed_layers, _qwen2, gguf=("qwen2",)),
    "qwen2_moe": Family("Qwen2Moe", routed_layers, _qwen2_moe, gguf=("qwen2moe",)),
    "qwen3": Family("Qwen3", mixed_layers, _qwen3, gguf=("qwen3vl", "qwen3")),
    "qwen3_5_moe_text": Family(
        "Qwen3_5Moe",
        routed_recurrent_layers,
        _qwen3_5_moe,
        rotates_all=False,
        has_other_parts=True,
        gguf=("qwen35moe",),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5", recurrent_layers, _qwen3_5, rotates_all=False, has_other_parts=True, gguf=("qwen35",)
    ),
    "qwen3_moe": Family("Qwen3Moe", routed_layers, _qwen3_moe, gguf=("qwen3vlmoe", "qwen3moe")),
    "qwen3_next": Family(
        "Qwen3Next",
        routed_recurrent_layers,
        _qwen3_next,
        rotates_all=False,
        tensors=qwen3_next_tensors,
        gguf=("qwen3next",),
    ),
    "qwen3_vl_text": Family("Qwen3VLText", equal_layers, _qwen3, has_other_parts=True),
    "smollm3": Family("SmolLM3", partly_rotated_layers, _llama, gguf=("smollm3",)),
}
