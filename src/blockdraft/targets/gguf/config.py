"""Conversion between configurations and the metadata of GGUF files.

Transformers has such a conversion too, but without windows, soft-caps and scaled rotary embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gguf import ExpertGatingFuncType

from blockdraft.formats.gguf import GGUFFile, GGUFTensor
from blockdraft.formats.gguf.rope import ROPE_BASE, ROPE_FACTORS, SHORT_FACTORS
from blockdraft.targets.base import NotCovered
from blockdraft.targets.families import FAMILIES
from blockdraft.targets.model_config import AnyConfig, make_config

# `model_type` by the architectures of llama.cpp, and the reverse.
MODEL_TYPES = {name: model_type for model_type, family in FAMILIES.items() for name in family.gguf}
ARCHITECTURES = {family: name for name, family in MODEL_TYPES.items()} | {"mistral": "llama", "olmo3": "olmo2"}
GEMMA2_WINDOW, GEMMA2_CAPS = 4096, (50.0, 30.0)  # defaults of llama.cpp, of attention and logits
# Factors of Granite by their keys in files, with llama.cpp's defaults.
GRANITE_SCALES = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
}
WIDE_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}  # of the 27B models, whose scores are scaled differently
BY_LAYER = ("attention.sliding_window_pattern", "attention.recurrent_layers")  # keys of lists
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")  # architectures with gated delta nets
PARTLY_ROTATED = ("phi3", *DELTA_NETS)  # architectures that may rotate a part of each head
LATENT = "deepseek2"  # the architecture with latent attention
NEMOTRON = ("nemotron_h", "nemotron_h_moe")  # architectures whose attention does not depend on positions
MAMBA = ("granitehybrid", *NEMOTRON)  # architectures with Mamba-2 layers
MIXTURES = (
    *("nemotron_h_moe", LATENT, "gpt-oss", "lfm2moe", "qwen2moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen35moe"),
)
CONVOLVED = ("lfm2", "lfm2moe")  # architectures whose layers without key/value heads are short convolutions
KV_HEADS, INNER_SIZE = "attention.head_count_kv", "feed_forward_length"
SOFTMAX, SIGMOID = int(ExpertGatingFuncType.SOFTMAX), int(ExpertGatingFuncType.SIGMOID)
LAYER_INPUTS = "per_layer_token_embd.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"

Get = Callable[..., Any]  # takes a key without the architecture, and an optional default


def causal_lm(file: GGUFFile) -> str | None:
    """Return the class in transformers of the language model in a file, or None if it holds none of a known family."""
    model_type = MODEL_TYPES.get(str(file.metadata.get("general.architecture")))
    return None if model_type is None else FAMILIES[model_type].causal_lm


def gguf_config(file: GGUFFile) -> AnyConfig:
    """Return the configuration of a file.

    Raises:
        NotCovered: The native decoder does not support the architecture or one of its settings, or a value is missing.
    """
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in MODEL_TYPES:
        raise NotCovered(f"its architecture {name} is none of {', '.join(MODEL_TYPES)}")

    def get(key: str, *default: Any) -> Any:
        if f"{name}.{key}" not in metadata and not default:
            raise NotCovered(f"it lacks {name}.{key}")
        value = metadata.get(f"{name}.{key}", *default)
        if isinstance(value, list) and key not in BY_LAYER and name != "gemma4":
            if key in (KV_HEADS, INNER_SIZE) and name in (*CONVOLVED, *MAMBA):  # 0 where a layer has none
                value = [size for size in value if size] or [0]
            if len(set(value)) != 1:
                raise NotCovered(f"{name}.{key} differs from layer to layer")
            value = value[0]
        return value

    if EMBEDDING not in file.tensors:
        raise NotCovered(f"it has no {EMBEDDING}")
    # Of an MTP head, which is not a part of the decoder, there are further layers.
    layers, count = get("block_count") - get("nextn_predict_layers", 0), len(file.tensors)
    if layers > count:  # checked before anything is allocated for each layer
        raise NotCovered(f"it has {layers} layers, but only {count} tensors")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    routed = name in MIXTURES or (name in ("gemma4", "granitehybrid") and get("expert_count", 0) > 0)
    if not routed and get("expert_count", 0):
        raise NotCovered("it is a mixture of experts")
    if name != LATENT:
        check_settings(get, head_dim, rotates_all=name not in (*PARTLY_ROTATED, *NEMOTRON))
    family = MODEL_TYPES[name]
    fields = {
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get(INNER_SIZE, *([0] if name in MIXTURES else [])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get(KV_HEADS, heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "rope_parameters": rope_parameters(get),
        **{f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")},
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    window = get("attention.sliding_window", None)
    if name in ("gemma2", "gemma3"):
        fields |= gemma_fields(name, get, fields)
    elif name == "gemma4":
        fields |= gemma4_fields(file, get, fields)
    elif name == "phi3":
        fields |= phi3_fields(file, get, fields)
    elif name == "granite":
        if get("rope.scaling.finetuned", True) is False:
            raise NotCovered("its attention does not depend on positions")
        fields |= {field: get(key, default) or default for field, (key, default) in GRANITE_SCALES.items()}
        fields["attention_multiplier"] = get("attention.scale", 0.0) or head_dim**-0.5
    elif name == "mistral3":
        fields["sliding_window"] = None
    elif name == "olmo2" and window:
        family, far = "olmo3", fields["rope_parameters"]
        fields |= {
            "sliding_window": window,
            "layer_types": windowed_types(get("attention.sliding_window_pattern", 4), layers),
            "rope_parameters": {
                "full_attention": far,
                "sliding_attention": {"rope_type": "default", "rope_theta": far["rope_theta"]},
            },
        }
    elif name == LATENT:
        fields |= latent_fields(get, fields)
    elif name in MAMBA:
        fields |= mamba_fields(file, get, fields)
    elif name in DELTA_NETS:
        fields |= delta_net_fields(get, fields)
    elif name in CONVOLVED:
        if window:
            raise NotCovered("it has a sliding window")
        fields |= convolution_fields(get, fields, metadata[f"{name}.{KV_HEADS}"])
    elif name == "gpt-oss":
        fields |= gpt_oss_fields(get, fields)
    elif window:
        raise NotCovered(f"it has a sliding window, which llama.cpp ignores in the architecture {name}")
    if routed:
        fields |= expert_fields(file, name, get, fields)
    if name == LATENT and "topk_method" in fields:
        family = "deepseek_v2"
    return make_config({"model_type": family, "architectures": [FAMILIES[family].causal_lm], **fields})


def check_settings(get: Get, head_dim: int, rotates_all: bool) -> None:
    """Raise `NotCovered` for settings that no configuration here can express."""
    if get("attention.causal", True) is False:
        raise NotCovered("its attention is bidirectional")
    if get("attention.value_length", head_dim) != head_dim:
        raise NotCovered("its values and keys differ in size")
    if rotates_all and get("rope.dimension_count", head_dim) != head_dim:
        raise NotCovered("it rotates a part of each head only")


def rope_parameters(get: Get) -> dict[str, Any]:
    """Return `rope_parameters` as in transformers, without the factors of the tensor rope_freqs."""
    parameters = {"rope_type": "default", "rope_theta": get("rope.freq_base", ROPE_BASE)}
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", 0.0) or get("rope.scale_linear", 0.0) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return parameters
    if kind == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    beta = get("attention.temperature_scale", None)  # of Ministral 3, beyond the original context
    rank = get("attention.kv_lora_rank", None)
    usual = {"attn_factor": 1 + 0.1 * math.log(factor)} if factor >= 1 else {}
    keys = ("ext_factor", "attn_factor", *(() if beta or rank else ("log_multiplier",)))
    values = {key: get(f"rope.scaling.yarn_{key}", None) for key in keys}
    unusual = [
        key for key, value in values.items() if value and not math.isclose(value, usual.get(key, 0), rel_tol=1e-4)
    ]
    if kind != "yarn" or unusual or get("rope.scaling.attn_factor", 1.0) != 1:
        raise NotCovered(f"its rotary embeddings are scaled by {' '.join([kind, *unusual])}")
    longest = get("rope.scaling.original_context_length", get("context_length"))
    speeds = {f"beta_{name}": get(f"rope.scaling.yarn_beta_{name}", None) for name in ("fast", "slow")}
    given = {name: value for name, value in speeds.items() if value is not None}
    if beta:
        weight = get("rope.scaling.yarn_log_multiplier", 1.0)
        given |= {"llama_4_scaling_beta": beta, "mscale": weight, "mscale_all_dim": weight}
    elif rank and (weight := 10 * get("rope.scaling.yarn_log_multiplier", 0.0)):  # a tenth is stored
        given |= {"mscale": weight, "mscale_all_dim": weight}
    return parameters | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": longest, **given}


def phi3_fields(file: GGUFFile, get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of Phi 3 and 4: window, rotated share of heads, and factors of frequencies.

    Factors for long texts are not used: the context ends where they begin.
    """
    head_dim, context = fields["head_dim"], fields["max_position_embeddings"]
    rope = fields["rope_parameters"] | {"partial_rotary_factor": rotated_share(get, head_dim)}
    if SHORT_FACTORS in file.tensors:
        context = min(context, get("rope.scaling.original_context_length"))
        rope |= long_rope(file.tensors[SHORT_FACTORS], context, get("rope.scaling.attn_factor", 1.0))
    window = get("attention.sliding_window", 0)
    return {
        "sliding_window": window if 0 < window < context else None,
        "max_position_embeddings": context,
        "original_max_position_embeddings": context,
        "rope_parameters": rope,
    }


def rotated_share(get: Get, head_dim: int) -> float:
    rotated: int = get("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise NotCovered(f"it rotates {rotated} channels of heads of {head_dim}")
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1)  # products are rounded down


def latent_fields(get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of latent attention."""
    if get("attention.causal", True) is False or get("attention.temperature_scale", None):
        raise NotCovered("its attention is bidirectional, or depends on the length of the text")
    rank, rotated, query = (
        get("attention.kv_lora_rank"),
        get("rope.dimension_count"),
        get("attention.key_length_mla", 0),
    )
    if not query:
        raise NotCovered("one matrix makes its keys and values, as in files before 2025; convert the model again")
    if fields["head_dim"] != rank + rotated or query <= rotated or fields["num_key_value_heads"] != 1:
        raise NotCovered(f"its keys have {fields['head_dim']} numbers instead of {rank} + {rotated}, or several heads")
    return {
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": get("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": query - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": get("attention.value_length_mla"),
    }


def delta_net_fields(get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of Qwen3.5: gated delta nets, and the share of heads that is rotated."""
    layers, values, keys = fields["num_hidden_layers"], get("ssm.time_step_rank"), get("ssm.group_count")
    if not 0 < keys <= values or values % keys or get("ssm.inner_size") % values:
        raise NotCovered(
            f"its delta nets have {values} value heads, {keys} key heads and {get('ssm.inner_size')} values"
        )
    every = get("full_attention_interval", 4)
    recurrent = get("attention.recurrent_layers", [(layer + 1) % every != 0 for layer in range(layers)])
    return {
        "hidden_act": "silu",
        "layer_types": ["linear_attention" if kind else "full_attention" for kind in recurrent[:layers]],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_value_head_dim": get("ssm.inner_size") // values,
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
        "rope_parameters": fields["rope_parameters"]
        | {"partial_rotary_factor": rotated_share(get, fields["head_dim"])},
    }


def mamba_fields(file: GGUFFile, get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of Granite 4 and Nemotron-H: the kinds of layers, by their tensors, and Mamba-2."""
    parts = {"linear_attention": "ssm_in", "full_attention": "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up"}
    types = []
    for layer in range(fields["num_hidden_layers"]):
        kinds = [kind for kind, part in parts.items() if f"blk.{layer}.{part}.weight" in file.tensors]
        if not kinds:
            raise NotCovered(f"layer {layer} has none of {', '.join(parts.values())}")
        types.append(kinds[0])
    inner, heads, hidden = get("ssm.inner_size"), get("ssm.time_step_rank"), fields["hidden_size"]
    groups, state, kernel = get("ssm.group_count"), get("ssm.state_size"), get("ssm.conv_kernel")
    if not 0 < groups <= heads or heads % groups or inner % heads:
        raise NotCovered(f"its Mamba-2 layers have {heads} heads, {groups} groups and {inner} values")
    if file.metadata["general.architecture"] in NEMOTRON:
        return {
            "layers_block_type": types,
            "layer_norm_epsilon": fields["rms_norm_eps"],
            "mamba_num_heads": heads,
            "mamba_head_dim": inner // heads,
            "n_groups": groups,
            "ssm_state_size": state,
            "conv_kernel": kernel,
        }
    if inner % hidden:
        raise NotCovered(f"its Mamba-2 layers have {inner} values, no multiple of its {hidden} hidden numbers")
    granite = {field: get(key, default) or default for field, (key, default) in GRANITE_SCALES.items()}
    return granite | {
        "attention_multiplier": get("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        "layer_types": types,
        "position_embedding_type": "rope" if get("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": get("expert_shared_feed_forward_length", 0) or fields["intermediate_size"],
        "num_local_experts": 0,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": kernel,
        "mamba_expand": inner // hidden,
    }


def convolution_fields(get: Get, fields: Mapping[str, Any], kv_heads: int | list[int]) -> dict[str, Any]:
    """Return the specific fields of LFM2, whose layers without key/value heads are short convolutions."""
    layers = fields["num_hidden_layers"]
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
    if len(by_layer) != layers:
        raise NotCovered(f"it has key/value heads for {len(by_layer)} of {layers} layers")
    kernel, hidden = get("shortconv.l_cache"), fields["hidden_size"]
    if not 0 < kernel <= hidden:
        raise NotCovered(f"its short convolutions read {kernel} tokens")
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in by_layer],
        "conv_L_cache": kernel,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": fields["rms_norm_eps"],
    }


def gpt_oss_fields(get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the windows of gpt-oss, and its rotary embeddings.

    Files have no key for `truncate`. The model was trained without it, although llama.cpp truncates.
    """
    layers = fields["num_hidden_layers"]
    return {
        "sliding_window": get("attention.sliding_window"),
        "layer_types": windowed_types(get("attention.sliding_window_pattern", 2), layers),
        "rope_parameters": fields["rope_parameters"] | {"truncate": False},
    }


def windowed_types(pattern: int | list[bool], layers: int) -> list[str]:
    """Return `layer_types` for a list of which layers have a window, or N: of each N layers, the last has none."""
    if not isinstance(pattern, list):
        pattern = [layer % pattern < pattern - 1 for layer in range(layers)]
    return ["sliding_attention" if near else "full_attention" for near in pattern[:layers]]


def expert_fields(file: GGUFFile, name: str, get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of mixtures of experts. In LFM2 the first layers have none, in others all have."""
    count, chosen = get("expert_count"), get("expert_used_count")
    sigmoid, plain = name in ("lfm2moe", "nemotron_h_moe"), name == "nemotron_h_moe"
    dense = get("leading_dense_block_count", 0) if name in ("lfm2moe", LATENT) else 0
    dense = fields["layers_block_type"].index("moe") if plain and "moe" in fields["layers_block_type"] else dense
    first, fused = (f"blk.{dense}.ffn_{part}_exps.weight" for part in ("up" if plain else "gate", "gate_up"))
    if name == "gemma4" and fused in file.tensors:
        first = fused
    if first not in file.tensors:
        raise NotCovered(f"it lacks {first}")
    shape = file.tensors[first].shape
    if count != shape[0] or 0 in shape:  # checked before anything is allocated for each expert
        raise NotCovered(f"it has {count} experts, and {first} is of the shape {list(shape)}")
    if not 0 < chosen <= count:
        raise NotCovered(f"each token uses {chosen} of its {count} experts")
    scale = get("expert_weights_scale", 0.0) or 1.0
    if name == LATENT:
        return latent_expert_fields(file, get, dense, scale)
    if sigmoid and get("expert_gating_func", SIGMOID) != SIGMOID:
        raise NotCovered("its router does not choose by sigmoids")
    if not sigmoid and (scale != 1 or get("expert_gating_func", SOFTMAX) not in (0, SOFTMAX)):
        raise NotCovered("its router does not choose by a softmax")
    inner = get("expert_feed_forward_length", 0) or fields["intermediate_size"] // chosen
    if plain:
        if not get("expert_weights_norm", False) or get("expert_group_count", 1) > 1 or get("moe_latent_size", 0):
            raise NotCovered(
                "its experts read a latent projection, are chosen by group, or their shares are not normed"
            )
        return {
            "n_routed_experts": count,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": inner,
            "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
            "routed_scaling_factor": scale,
        }
    if name == "granitehybrid":
        return {"num_local_experts": count, "num_experts_per_tok": chosen, "intermediate_size": inner}
    if name == "gpt-oss":
        return {"num_local_experts": count, "num_experts_per_tok": chosen, "intermediate_size": inner}
    if name == "gemma4":
        routing = {"enable_moe_block": True, "num_experts": count, "top_k_experts": chosen}
        return routing | {"moe_intermediate_size": get("expert_feed_forward_length")}
    routing = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "norm_topk_prob": name != "qwen2moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": fields["intermediate_size"] or inner,
    }
    if sigmoid:
        routing |= {"num_dense_layers": dense, "routed_scaling_factor": scale, "norm_topk_prob": True}
        routing |= {"use_expert_bias": True}
    if name in ("qwen2moe", "qwen3next", "qwen35moe"):
        shared = get("expert_shared_feed_forward_length", 0) or routing["intermediate_size"]
        routing["shared_expert_intermediate_size"] = shared
    return routing


def latent_expert_fields(file: GGUFFile, get: Get, dense: int, scale: float) -> dict[str, Any]:
    """Return the fields of experts beside latent attention. A softmax chooses those of DeepSeek-V2, without bias."""
    has_bias, normed = f"blk.{dense}.exp_probs_b.bias" in file.tensors, get("expert_weights_norm", False)
    by = get("expert_gating_func", 0) or (SIGMOID if has_bias else SOFTMAX)  # older files do not name it
    if by != (SIGMOID if has_bias else SOFTMAX) or (normed and by == SOFTMAX):
        raise NotCovered("its router chooses by sigmoids without biases, or by a softmax with biases or normed shares")
    fields = {
        "first_k_dense_replace": dense,
        "n_routed_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "n_shared_experts": get("expert_shared_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": normed,
        "routed_scaling_factor": scale,
        "n_group": get("expert_group_count", 0) or 1,
        "topk_group": get("expert_group_used_count", 0) or 1,
    }
    if by == SIGMOID:
        return fields
    return fields | {"topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def long_rope(factors: GGUFTensor, context: int, scale: float) -> dict[str, Any]:
    """Return rotary parameters with a factor for each frequency, for sequences up to `context`."""
    values = factors.tensor().tolist()
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "attention_factor": scale,
        "original_max_position_embeddings": context,
    }


def gemma_fields(name: str, get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of Gemma 2 and 3: windows, soft-caps, and the scale of scores."""
    second = name == "gemma2"
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    window = get("attention.sliding_window", GEMMA2_WINDOW if second else None)
    pattern = get("attention.sliding_window_pattern", 2 if second else 6) if window else 1
    caps = GEMMA2_CAPS if second else (None, None)
    specific = {
        "sliding_window": window,
        "layer_types": windowed_types(pattern, layers),
        "query_pre_attn_scalar": fields["hidden_size"] // heads
        if layers == WIDE_GEMMA_LAYERS[name]
        else fields["head_dim"],
        "final_logit_softcapping": get("final_logit_softcapping", caps[1]) or None,
    }
    if second:
        return specific | {"attn_logit_softcapping": get("attn_logit_softcapping", caps[0]) or None}
    near = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", ROPE_BASE)}
    return specific | {"rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": near}}


def gemma4_fields(file: GGUFFile, get: Get, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specific fields of Gemma 4, some of whose values differ from layer to layer."""
    layers, near = fields["num_hidden_layers"], get("attention.sliding_window_pattern")
    shared, size = get("attention.shared_kv_layers", 0), get("embedding_length_per_layer_input", 0)
    if not isinstance(near, list) or len(near) != layers or near[-1] or not 0 <= shared < layers:
        raise NotCovered("its last layer has a sliding window, or its layers are not named one by one")

    def by_layer(key: str) -> list[int]:
        value = fields[key]
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers:
            raise NotCovered(f"it has {key} of {len(values)} of {layers} layers")
        return values

    heads, inner, first = by_layer("num_key_value_heads"), by_layer("intermediate_size"), layers - shared
    of_near = {count for count, slides in zip(heads, near, strict=True) if slides} or {heads[-1]}
    of_far = {count for count, slides in zip(heads, near, strict=True) if not slides}
    double = shared > 0 and inner[-1] == 2 * inner[0]
    expected = [inner[0]] * first + [inner[0] * (2 if double else 1)] * shared
    if len(of_near) > 1 or len(of_far) > 1 or inner != expected:
        raise NotCovered("layers of one kind differ in key/value heads or inner sizes")
    values_are_keys = f"blk.{near.index(False)}.attn_v.weight" not in file.tensors
    if of_near != of_far and not values_are_keys:
        raise NotCovered("its layers differ in key/value heads, and have values of their own")
    tables = [tensor.shape[0] for name, tensor in file.tensors.items() if name == LAYER_INPUTS]
    if size and not tables:
        raise NotCovered(f"it lacks {LAYER_INPUTS}")
    share = 1.0
    if ROPE_FACTORS in file.tensors:
        factors = file.tensors[ROPE_FACTORS].tensor()
        share = float((factors == 1).float().mean())
        if not ((factors == 1) | (factors > 1e20)).all():
            raise NotCovered(f"its {ROPE_FACTORS} are neither 1 nor infinite")
    full = fields["rope_parameters"] | {"rope_type": "proportional", "partial_rotary_factor": share}
    return {
        "attention_k_eq_v": values_are_keys,
        "final_logit_softcapping": get("final_logit_softcapping", None) or None,
        "global_head_dim": fields["head_dim"],
        "head_dim": get("attention.key_length_swa"),
        "hidden_size_per_layer_input": size,
        "intermediate_size": inner[0],
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in near],
        "num_global_key_value_heads": of_far.pop(),
        "num_key_value_heads": of_near.pop(),
        "num_kv_shared_layers": shared,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", ROPE_BASE)},
        },
        "sliding_window": get("attention.sliding_window"),
        "use_double_wide_mlp": double,
        "vocab_size_per_layer_input": tables[0] if size else fields["vocab_size"],
    }
