"""mistral.rs, plain. It takes and gives text, so tokens go through the tokenizer's file, and times are its own."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

SETTINGS = json.loads(sys.argv[1])
os.environ["RAYON_NUM_THREADS"] = str(SETTINGS["threads"])  # before its threads are there
if SETTINGS["dtype"] == "float32":
    os.environ["MISTRALRS_CPU_KV_F32"] = "1"  # else its keys and values are in 16 bits

from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which  # noqa: E402
from serve import Answer, Missing, Request, serve  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

DTYPES = {"float32": ModelDType.F32, "bfloat16": ModelDType.BF16, "float16": ModelDType.F16}
FAMILIES = {"llama": Architecture.Llama, "qwen3": Architecture.Qwen3}


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    target = Path(settings["target"])
    config = json.loads((target / "config.json").read_text())
    if "rope_theta" not in config:  # as transformers 5 writes it
        raise Missing("its configuration has no rope_theta at the top level")
    if (family := config["model_type"]) not in FAMILIES:
        raise Missing(f"the adapter names no class of mistral.rs for {family}")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    which = Which.Plain(str(target), arch=FAMILIES[family], dtype=DTYPES[settings["dtype"]])
    runner = Runner(which, max_seqs=1, prefix_cache_n=0)

    def decode(request: Request) -> Answer:
        prompt = tokenizer.decode(request["prompt"], skip_special_tokens=False)
        asked = CompletionRequest(prompt, "default", max_tokens=request["max_new_tokens"], temperature=0.0, top_k=1)
        done = runner.send_completion_request(asked)
        tokens = tokenizer.encode(done.choices[0].text, add_special_tokens=False).ids
        if done.choices[0].finish_reason == "stop":
            tokens += request["stops"][:1]
        return {
            "tokens": tokens,
            "first": 1,
            "steps": len(tokens) - 1,
            "prefill_seconds": done.usage.total_prompt_time_sec,
            "decode_seconds": done.usage.total_completion_time_sec,
        }

    return {"mistralrs": version("mistralrs")}, {"decode": decode}


if __name__ == "__main__":
    serve(load)
