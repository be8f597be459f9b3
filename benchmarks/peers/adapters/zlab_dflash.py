"""z-lab's package `dflash`, with its own decoding loop."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflash.model as dflash
import torch
import transformers
from serve import Answer, Request, serve
from transformers import AutoModelForCausalLM


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    if settings["device"] == "cpu":
        dflash._cuda_time = time.perf_counter  # its timer asks for a GPU
    [architecture] = json.loads((Path(settings["drafter"]) / "config.json").read_text())["architectures"]
    drafter = getattr(dflash, architecture).from_pretrained(settings["drafter"], dtype=dtype)
    drafter = drafter.to(settings["device"]).eval()
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype).to(settings["device"]).eval()

    def decode(request: Request) -> Answer:
        prompt = torch.tensor([request["prompt"]], device=model.device)
        done = dflash.dflash_generate(
            drafter, model, prompt, request["max_new_tokens"], request["stops"], return_stats=True
        )
        return {
            "tokens": done.output_ids[0, prompt.size(1) :].tolist(),
            "first": 1,
            "steps": len(done.acceptance_lengths),
            "prefill_seconds": done.time_to_first_token,
            "decode_seconds": done.time_per_output_token * done.num_output_tokens,
        }

    names = ("dflash", "torch", "transformers")
    return {name: version(name) for name in names}, {"decode": decode}


if __name__ == "__main__":
    serve(load)
