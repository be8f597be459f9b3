"""Writes small models of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, TokenType
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}  # the others are named by their model_type
INTERLEAVED = ("llama", "granite", "granitehybrid", "mistral3", "nemotron_h", "nemotron_h_moe", "smollm3")
# Offset and number of the float16 factors in a block; the default is one at the beginning.
FACTORS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2)}
FACTORS |= {"Q6_K": (208, 1), "TQ1_0": (52, 1), "TQ2_0": (64, 1)}
ROUNDED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # types that the gguf package quantizes
SMALL_PARTS = ("gate_inp", "conv1d", "shortconv.conv", "ssm_norm", ".bias")  # in names of tensors that stay in F32


def random_blocks(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of a matrix of random codes in a type quantized, `[outputs, bytes]`, of numbers of about
    0.1 in size."""
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = random.integers(121, 124, raw.shape[:2])  # exponents
    elif kind == "NVFP4":
        raw[..., :4] = random.integers(1, 32, (*raw.shape[:2], 4))
    elif kind == "IQ1_M":  # the factor's parts are the highest bits of four words
        factors = random.uniform(-0.03, 0.03, raw.shape[:2]).astype("<f2").view(np.uint16)
        parts = factors[..., None] >> np.array([0, 4, 8, 12], dtype=np.uint16) & 15
        raw[..., 49::2] = raw[..., 49::2] & 15 | parts.astype(np.uint8) << 4
    else:
        place, count = FACTORS.get(kind, (0, 1))
        factors, own = random.uniform(-1, 1, (*raw.shape[:2], count)), raw[..., place : place + 2 * count]
        own[:] = factors.astype("<f2").view(np.uint8)
        size_of_ones = np.abs(gguf.dequantize(raw.reshape(shape[0], -1), GGMLQuantizationType[kind])).mean()
        own[:] = (factors * 0.1 / size_of_ones).astype("<f2").view(np.uint8)
    return raw.reshape(shape[0], -1)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return queries or keys in the row order of the llama architecture: rows half a head apart become neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: Mapping[str, str] | str = "F32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    pre: str = "qwen2",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    shard_tensors: int = 0,
    splits_experts: bool = False,
    arch: str | None = None,
) -> None:
    """Write a model.

    Args:
        kinds: Type of the matrices, or of those whose names in the file hold a key; the rest are F32.
        pre: `tokenizer.ggml.pre`.
        metadata: More values, by keys without the architecture; None leaves one out.
        extra: More tensors.
        shard_tensors: Of one part, where the file is to be split.
        splits_experts: Whether gate and up projections of Gemma 4's experts are two tensors.
        arch: Architecture, if it is another than the usual one of the model.
    """
    config: Any = model.config
    arch = arch or ARCHITECTURES.get(config.model_type, config.model_type)
    if arch == "nemotron_h_moe" and "moe" not in config.layer_types:
        arch = "nemotron_h"
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard_tensors)
    sizes = config.to_dict() if arch == "gemma4" else vars(config)  # they differ from layer to layer
    head_dim = sizes.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner_sizes(config),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        **(metadata or {}),
    }
    for key, value in values.items():
        if value is not None:
            {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }[type(value)](f"{arch}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size, pre)
    names = gguf.get_tensor_name_map(writer_arch(arch), config.num_hidden_layers)
    for name, tensor in in_files(model):
        theirs = names.get_name(name, (".weight", ".bias", ".scale"))
        if theirs is None or (theirs == "output.weight" and config.tie_word_embeddings):
            continue
        data = tensor.float().numpy()
        if arch in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            data = permuted(data, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            data = data + 1
        parts = {theirs: data}
        if splits_experts and "gate_up_exps" in theirs:
            halves = zip(("gate", "up"), np.split(data, 2, axis=1), strict=True)
            parts = {theirs.replace("gate_up", part): half for part, half in halves}
        for own, part in parts.items():
            add_tensor(writer, own, part, kind_of(own, part, kinds))
    for name, data in (extra or {}).items():
        add_tensor(writer, name, data, kind_of(name, data, kinds))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added to a writer, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def inner_sizes(config: Any) -> int | list[int] | None:
    """Return the inner size of all layers, or of each one if they differ, or None if all have experts alone."""
    size: int | None = getattr(config, "intermediate_size", None)
    shared = config.num_kv_shared_layers if getattr(config, "use_double_wide_mlp", False) else 0
    if size is None:
        return None
    return [size] * (config.num_hidden_layers - shared) + [2 * size] * shared if shared else size


def kind_of(name: str, data: np.ndarray, kinds: Mapping[str, str] | str) -> str:
    if data.ndim < 2 or data.shape[-1] == 1 or any(part in name for part in SMALL_PARTS):
        return "F32"
    return kinds if isinstance(kinds, str) else next((kind for part, kind in kinds.items() if part in name), "F32")


def in_files(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with the names and shapes of llama.cpp's converter."""
    for name, tensor in model.state_dict().items():
        if model.config.model_type.startswith("qwen3_5"):
            name, tensor = as_qwen35(model.config, name, tensor)
        if model.config.model_type == "qwen3_next":
            if "in_proj_qkvz" in name:
                yield from as_qwen3_next(model.config, name, tensor)
                continue
            plus_one = name.endswith("norm.weight") and "linear_attn" not in name
            tensor = -tensor.exp() if name.endswith("A_log") else tensor + 1 if plus_one else tensor
            name = name.replace(".dt_bias", ".dt_proj.bias")
        if model.config.model_type == "gpt_oss":
            yield from as_gpt_oss(name, tensor)
            continue
        if hasattr(model.config, "kv_lora_rank"):
            name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
            if "kv_b_proj" in name:
                yield from as_latent(model.config, name, tensor)
                continue
        if "mamba_n_heads" in vars(model.config) or model.config.model_type == "nemotron_h":
            yield from with_mamba2(model.config, name, tensor)
            continue
        name = name.replace(".expert_bias", ".expert_bias.bias").replace(".layer_scalar", ".layer_scalar.weight")
        name = name.replace(".router.scale", ".router.proj.scale")
        name = name.replace(".router.per_expert_scale", ".experts.down_proj.scale")
        if name.endswith("experts.gate_up_proj") and model.config.model_type != "gemma4_text":
            gate, up = tensor.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            of_experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            yield name + (".weight" if of_experts else ""), tensor.squeeze()


def as_gpt_oss(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of gpt-oss as in files: gate and up projections apart, outputs before inputs."""
    stem, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    kind = "bias" if is_bias else "weight"
    if stem.endswith("experts.gate_up_proj"):
        for own, first in (("gate_proj", 0), ("up_proj", 1)):
            part = tensor[..., first::2]
            yield f"{stem.replace('gate_up_proj', own)}.{kind}", part if is_bias else part.mT
    elif stem.endswith("experts.down_proj"):
        yield f"{stem}.{kind}", tensor if is_bias else tensor.mT
    else:
        yield name + (".weight" if name.endswith(".sinks") else ""), tensor


def as_qwen35(config: Any, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return a tensor of Qwen3.5 as in files: value heads interleaved by key head, decays, norms plus one."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, tensor + 1
    if "linear_attn" not in name or "linear_attn.norm" in name:
        return name, tensor
    dimension = 1 if "out_proj" in name else 0
    size = config.linear_value_head_dim if any(part in name for part in ("qkv", "conv1d", "_z", "out_proj")) else 1
    order = torch.arange(values * size).view(keys, -1, size).transpose(0, 1).reshape(-1)
    before = tensor.size(dimension) - len(order)  # queries and keys
    tensor = tensor.index_select(dimension, torch.cat([torch.arange(before), before + order]))
    if name.endswith("A_log"):
        return name, -tensor.exp()
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def as_qwen3_next(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the projections of a delta net of Qwen3-Next as in files: key heads apart only in the gates."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = tensor.view(heads, -1, tensor.size(1)).split([keys, keys, values, values], dim=1)
    queries, keys_of, values_of, gates = (part.flatten(0, 1) for part in parts)
    place = name.removesuffix("in_proj_qkvz.weight")
    yield f"{place}in_proj_qkv.weight", torch.cat([queries, keys_of, values_of])
    yield f"{place}in_proj_z.weight", gates


def as_latent(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the two parts of the projection to keys and values as in files, by head, and the first transposed."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = tensor.view(config.num_attention_heads, sum(sizes), -1).split(sizes, dim=1)
    yield name.replace("kv_b", "k_b"), keys.mT.contiguous()
    yield name.replace("kv_b", "v_b"), values.contiguous()


def with_mamba2(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of Granite 4 or Nemotron-H as in files."""
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    part = name.rpartition(".")[2]
    if part == "A_log":
        tensor = -tensor.exp()
    if part in ("A_log", "D"):
        tensor = tensor.unsqueeze(-1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.view(groups, -1)
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".e_score_correction_bias", ".e_score_correction.bias")
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.") + ".weight"
        yield name, tensor.squeeze() if "conv1d" in name else tensor
        return
    place, _, part = name.partition("block_sparse_moe.")
    mlp = f"{place}mlp.experts." if part else ""
    if ".shared_mlp." in name:
        place, _, part = name.partition("shared_mlp.")
        mlp = f"{place}mlp.shared_expert." if config.num_local_experts else f"{place}mlp."
    if part in ("experts.gate_up_proj", "input_linear.weight"):
        gate, up = tensor.chunk(2, dim=-2)
        yield from ((f"{mlp}gate_proj.weight", gate), (f"{mlp}up_proj.weight", up))
    elif mlp and part != "router.weight":
        yield f"{mlp}down_proj.weight", tensor
    else:
        name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
        yield name, tensor.squeeze() if "conv1d" in name else tensor


def writer_arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)


def add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if kind not in ROUNDED:
        raw = random_blocks(kind, (data.size // data.shape[-1], data.shape[-1]), len(name))
        raw = raw.reshape(*data.shape[:-1], -1)
    else:
        raw = gguf.quantize(np.ascontiguousarray(data), number)
    writer.add_tensor(name, raw, raw_dtype=number)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int, pre: str) -> None:
    """Add a byte-level tokenizer. Ids beyond its vocabulary are padding tokens."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    added = tokenizer.added_tokens_decoder
    spelled = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [spelled.get(i, f"[PAD{i}]") for i in range(size)]
    types = [
        (TokenType.CONTROL if added[i].special else TokenType.USER_DEFINED)
        if i in added
        else TokenType.NORMAL
        if i in spelled
        else TokenType.UNUSED
        for i in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    for name in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def tiny(config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a random transformers model with norm weights that differ.

    NumPy draws the weights: torch's normal numbers differ in their last bits between processors. Decays of recurrent
    layers keep the logarithms that transformers draws, to which a part is added.
    """
    from transformers import AutoModelForCausalLM

    random = np.random.default_rng(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            drawn = torch.from_numpy(random.standard_normal(weight.shape, dtype=np.float32))
            if weight.ndim == 1:
                weight += 0.2 * drawn
            else:
                weight.copy_(config.initializer_range * drawn)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "layer_scalar", "e_score_correction_bias")):
                buffer += 0.2 * torch.from_numpy(random.standard_normal(buffer.shape, dtype=np.float32))
    return model.eval()
