"""Layouts of DFlash v1 and of flow maps: their architectures and tensor shapes."""

from __future__ import annotations

from blockdraft.drafters.flow.network import TIME_FEATURES, FlowConfig
from blockdraft.formats.architectures import Architecture, LlamaCpp, Shapes, Speculator
from blockdraft.nn.draft_config import DraftConfig


def dflash_shapes(config: DraftConfig) -> Shapes:
    """Return the tensor shapes of DFlash v1: 11 tensors per layer (15 with biases) and 3 more."""
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
    top = {
        "fc.weight": (hidden, len(config.target_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return top | {f"layers.{i}.{name}": layer[name] for i in range(config.num_hidden_layers) for name in layer}


DFLASH = Architecture(
    ("DFlashDraftModel",),
    DraftConfig,
    dflash_shapes,
    speculator=Speculator("dflash", "DFlashSpeculator"),
    llama_cpp=LlamaCpp("draft-dflash"),
    vllm="dflash",
    sglang="DFLASH",
    tensorrt_llm="DFlash",
    openvino=True,
)


def flow_shapes(config: FlowConfig) -> Shapes:
    """Return the shapes of DFlash v1, and of one projection each for states and times."""
    hidden = config.hidden_size
    return dflash_shapes(config) | {
        "state_proj.weight": (hidden, hidden),
        "time_proj.weight": (hidden, TIME_FEATURES),
    }


# No other engine reads flow maps.
FLOW = Architecture(("FlowMapDraftModel",), FlowConfig, flow_shapes, ("noise_std", "diffusion_steps"))

ARCHITECTURES = (DFLASH, FLOW)
