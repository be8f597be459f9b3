"""Layouts of EAGLE-3 drafters: that of SafeAILab and SpecForge, which SGLang and others read, and speculators' format.

`formats/speculators.py` describes the latter. In the former, a folder holds config.json and pytorch_model.bin or
safetensors. Target layer x is its output, 0-based, as everywhere in this package, and so in `eagle_config`. vLLM
numbers layers by their input, x + 1, and reads them at the top level, or else those of `eagle_config`, one layer off;
so both are written. A file without target layers reads the inputs of the layers 2, T // 2 and T - 3 of a target with T
layers. The drafter has its own head, for the draft vocabulary of `t2d` and `d2t`. The embedding is the target's, though
some files hold a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockdraft.drafters.eagle3.network import BLOCK_SIZE, Eagle3Config, Eagle3Network, default_target_layers
from blockdraft.formats.base import NO_TARGET, Borrowed, Checkpoint, DrafterTarget, Layout, Raw, check_kind
from blockdraft.formats.folder import check_tensors, read_config, write_folder
from blockdraft.formats.speculators_config import draft_tokens_text, ids_of, layer_config, named, target_layers_of
from blockdraft.formats.starting import SGLANG, TENSORRT_LLM, VLLM, Start, sglang, tensorrt_llm, vllm, vllm_alone
from blockdraft.formats.vocabulary import draft_tokens, in_order, kept_tokens, vocabulary_maps
from blockdraft.formats.zlab import one_dtype, rope_of
from blockdraft.nn.draft_config import need, whole
from blockdraft.nn.draft_network import shapes_of

ARCHITECTURE_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
PLAIN = "LlamaForCausalLM"  # name in early files, which are recognised by their draft vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
# Fields of the configuration whose names are keys of config.json.
SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias", "hidden_act")
FLAGS = ("norm_before_residual", "norm_output")
TIED = "tied_head"  # a key of our own, written where it is true
# Keys, and the tensors that come with them.
NORMS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
# Supported values of further keys; a file with any other value is refused.
INERT: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "parallel_drafting": (False,)}
INERT |= {"quantization_config": (), "partial_rotary_factor": (1, 1.0), "pretraining_tp": (1,)}
EAGLE: dict[str, tuple[Any, ...]] = {"use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,)}
EAGLE |= {"use_last_layernorm": (True,), "use_mtp_layernorm": (False,), "parallel_draft_step": (1,)}
T = TypeVar("T")
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")  # used in training only


def network_config(
    raw: Mapping[str, Any],
    tensors: Collection[str],
    target_layers: Sequence[int],
    num_target_layers: int,
    block_size: int,
) -> Eagle3Config:
    """Return a network's configuration from the keys of transformers' Llama and the tensor names that `renamed` gives.

    Raises:
        ValueError: A value is missing or unsupported.
    """
    for key, values in (INERT | {"num_hidden_layers": (1,)}).items():
        need(raw.get(key) is None or raw[key] in values, key, raw.get(key), "absent; this value is not supported")
    hidden, heads = (whole(key, raw.get(key)) for key in ("hidden_size", "num_attention_heads"))
    own = raw.get("target_hidden_size")
    need(own in (None, hidden), "target_hidden_size", own, f"hidden_size, {hidden}, the one that is supported")
    kinds = raw.get("layer_types") or ["full_attention"]
    need(kinds == ["full_attention"], "layer_types", kinds, "full_attention alone, which is what is supported")
    for key, name in NORMS.items():
        need(not raw.get(key) or name in tensors, name, None, f"among the tensors, since {key} is {raw.get(key)!r}")
    theta, scaling = rope_of(raw)
    fields: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    fields |= {"draft_vocab_size": raw.get("vocab_size")}
    fields |= {key: raw[key] for key in (*SIZES, *FLAGS, TIED) if raw.get(key) is not None}
    fields |= {} if theta is None else {"rope_theta": theta}
    fields |= {key: name in tensors for key, name in NORMS.items()}
    lacking = [key for key in ("intermediate_size", "vocab_size") if key not in fields]
    need(not lacking, lacking[0] if lacking else "", None, "in config.json")
    return Eagle3Config(
        **fields,
        rope_scaling=None if scaling is None or scaling["rope_type"] == "default" else scaling,
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        target_layers=tuple(target_layers),
        num_target_layers=num_target_layers,
        block_size=block_size,
    )


def renamed(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a checkpoint under the network's names, without unused ones."""
    ours = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    return {n: t for n, t in ours.items() if n not in UNUSED and not n.endswith("rotary_emb.inv_freq")}


def checkpoint_of(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return the checkpoint of the tensors from `renamed`. Raises ValueError if they do not fit the configuration."""
    own, size, shapes = dict(tensors), config.vocab_size, tensor_shapes(config)
    t2d, d2t = (own.pop(name, None) for name in ("t2d", "d2t"))
    embedding = own.pop(TABLE, None)
    if t2d is not None:
        check_tensors({"t2d": (size,)}, {"t2d": t2d})
    if d2t is None:
        need(config.draft_vocab_size == size, "d2t", None, f"given, since draft_vocab_size is not vocab_size, {size}")
        d2t = torch.zeros(size, dtype=torch.int64)
    own["d2t"] = d2t.long()
    check_tensors(shapes, own)
    kept = draft_tokens(d2t, size) if t2d is None else kept_tokens(t2d, d2t)
    if kept is not None:  # it may be by frequency; all else expects ascending tokens
        kept, own[HEAD] = in_order(kept, own[HEAD])
        own["d2t"] = kept - torch.arange(len(kept))
    if embedding is not None:
        check_tensors({TABLE: (size, config.hidden_size)}, {TABLE: embedding})
    return Checkpoint(config, own, Borrowed(embedding, None, None))


def least_layers(ids: Sequence[Any]) -> int:
    """Return the minimum number of layers of a target that has the layers `ids`."""
    return 1 + max((i for i in ids if type(i) is int), default=0)


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of the network."""
    return shapes_of(lambda: Eagle3Network(config))


def _default_target_layers(num_target_layers: int | None) -> tuple[int, ...]:
    known = num_target_layers is not None
    need(known, IDS, None, "given; or name the target (--target) for the default target layers")
    return default_target_layers(num_target_layers or 0)


def _layer_keys(config: Eagle3Config) -> dict[str, Any]:
    """Return the keys of config.json for the layers, named as in transformers' Llama."""
    return {
        **{key: getattr(config, key) for key in SIZES if key != "draft_vocab_size"},
        "num_hidden_layers": 1,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
    }


class EagleLayout(Layout, ABC):
    """Base of the layouts of EAGLE-3."""

    @abstractmethod
    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[Eagle3Config, bool]: ...

    @abstractmethod
    def config_dict(self, config: Eagle3Config, target: DrafterTarget) -> dict[str, Any]:
        """Return the content of config.json. Raise a UsageError if the layout cannot express the configuration."""

    def checkpoint(self, raw: Raw, config: Eagle3Config, tensors: dict[str, Tensor]) -> Checkpoint:
        return checkpoint_of(config, renamed(tensors))

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        check_kind(config, Eagle3Config)
        self.config_dict(config, target)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        config = checkpoint.config
        self.check(config, target)
        raw = self.config_dict(config, target)
        check_tensors(tensor_shapes(config), checkpoint.tensors)
        tensors = dict(checkpoint.tensors)
        kept = tensors.pop("d2t").cpu() + torch.arange(config.draft_vocab_size)
        dtype = one_dtype(tensors)
        if len(kept) < config.vocab_size:
            tensors |= vocabulary_maps(kept, config.vocab_size)
        if self.borrows:
            tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
            # A drafter that is written to be measured needs no copy; the reader of speculators 0.9 does.
            if checkpoint.borrowed is not None and checkpoint.borrowed.embedding is not None:
                tensors[TABLE] = checkpoint.borrowed.embedding.to(getattr(torch, dtype), copy=True)
        write_folder(path, {**raw, "dtype": dtype}, tensors, checkpoint.trained)


class Eagle3Layout(EagleLayout):
    def recognises(self, raw: Raw) -> bool:
        architectures = raw.get("architectures")
        names = architectures if isinstance(architectures, list) and "speculators_model_type" not in raw else []
        return any(name in ARCHITECTURE_NAMES or (name == PLAIN and "draft_vocab_size" in raw) for name in names)

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[Eagle3Config, bool]:
        eagle = raw.get("eagle_config") or {}
        need(isinstance(eagle, Mapping), "eagle_config", eagle, "a JSON object")
        for key, values in EAGLE.items():
            known = eagle.get(key) is None or eagle[key] in values
            need(known, key, eagle.get(key), "absent; this value is not supported")
        ids = eagle.get(IDS)
        if not ids and isinstance(raw.get(IDS), list):
            ids = [entered - 1 for entered in raw[IDS]]
        ids = ids or _default_target_layers(target.num_layers)
        need(isinstance(ids, list | tuple), IDS, ids, "a list of target layers")
        layers = target.num_layers or least_layers(ids) + 1  # an estimate: few drafters read the last layer's output
        config = network_config(raw, renamed(tensors), ids, layers, raw.get("block_size") or BLOCK_SIZE)
        return config, target.num_layers is not None

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        draft_tokens, layers = config.block_size - 1, config.num_target_layers
        usual = layers >= 7 and config.target_layers == default_target_layers(layers)
        target_layers = {} if usual else {"eagle3_layers_to_capture": [*config.target_layers]}
        chain = {"--speculative-num-steps": draft_tokens, "--speculative-eagle-topk": 1}
        start = vllm(target, "eagle3", drafter, draft_tokens)
        if _misread_by_vllm(drafter):
            start = Start(None, "it reads target layers that are in eagle_config alone one layer off", export("eagle3"))
        return {
            VLLM: start,
            SGLANG: sglang(target, "EAGLE3", drafter, config.block_size, chain),
            TENSORRT_LLM: tensorrt_llm(target, "Eagle3", drafter, draft_tokens, target_layers),
        }

    def config_dict(self, config: Eagle3Config, target: DrafterTarget) -> dict[str, Any]:
        need(not config.qk_norm, "qk_norm", True, "false in this layout; export to eagle3_speculators")
        return {
            "architectures": [ARCHITECTURE_NAMES[0]],
            "model_type": "llama",
            **_layer_keys(config),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.hidden_size,
            "block_size": config.block_size,
            **{key: True for key in (*FLAGS, *NORMS, TIED) if getattr(config, key)},
            "eagle_config": {IDS: [*config.target_layers], "use_aux_hidden_state": True},
            IDS: [target_layer + 1 for target_layer in config.target_layers],
        }


def _misread_by_vllm(drafter: str) -> bool:
    """Return whether a folder has its target layers in `eagle_config` alone, as others write it."""
    raw = read_config(drafter) if Path(drafter, "config.json").is_file() else {}
    return IDS not in raw and bool((raw.get("eagle_config") or {}).get(IDS))


class Eagle3Speculators(EagleLayout):
    borrows = True

    def recognises(self, raw: Raw) -> bool:
        return raw.get("speculators_model_type") == "eagle3"

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[Eagle3Config, bool]:
        ids, layers = raw.get(IDS), target.num_layers or 0
        if ids is None:
            target_layers = _default_target_layers(target.num_layers)
        else:
            layers = layers or least_layers(ids if isinstance(ids, list) else ())
            target_layers = target_layers_of(raw, IDS, layers)
        own = {key: raw.get(key) for key in (*FLAGS, *NORMS, TIED, "draft_vocab_size", "target_hidden_size")}
        keys = {**layer_config(raw.get("transformer_layer_config")), **own}
        # The file states how many draft tokens paid in training, but the drafter can always draft `BLOCK_SIZE` - 1.
        draft_tokens = whole("speculative_tokens", draft_tokens_text(raw) or 0, minimum=0)
        block_size = max(BLOCK_SIZE, 1 + draft_tokens)
        config = network_config(keys, renamed(tensors), target_layers, layers, block_size)
        return config, target.num_layers is not None

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        other = Start(None, "it reads SafeAILab's layout", None if config.qk_norm else export("eagle3"))
        return {VLLM: vllm_alone(drafter), SGLANG: other, TENSORRT_LLM: other}

    def config_dict(self, config: Eagle3Config, target: DrafterTarget) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Speculator"],
            **named("eagle3", config.block_size - 1, target),
            "transformer_layer_config": {"model_type": "qwen3" if config.qk_norm else "llama", **_layer_keys(config)},
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.hidden_size,
            IDS: ids_of(config),
            **{key: getattr(config, key) for key in (*FLAGS, *NORMS)},
            **({TIED: True} if config.tied_head else {}),
            "tie_word_embeddings": False,
            "embed_requires_grad": False,
        }


LAYOUT, SPECULATORS = Eagle3Layout(), Eagle3Speculators()
