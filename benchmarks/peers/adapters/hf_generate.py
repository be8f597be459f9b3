"""transformers' `generate`: plain, with a static cache and torch.compile, and with each of its ways to speculate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from serve import Answer, Clock, Missing, Request, serve
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache, StoppingCriteria

LOOKUP_TOKENS = 10  # as transformers' documentation has it


class Steps(StoppingCriteria):
    """Stops nothing; `generate` calls it after each step."""

    def __init__(self, prompt_length: int) -> None:
        self.clock = Clock()
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.clock.step(input_ids.size(1) - self.prompt_length)
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)


def as_assistant(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A DFlash checkpoint in z-lab's layout as the only drafter class that transformers has for it."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    scaled = [config.get(key, 1.0) for key in ("input_embedding_scale", "output_multiplier")]
    if config["architectures"] != ["DFlashDraftModel"] or scaled != [1.0, 1.0] or config.get("final_logit_softcapping"):
        raise Missing("transformers' drafter class has no place for this drafter's convolutions, scales or soft-caps")
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shared += (
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
        "layer_types",
        "hidden_act",
        "sliding_window",
    )
    drafter = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{key: config[key] for key in shared if config.get(key) is not None},
            block_size=own.get("block_size", config["block_size"]),
            mask_token_id=own["mask_token_id"],
            target_layer_ids=own["target_layer_ids"],
        )
    )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({renamed.get(name, name): tensor for name, tensor in tensors.items()})
    return drafter.to(dtype).eval()


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    mode = settings["options"]["mode"]
    if mode == "assistant" and settings["assistant"] is None:
        raise Missing("no smaller model with the target's tokens is at hand (--assistant DIR)")
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype).to(settings["device"]).eval()
    extra: dict[str, Any] = {}
    cache = None
    if mode == "compiled":
        cache = StaticCache(model.config, max_cache_len=settings["max_length"])
        # By itself transformers compiles on accelerators only; this is its own switch to do so on a CPU.
        compiling = CompileConfig(mode="default", dynamic=False)
        compiling._compile_all_devices = True
        extra = {"past_key_values": cache, "compile_config": compiling}
    elif mode == "lookup":
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    elif mode == "assistant":
        assistant = AutoModelForCausalLM.from_pretrained(settings["assistant"], dtype=dtype)
        extra = {"assistant_model": assistant.to(settings["device"]).eval()}
    elif mode == "dflash":
        drafter = as_assistant(Path(settings["drafter"]), dtype).to(settings["device"])
        extra = {"assistant_model": drafter, "speculation_type": "dflash"}
    exact: list[Any] = []  # the same weights in float32, for margins; made when first asked for

    def decode(request: Request) -> Answer:
        prompt = torch.tensor([request["prompt"]], device=model.device)
        steps = Steps(prompt.size(1))
        with torch.inference_mode():
            if cache is not None:
                cache.reset()
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["max_new_tokens"],
                do_sample=False,
                eos_token_id=request["stops"],
                pad_token_id=request["stops"][0],
                stopping_criteria=[steps],
                **extra,
            )
        return steps.clock.answer(output[0, prompt.size(1) :].tolist())

    def margin(request: Request) -> Answer:
        if not exact:
            weights = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype)
            exact.append(weights.float().to(settings["device"]).eval())
        with torch.inference_mode():
            logits = exact[0](torch.tensor([request["tokens"]], device=settings["device"])).logits[0, -1]
        one, other = request["ids"]
        return {"margin": float(logits[one] - logits[other])}

    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    return about, {"decode": decode, "margin": margin}


if __name__ == "__main__":
    serve(load)
