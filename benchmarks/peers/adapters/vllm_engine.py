"""vLLM for CPUs, by its engine's steps: plain, or with a drafter."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine in this process, and a little memory for keys and values, in GiB.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}

from serve import Answer, Clock, Request, serve  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    drafts: dict[str, Any] | None = None
    if settings["options"].get("drafts"):
        config = json.loads((Path(settings["drafter"]) / "config.json").read_text())
        drafts = {"model": settings["drafter"], "num_speculative_tokens": config["block_size"] - 1}
        drafts["method"] = settings["kind"]
    engine = LLM(
        settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=max(1, settings["at_once"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=drafts,
    ).llm_engine
    asked = count()

    def add(prompt: list[int], request: Request) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["stops"],
            ignore_eos=True,  # the stops name it
            detokenize=False,
        )
        engine.add_request(str(next(asked)), TokensPrompt(prompt_token_ids=prompt), params)

    def decode(request: Request) -> Answer:
        clock, tokens = Clock(), list[int]()
        add(request["prompt"], request)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if len(output.outputs[0].token_ids) > len(tokens):
                    tokens = list(output.outputs[0].token_ids)
                    clock.step(len(tokens))
        return clock.answer(tokens)

    def decode_many(request: Request) -> Answer:
        began, lengths = time.perf_counter(), dict[str, int]()
        for prompt in request["prompts"]:
            add(prompt, request)
        while engine.has_unfinished_requests():
            lengths |= {each.request_id: len(each.outputs[0].token_ids) for each in engine.step()}
        return {"tokens": sum(lengths.values()), "seconds": time.perf_counter() - began}

    return {name: version(name) for name in ("vllm-cpu", "torch")}, {
        "decode": decode,
        "decode_many": decode_many,
    }


if __name__ == "__main__":
    serve(load)
