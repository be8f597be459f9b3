"""transformers' `generate`: plain, with a static cache and torch.compile, and with each of its ways to speculate."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from serve import Answer, Clock, Missing, Request, serve
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache, StoppingCriteria

LOOKUP_TOKENS = 10  # as transformers' documentation has it
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
OTHERS = ("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "layer_types", "hidden_act")
SHARED = (*SIZES, *OTHERS, "sliding_window")  # fields of a drafter's configuration that transformers' class has, too
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


class Steps(StoppingCriteria):
    """Stops nothing; `generate` calls it after each step."""

    def __init__(self, prompt_length: int) -> None:
        self.clock = Clock()
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.clock.step(input_ids.size(1) - self.prompt_length)
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)


def as_assistant(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load a DFlash checkpoint of z-lab's layout into the one drafter class of transformers."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    scaled = [config.get(key, 1.0) for key in ("input_embedding_scale", "output_multiplier")]
    if config["architectures"] != ["DFlashDraftModel"] or scaled != [1.0, 1.0] or config.get("final_logit_softcapping"):
        raise Missing("transformers' drafter class has no place for this drafter's convolutions, scales or soft-caps")
    drafter = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{key: config[key] for key in SHARED if config.get(key) is not None},
            block_size=own.get("block_size", config["block_size"]),
            mask_token_id=own["mask_token_id"],
            target_layer_ids=own["target_layer_ids"],
        )
    )
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in tensors.items()})
    return drafter.to(dtype).eval()


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    dtype, device = getattr(torch, settings["dtype"]), settings["device"]
    mode = settings["options"]["mode"]
    if mode == "assistant" and settings["assistant"] is None:
        raise Missing("no smaller model with the target's tokens is at hand (--assistant DIR)")

    def causal(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    model, extra, static = causal(settings["target"]), dict[str, Any](), None
    if mode == "compiled":
        static = StaticCache(model.config, max_cache_len=settings["max_length"])
        # By itself transformers compiles on accelerators only; this is its own switch to do so on a CPU.
        compiling = CompileConfig(mode="default", dynamic=False)
        compiling._compile_all_devices = True
        extra = {"past_key_values": static, "compile_config": compiling}
    elif mode == "lookup":
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    elif mode == "assistant":
        extra = {"assistant_model": causal(settings["assistant"])}
    elif mode == "dflash":
        drafter = as_assistant(Path(settings["drafter"]), dtype).to(device)
        extra = {"assistant_model": drafter, "speculation_type": "dflash"}
    elif mode != "plain":
        raise Missing(f"transformers has no class for drafters of the kind {mode}")

    def decode(request: Request) -> Answer:
        prompt = torch.tensor([request["prompt"]], device=model.device)
        steps = Steps(prompt.size(1))
        with torch.inference_mode():
            if static is not None:
                static.reset()
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

    def decode_many(request: Request) -> Answer:
        """Decode one batch of prompts, padded on the left."""
        began, longest = time.perf_counter(), max(map(len, request["prompts"]))
        padding = request["stops"][0]
        prompts = [[padding] * (longest - len(each)) + list(each) for each in request["prompts"]]
        seen = [[0] * (longest - len(each)) + [1] * len(each) for each in request["prompts"]]
        output = model.generate(
            torch.tensor(prompts, device=model.device),
            attention_mask=torch.tensor(seen, device=model.device),
            max_new_tokens=request["max_new_tokens"],
            do_sample=False,
            eos_token_id=request["stops"],
            pad_token_id=padding,
        )[:, longest:]
        ended = torch.isin(output, torch.tensor(request["stops"], device=model.device))
        # Tokens up to the first stop, itself included.
        tokens = int(((ended.cumsum(1) - ended.long()) == 0).sum())
        return {"tokens": tokens, "seconds": time.perf_counter() - began}

    @cache
    def exact() -> Any:
        """Return the same weights in float32."""
        return causal(settings["target"]).float()

    def margin(request: Request) -> Answer:
        with torch.inference_mode():
            logits = exact()(torch.tensor([request["tokens"]], device=device)).logits[0, -1]
        one, other = request["ids"]
        return {"margin": float(logits[one] - logits[other])}

    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    functions = {"decode": decode, "margin": margin}
    return about, functions | ({"decode_many": decode_many} if mode == "plain" else {})


if __name__ == "__main__":
    serve(load)
