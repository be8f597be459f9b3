"""Layout of EAGLE-3 drafters that SafeAILab and SpecForge write and that SGLang and others read.

A folder holds config.json and pytorch_model.bin or safetensors. Target layer x is its output, 0-based, as
everywhere in this package, and so in `eagle_config`. vLLM numbers layers by their input, x + 1, and reads them at the
top level, or else those of `eagle_config`, one layer off; so both are written. A file without target layers reads the
inputs of the layers 2, T // 2 and T - 3 of a target with T layers. The drafter has its own head, for the draft
vocabulary of `t2d` and `d2t`. The embedding is the target's, though some files hold a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockdraft.drafters.eagle3.network import BLOCK_SIZE, Eagle3Config, Eagle3Network, default_target_layers
from blockdraft.formats.base import Borrowed, Checkpoint
from blockdraft.formats.folder import PICKLED, blaming, check_tensors, read_config, read_tensors, write_folder
from blockdraft.formats.starting import SGLANG, TENSORRT_LLM, VLLM, Start, sglang, tensorrt_llm, vllm
from blockdraft.formats.vocabulary import kept_tokens, vocabulary_maps
from blockdraft.formats.zlab import one_dtype, rope_of
from blockdraft.nn.draft_config import need, whole

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
PLAIN = "LlamaForCausalLM"  # name in early files, which are recognised by their draft vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
TABLE = "embed_tokens.weight"
# Fields of the configuration whose names are keys of config.json.
SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias", "hidden_act")
FLAGS = ("norm_before_residual", "norm_output")
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
        need(raw.get(key) is None or raw[key] in values, key, raw.get(key), "absent: this value is not supported")
    hidden, heads = (whole(key, raw.get(key)) for key in ("hidden_size", "num_attention_heads"))
    own = raw.get("target_hidden_size")
    need(own in (None, hidden), "target_hidden_size", own, f"hidden_size, {hidden}, the one that is supported")
    kinds = raw.get("layer_types") or ["full_attention"]
    need(kinds == ["full_attention"], "layer_types", kinds, "full_attention alone, which is what is supported")
    for key, name in NORMS.items():
        need(not raw.get(key) or name in tensors, name, None, f"among the tensors, since {key} is {raw.get(key)!r}")
    theta, scaling = rope_of(raw)
    found: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    found |= {"draft_vocab_size": raw.get("vocab_size")}
    found |= {key: raw[key] for key in (*SIZES, *FLAGS) if raw.get(key) is not None}
    found |= {} if theta is None else {"rope_theta": theta}
    found |= {key: name in tensors for key, name in NORMS.items()}
    lacking = [key for key in ("intermediate_size", "vocab_size") if key not in found]
    need(not lacking, lacking[0] if lacking else "", None, "in config.json")
    return Eagle3Config(
        **found,
        rope_scaling=None if scaling is None or scaling["rope_type"] == "default" else scaling,
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        target_layers=tuple(target_layers),
        num_target_layers=num_target_layers,
        block_size=block_size,
    )


def renamed(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a checkpoint under the network's names, without unused ones."""
    found = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    return {n: t for n, t in found.items() if n not in UNUSED and not n.endswith("rotary_emb.inv_freq")}


def checkpoint_of(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return the checkpoint of the tensors from `renamed`. Raises ValueError if they do not fit the configuration."""
    found, size, shapes = dict(tensors), config.vocab_size, tensor_shapes(config)
    t2d, d2t = (found.pop(name, None) for name in ("t2d", "d2t"))
    embedding = found.pop(TABLE, None)
    if t2d is not None:
        check_tensors({"t2d": (size,)}, {"t2d": t2d})
    if d2t is None:
        need(config.draft_vocab_size == size, "d2t", None, f"given, since draft_vocab_size is not vocab_size, {size}")
        d2t = torch.zeros(size, dtype=torch.int64)
    elif t2d is not None:
        kept_tokens(t2d, d2t)
    else:
        check_tensors({"d2t": shapes["d2t"]}, {"d2t": d2t})
        kept = d2t.long() + torch.arange(len(d2t))
        sound = bool((kept.diff() > 0).all()) and int(kept[0]) >= 0 and int(kept[-1]) < size
        need(sound, "d2t", d2t[:5].tolist(), f"offsets to tokens below {size} in ascending order")
    found["d2t"] = d2t.long()
    check_tensors(shapes, found)
    if embedding is not None:
        check_tensors({TABLE: (size, config.hidden_size)}, {TABLE: embedding})
    return Checkpoint(config, found, Borrowed(embedding, None, None))


def least_layers(ids: Sequence[Any]) -> int:
    """Return the minimum number of layers of a target that has the layers `ids`."""
    return 1 + max((i for i in ids if type(i) is int), default=0)


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of the network."""
    with torch.device("meta"):
        network = Eagle3Network(config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def written_tensors(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of the network in the form of a file, and their dtype.

    `t2d` is added. Without a draft vocabulary, both maps are left out.

    Raises:
        ValueError: They do not fit the configuration or have several dtypes.
    """
    check_tensors(tensor_shapes(config), tensors)
    found = dict(tensors)
    kept = found.pop("d2t").cpu() + torch.arange(config.draft_vocab_size)
    dtype = one_dtype(found)
    return found | (vocabulary_maps(kept, config.vocab_size) if len(kept) < config.vocab_size else {}), dtype


def check_kind(config: Any) -> None:
    """Raise a ValueError unless the configuration is an `Eagle3Config`."""
    kind = type(config)
    need(kind is Eagle3Config, "the configuration", kind.__name__, "Eagle3Config, the only one that this layout holds")


def layer_keys(config: Eagle3Config) -> dict[str, Any]:
    """Return the keys of config.json for the layers, named as in transformers' Llama."""
    values = asdict(config)
    return {
        **{key: values[key] for key in SIZES if key != "draft_vocab_size"},
        "num_hidden_layers": 1,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
    }


def config_dict(config: Any) -> dict[str, Any]:
    """Return the content of config.json. Raises ValueError if the layout cannot express the configuration."""
    check_kind(config)
    need(not config.qk_norm, "qk_norm", True, "false in this layout; export to eagle3_speculators")
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        **layer_keys(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        **{key: True for key in (*FLAGS, *NORMS) if getattr(config, key)},
        "eagle_config": {IDS: [*config.target_layers], "use_aux_hidden_state": True},
        IDS: [target_layer + 1 for target_layer in config.target_layers],
    }


def _misread_by_vllm(drafter: str) -> bool:
    """Return whether a folder has its target layers in `eagle_config` alone, as others write it."""
    raw = read_config(drafter) if Path(drafter, "config.json").is_file() else {}
    return IDS not in raw and bool((raw.get("eagle_config") or {}).get(IDS))


class EagleLayout(ABC):
    """Base of the layouts of EAGLE-3."""

    pickle = PICKLED

    @abstractmethod
    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[Eagle3Config, bool]: ...

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        raw, tensors = read_config(path), renamed(read_tensors(path))
        with blaming(Path(path, "config.json")):
            config, _ = self.config(raw, tensors, vocabulary, num_target_layers)
        with blaming(Path(path)):
            return checkpoint_of(config, tensors)


class Eagle3(EagleLayout):
    borrows = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        found = raw.get("architectures")
        names = found if isinstance(found, list) and "speculators_model_type" not in raw else []
        return any(name in ARCHITECTURES or (name == PLAIN and "draft_vocab_size" in raw) for name in names)

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[Eagle3Config, bool]:
        eagle = raw.get("eagle_config") or {}
        need(isinstance(eagle, Mapping), "eagle_config", eagle, "a JSON object")
        for key, values in EAGLE.items():
            known = eagle.get(key) is None or eagle[key] in values
            need(known, key, eagle.get(key), "absent: this value is not supported")
        ids, layers = eagle.get(IDS), num_target_layers
        if not ids and isinstance(raw.get(IDS), list):
            ids = [entered - 1 for entered in raw[IDS]]
        if not ids:
            need(
                layers is not None,
                IDS,
                None,
                "given; or name the target (--target) for the default target layers",
            )
            ids = default_target_layers(layers or 0)
        need(isinstance(ids, list | tuple), IDS, ids, "a list of target layers")
        layers = layers or least_layers(ids) + 1  # an estimate: few drafters read the last layer's output
        block_size = raw.get("block_size") or BLOCK_SIZE
        config = network_config(raw, renamed(tensors), ids, layers or 0, block_size)
        return config, num_target_layers is not None

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

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        config_dict(config)

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        raw = config_dict(checkpoint.config)
        tensors, dtype = written_tensors(checkpoint.config, checkpoint.tensors)
        write_folder(path, {**raw, "dtype": dtype}, tensors, checkpoint.trained)


LAYOUT = Eagle3()
