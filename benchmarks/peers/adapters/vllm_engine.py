"""vLLM for CPUs, by its engine's steps: plain, or with DFlash."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine in this process, and a little memory for keys and values, in GiB.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}

from serve import Answer, Clock, Request, serve  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    drafts: dict[str, Any] | None = None
    if settings["options"].get("dflash"):
        config = json.loads((Path(settings["drafter"]) / "config.json").read_text())
        drafts = {"method": "dflash", "model": settings["drafter"], "num_speculative_tokens": config["block_size"] - 1}
    engine = LLM(
        settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=drafts,
    ).llm_engine
    asked = 0

    def decode(request: Request) -> Answer:
        nonlocal asked
        asked += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["stops"],
            ignore_eos=True,  # the stops name it
            detokenize=False,
        )
        clock, tokens = Clock(), list[int]()
        engine.add_request(str(asked), TokensPrompt(prompt_token_ids=request["prompt"]), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if len(output.outputs[0].token_ids) > len(tokens):
                    tokens = list(output.outputs[0].token_ids)
                    clock.step(len(tokens))
        return clock.answer(tokens)

    return {name: version(name) for name in ("vllm-cpu", "torch")}, {"decode": decode}


if __name__ == "__main__":
    serve(load)
