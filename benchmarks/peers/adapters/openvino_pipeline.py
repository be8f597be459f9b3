"""OpenVINO GenAI: plain, with DFlash, or with prompt lookup, from weights that it converts itself."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openvino
import openvino_genai
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig
from serve import Answer, Clock, Request, serve
from transformers import dynamic_module_utils

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LOOKUP_TOKENS, LOOKUP_NGRAM = 10, 3
GROUP = 64  # of 4-bit weights: what divides the widths of small models


class Steps(openvino_genai.StreamerBase):
    """Counts tokens as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.count = Clock(), 0

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        self.count += len(token) if isinstance(token, list) else 1
        self.clock.step(self.count)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def convert(model: str, out: Path, bits: int | None) -> str:
    how = OVConfig(dtype="fp32")
    if bits is not None:
        kind = OVWeightQuantizationConfig(bits=bits, sym=bits == 8, group_size=-1 if bits == 8 else GROUP)
        how = OVConfig(quantization_config=kind)
    main_export(
        model, out, task="text-generation-with-past", trust_remote_code=True, convert_tokenizer=False, ov_config=how
    )
    return str(out)


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    # The check asks for diffusers, which the exporter's code for drafters does not use.
    dynamic_module_utils.check_imports = dynamic_module_utils.get_relative_imports
    options, precision = settings["options"], PRECISIONS[settings["dtype"]]
    asked = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    asked["INFERENCE_NUM_THREADS"] = settings["threads"]
    speculation: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        target = convert(settings["target"], Path(folder, "target"), options.get("bits"))
        if options.get("dflash"):
            drafter = convert(settings["drafter"], Path(folder, "drafter"), None)
            speculation["draft_model"] = openvino_genai.draft_model(drafter, "CPU", **asked)
            speculation["scheduler_config"] = openvino_genai.SchedulerConfig()
            speculation["scheduler_config"].enable_prefix_caching = False  # which DFlash refuses
            config = json.loads((Path(settings["drafter"]) / "config.json").read_text())
            guesses = {"num_assistant_tokens": config["block_size"] - 1}
        elif options.get("lookup"):
            speculation["prompt_lookup"] = True
            guesses = {"num_assistant_tokens": LOOKUP_TOKENS, "max_ngram_size": LOOKUP_NGRAM}
        else:
            guesses = {}
        pipe = openvino_genai.LLMPipeline(target, "CPU", **speculation, **asked)

    def decode(request: Request) -> Answer:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request["max_new_tokens"], stop_token_ids=set(request["stops"]), **guesses
        )
        steps = Steps()
        done = pipe.generate(openvino.Tensor(np.array([request["prompt"]], dtype=np.int64)), config, steps)
        return steps.clock.answer(list(done.tokens[0]))

    return {name: version(name) for name in ("openvino-genai", "optimum-intel")}, {"decode": decode}


if __name__ == "__main__":
    serve(load)
