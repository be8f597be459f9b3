"""Random small targets, each with a drafter of every kind. A number always makes the same model."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import tiny_tokenizer  # noqa: E402

from blockdraft import Drafter, Target, load_drafter, load_target  # noqa: E402
from blockdraft.drafters.dflash.network import DFlashNetwork  # noqa: E402
from blockdraft.drafters.dflash2.network import (
    DFlash2Config,
    DFlash2Network,  # noqa: E402
)
from blockdraft.drafters.dspark.network import (
    DSparkConfig,
    DSparkNetwork,  # noqa: E402
)
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network  # noqa: E402
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork  # noqa: E402
from blockdraft.formats import Checkpoint, find_layout  # noqa: E402
from blockdraft.formats.zlab import write_checkpoint  # noqa: E402
from blockdraft.nn.draft_config import DraftConfig, LayerAttention  # noqa: E402
from blockdraft_diffusion.flow.network import (
    FlowConfig,
    FlowNetwork,  # noqa: E402
)
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork  # noqa: E402

FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen2", "mistral", "gemma2")
MIXTURES = ("qwen3_moe", "qwen2_moe")  # of experts
HYBRIDS = ("qwen3_5_text", "granitemoehybrid", "nemotron_h", "lfm2")  # with recurrent or convolved layers
LATENT = ("deepseek_v3", "glm4_moe_lite", "deepseek_v2")  # with latent attention
# Arguments of `load_target`.
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"backend": "native", "compile": "on"},
    "uncompiled": {"backend": "native", "compile": "off"},
    "hf": {"backend": "hf"},
    "int8": {"backend": "native", "compile": "on", "quantize": "int8"},
    "int4": {"backend": "native", "compile": "on", "quantize": "int4"},
    "int8 store": {"backend": "native", "compile": "on", "kv_dtype": "int8"},
    "int4, int8 store": {"backend": "native", "compile": "on", "quantize": "int4", "kv_dtype": "int8"},
}
FEW_BITS = tuple(way for way, options in WAYS.items() if "quantize" in options)
ROUNDED = tuple(way for way, options in WAYS.items() if {"quantize", "kv_dtype"} & {*options})
COMPILED = ("compiled", *ROUNDED)
DRAFTERS = ("dflash", "dflash2", "dspark", "draft_lm", "lookup", "none")
LATER = ("eagle3", "medusa", "mtp")  # cases of which came later than seeds with the others
NEWEST = "flow"  # and later still
NETWORKS: dict[str, type[DFlashNetwork]] = {
    "dflash": DFlashNetwork,
    "dflash2": DFlash2Network,
    "dspark": DSparkNetwork,
    NEWEST: FlowNetwork,
}
TRAINED = (*NETWORKS, *LATER)  # what has a folder that is written here
MAX_CONTEXT = 512
LOUD = 7  # words
CACHED = 3  # models in memory at a time


def target_fields(number: int) -> tuple[str, dict[str, Any]]:
    """Return family and configuration of a model."""
    random, family = Random(number), FAMILIES[number % len(FAMILIES)]
    if is_mixture(number):
        family = MIXTURES[number % len(MIXTURES)]
    if is_hybrid(number):
        family = HYBRIDS[number % len(HYBRIDS)]
    if is_latent(number):
        family = LATENT[number % len(LATENT)]
    kv_heads, layers = random.randint(1, 3), random.randint(1, 4)
    whole = fits_few_bits(number)
    heads = kv_heads * random.randint(1, 4)
    fields: dict[str, Any] = {
        # With a tokenizer there may be words that it lacks.
        "vocab_size": len(tiny_tokenizer()) + random.choice((0, 7))
        if has_tokenizer(number)
        else random.randint(16, 50),
        "hidden_size": (8 if whole else 4)
        * heads
        * max(1, random.randint(5, 13) // heads),  # a multiple, on which some families insist
        "intermediate_size": random.randint(20, 90) // (8 if whole else 1) * (8 if whole else 1),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": random.choice((8, 16, 24, 32) if whole else (4, 8, 12, 16, 20, 32)),
        "max_position_embeddings": MAX_CONTEXT,
        "tie_word_embeddings": random.random() < 0.5,
        "pad_token_id": 0,
        "eos_token_id": random.randint(1, 15),
        "bos_token_id": None,
    }
    window = random.choice((3, 8, 17, 40))
    kinds = [random.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    if family == "qwen2":
        # Of this family transformers takes the size of a head from the hidden size.
        fields["hidden_size"] = heads * fields.pop("head_dim")
    if family == "mistral":
        fields["sliding_window"] = window
    if family.startswith("gemma"):
        fields |= {"sliding_window": window, "layer_types": kinds, "query_pre_attn_scalar": random.randint(4, 30)}
        fields |= {"final_logit_softcapping": random.choice((None, 5.0))}
    if family == "gemma2":
        fields["attn_logit_softcapping"] = random.choice((None, 3.0))
    if family in ("qwen2", "qwen3") and random.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if is_latent(number):
        fields |= latent_fields(number, layers)
    elif is_hybrid(number):
        fields |= hybrid_fields(number, family)
    elif is_mixture(number):
        experts = random.randint(2, 9)
        fields |= {
            "hidden_size": 16 * random.randint(1, 6),  # whole vectors, or experts are not compiled
            "moe_intermediate_size": 8 * random.randint(2, 6),
            "num_experts": experts,
            "num_experts_per_tok": random.randint(1, min(experts, 4)),
            "norm_topk_prob": random.random() < 0.5,
            "decoder_sparse_step": random.choice((1, 1, 2)),
        }
        if family == "qwen2_moe":
            fields |= {"shared_expert_intermediate_size": 8 * random.randint(2, 6), "head_dim": random.choice((8, 16))}
    return family, fields


def hybrid_fields(number: int, family: str) -> dict[str, Any]:
    """Return the fields in which a hybrid differs from an attention model of this number."""
    random = Random(f"{number} hybrid fields")
    kind, heads, groups = (
        "conv" if family == "lfm2" else "linear_attention",
        2 * random.randint(1, 3),
        random.randint(1, 2),
    )
    types = [random.choice((kind, kind, "full_attention")) for _ in range(random.randint(2, 5))]
    types[random.randrange(len(types))] = "full_attention"
    types[types.index("full_attention") - 1] = kind
    kernel, state, value = random.randint(2, 5), random.choice((8, 12, 16, 32)), random.choice((8, 16, 24))
    fields: dict[str, Any] = {"layer_types": types, "num_hidden_layers": len(types), "head_dim": random.choice((8, 16))}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": random.choice((1, 2, 4)), "hidden_size": 48}
    fields |= {"intermediate_size": 8 * random.randint(3, 9)}
    if family == "lfm2":  # heads are of the hidden size
        del fields["head_dim"]
        return fields | {"hidden_size": 64, "conv_L_cache": kernel, "block_multiple_of": 8}
    if family == "qwen3_5_text":
        fields |= {"linear_num_key_heads": groups, "linear_num_value_heads": groups * random.randint(1, 3)}
        fields |= {"linear_key_head_dim": state, "linear_value_head_dim": value, "linear_conv_kernel_dim": kernel}
    experts = number % 3 == 0
    if family == "granitemoehybrid":
        fields |= {"hidden_size": 16 * random.randint(2, 4), "mamba_expand": 1, "mamba_n_groups": groups}
        fields |= {"mamba_d_head": 8, "mamba_n_heads": fields["hidden_size"] // 8, "mamba_d_state": state}
        fields |= {"mamba_d_conv": kernel, "mamba_chunk_size": 8, "shared_intermediate_size": 40}
        fields |= {"position_embedding_type": random.choice((None, "rope")), "residual_multiplier": 0.5}
        fields |= {"num_local_experts": 4 if experts else 0, "intermediate_size": 32}
    if family == "nemotron_h":
        inner = [name for kept in types for name in (kept, random.choice(("moe", "mlp") if experts else ("mlp",)))]
        fields |= {"layers_block_type": inner, "n_groups": groups, "mamba_num_heads": heads, "mamba_head_dim": value}
        fields |= {"ssm_state_size": state, "conv_kernel": kernel, "chunk_size": 8, "time_step_min": 1e-9}
        fields |= {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24}
        fields |= {"num_hidden_layers": len(inner), "tie_word_embeddings": False}  # transformers ties none
        del fields["layer_types"]
    return fields


def latent_fields(number: int, layers: int) -> dict[str, Any]:
    """Return the fields in which a model with latent attention differs from an attention model of this number."""
    random = Random(f"{number} latent fields")
    heads, rotated = random.choice((1, 2, 4, 5)), 4 * random.randint(1, 3)
    groups, first = random.choice((1, 2, 4)), random.randint(0, layers)
    step = 8 if fits_few_bits(number) else 4
    types = ["dense"] * first + ["sparse"] * (layers - first)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale_all_dim": 0.8}
    return {
        "hidden_size": 16 * heads * random.randint(1, 2),
        "intermediate_size": 8 * random.randint(3, 9),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "kv_lora_rank": step * random.randint(2, 8),
        "q_lora_rank": random.choice((None, step * random.randint(2, 6))),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": step * random.randint(1, 4),
        "v_head_dim": step * random.randint(1, 5),
        "n_routed_experts": 8,
        "num_experts_per_tok": random.randint(1, 4),
        "n_shared_experts": random.randint(1, 2),
        "moe_intermediate_size": 8 * random.randint(2, 5),
        "n_group": groups,
        "topk_group": random.randint((groups + 1) // 2, groups),
        "topk_method": random.choice(("greedy", "group_limited_greedy")),
        "first_k_dense_replace": first,
        "mlp_layer_types": types,
        "rope_parameters": {"rope_theta": 1e4} | random.choice(({"rope_type": "default"}, yarn)),
    }


def is_latent(number: int) -> bool:
    """Return whether a model has latent attention."""
    return Random(f"{number} latent layers").random() < 0.12


def is_hybrid(number: int) -> bool:
    """Return whether a model has recurrent or convolved layers."""
    return Random(f"{number} layers").random() < 0.25 and not is_latent(number)


def is_mixture(number: int) -> bool:
    """Return whether a model is a mixture of experts."""
    return Random(f"{number} experts").random() < 0.15 and not is_latent(number)


def fits_few_bits(number: int) -> bool:
    """Return whether its weights can be quantized: rows are of whole groups then."""
    return number % 3 != 0 or is_hybrid(number)


def has_tokenizer(number: int) -> bool:
    return number // len(FAMILIES) % 2 == 1 or number % len(FAMILIES) == 0


def write_target(number: int, folder: Path, disturbed: float = 0.0) -> None:
    """Write a model's folder. `disturbed` adds noise to its weights, so that it often agrees with the original."""
    family, fields = target_fields(number)
    with torch.random.fork_rng():
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.2 * (parameter.ndim == 1), std=0.25)
        if number % 4:  # few words are likely, for drafters too, so that random draft tokens are accepted often enough
            quiet = torch.ones(fields["vocab_size"], 1)
            quiet[LOUD:] = 0.1
            model.get_output_embeddings().weight.data *= quiet
        torch.manual_seed(number + 1)
        for parameter in model.parameters():
            parameter.data += disturbed * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if has_tokenizer(number):
        tiny_tokenizer().save_pretrained(folder)


def write_eagle3(number: int, folder: Path) -> None:
    """Write a random EAGLE-3 drafter for a model, whose vocabulary is the loud words and some others."""
    random, (_, fields) = Random(f"{number} eagle3"), target_fields(number)
    kv_heads, target_layers, size = random.randint(1, 2), fields["num_hidden_layers"], fields["vocab_size"]
    vocabulary = sorted({*range(LOUD), *random.sample(range(size), random.randint(1, size))})
    norm = random.choice(("", "fc_norm", "norm_before_fc"))
    config = Eagle3Config(
        hidden_size=fields["hidden_size"],
        intermediate_size=random.randint(20, 90),
        num_attention_heads=kv_heads * random.randint(1, 3),
        num_key_value_heads=kv_heads,
        head_dim=random.choice((4, 8, 12, 16)),
        vocab_size=size,
        draft_vocab_size=len(vocabulary),
        target_layers=tuple(random.sample(range(target_layers), random.randint(1, target_layers))),
        num_target_layers=target_layers,
        block_size=random.randint(2, 12),
        max_position_embeddings=MAX_CONTEXT,
        norm_before_residual=random.random() < 0.5,
        norm_output=random.random() < 0.5,
        **{norm: True} if norm else {},
    )
    with torch.random.fork_rng():
        torch.manual_seed(number)
        network = Eagle3Network(config)
        network.keep(torch.tensor(vocabulary))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
            network.lm_head.weight[LOUD:] *= 0.1  # as in the targets
    find_layout("eagle3").write(folder, Checkpoint(config, network.state_dict()))


def write_drafter(number: int, kind: str, folder: Path) -> None:
    """Write a random drafter of the DFlash family for a model."""
    random, (_, fields) = Random(f"{number} {kind}"), target_fields(number)
    kv_heads, layers = random.randint(1, 2), random.randint(1, 2)
    target_layers = fields["num_hidden_layers"]
    window, causal = random.choice((5, 30)), random.choice((False, False, True, "where it slides"))
    sliding = [random.random() < 0.5 for _ in range(layers)]
    attention = [
        LayerAttention(s if causal == "where it slides" else bool(causal), window if s else None) for s in sliding
    ]
    values: dict[str, Any] = {
        "hidden_size": fields["hidden_size"],
        "intermediate_size": random.randint(20, 90),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * random.randint(1, 3),
        "num_key_value_heads": kv_heads,
        "head_dim": random.choice((4, 8, 12, 16)),
        "vocab_size": fields["vocab_size"],
        "block_size": random.randint(2, 12),
        "mask_token_id": 3,  # of the tokenizer
        "target_layers": tuple(random.sample(range(target_layers), random.randint(1, target_layers))),
        "num_target_layers": target_layers,
        "rope_theta": 10000.0,
        "layers": tuple(attention),
        "max_position_embeddings": MAX_CONTEXT,
    }
    config: DraftConfig
    if kind == "dflash2":
        more = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": random.randint(1, 8)}
        config = DFlash2Config(**values, **more)
    elif kind == "dspark":
        config = DSparkConfig(**values, markov_rank=4)
    elif kind == NEWEST:
        config = FlowConfig(**values, noise_std=random.uniform(0.1, 3), diffusion_steps=random.randint(1, 3))
    else:
        config = DraftConfig(**values)
    with torch.random.fork_rng():
        torch.manual_seed(number)
        network = NETWORKS[kind](config)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    write_checkpoint(folder, config, network.state_dict())


def write_heads(number: int, kind: str, folder: Path) -> None:
    """Write random heads on the last hidden state of a model."""
    random, (_, fields) = Random(f"{number} {kind}"), target_fields(number)
    names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_hidden_layers"}
    values: dict[str, Any] = {name: fields[theirs] for name, theirs in names.items()}
    config: Any
    if kind == "medusa":
        values |= {"num_heads": random.randint(1, 6), "num_layers": random.randint(1, 2)}
        config = MedusaConfig(**values, shared_head=random.random() < 0.5)
    else:
        kv_heads = random.randint(1, 2)
        values |= {"num_attention_heads": kv_heads * random.randint(1, 3), "num_key_value_heads": kv_heads}
        values |= {"intermediate_size": random.randint(20, 90), "head_dim": random.choice((4, 8, 12, 16))}
        values |= {"block_size": random.randint(2, 7)}
        config = MTPConfig(**values, normed_feedback=random.random() < 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(number)
        network = MedusaNetwork(config) if kind == "medusa" else MTPNetwork(config)
        tensors = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in network.state_dict().items()}
    find_layout(kind).write(folder, Checkpoint(config, tensors))


class Models:
    """Targets and drafters, made when first asked for.

    Args:
        folder: Where their checkpoints are put.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target = lru_cache(maxsize=CACHED * len(WAYS))(self._target)
        self.drafter = lru_cache(maxsize=CACHED * len(WAYS) * len(DRAFTERS))(self._drafter)
        self.reference = lru_cache(maxsize=CACHED)(self._reference)

    def _path(self, number: int, kind: str) -> Path:
        path = self._folder / f"{number}-{kind}"
        if not path.exists():
            if kind == "eagle3":
                write_eagle3(number, path)
            elif kind in NETWORKS:
                write_drafter(number, kind, path)
            elif kind in LATER:
                write_heads(number, kind, path)
            else:
                write_target(number, path, 0.03 if kind == "draft_lm" else 0.0)
        return path

    def _target(self, number: int, way: str) -> Target:
        target = load_target(self._path(number, "target"), dtype="float32", device="cpu", **WAYS[way])
        assert ("compiled" in target.running) == (way in COMPILED), target.running
        return target

    def _drafter(self, number: int, way: str, kind: str) -> Drafter:
        path = self._path(number, kind) if kind == "draft_lm" or kind in TRAINED else kind
        return load_drafter(path, target=self.target(number, way))

    def _reference(self, number: int) -> Any:
        """Return the model as transformers runs it."""
        return AutoModelForCausalLM.from_pretrained(self._path(number, "target"), dtype=torch.float32).eval()
