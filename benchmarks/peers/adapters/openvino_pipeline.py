"""OpenVINO GenAI: plain, with a drafter, or with prompt lookup, from weights that it converts itself, once.

python openvino_pipeline.py convert MODEL OUT BITS      # BITS 0 leaves the weights in float32
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from serve import Answer, Clock, Missing, Request, serve

MODELS = Path(__file__).parents[3] / "build" / "peers" / "openvino" / "models"
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LOOKUP_TOKENS, LOOKUP_NGRAM = 10, 3
GROUP = 128  # of 4-bit weights, or less where it does not divide the rows


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


def convert(model: str, out: str, bits: int) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import dynamic_module_utils

    if bits:  # which `main_export` leaves to its callers
        sizes = json.loads((Path(model) / "config.json").read_text())
        group = math.gcd(sizes["hidden_size"], sizes["intermediate_size"], GROUP)
        kind = OVWeightQuantizationConfig(bits=bits, sym=bits == 8, group_size=-1 if bits == 8 else group)
        rounded = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, quantization_config=kind)
        rounded.save_pretrained(out)
        return

    # The check asks for diffusers, which the exporter's code for drafters does not use.
    dynamic_module_utils.check_imports = dynamic_module_utils.get_relative_imports
    main_export(
        model,
        out,
        task="text-generation-with-past",
        trust_remote_code=True,
        convert_tokenizer=False,
        ov_config=OVConfig(dtype="fp32"),
    )


def converted(model: str, bits: int = 0) -> str:
    """The model's folder in OpenVINO's format, made by another process, whose memory is not the pipeline's."""
    made_of = [(str(file), file.stat().st_mtime_ns) for file in sorted(Path(model).glob("*.safetensors"))]
    out = MODELS / hashlib.sha256(json.dumps([made_of, bits]).encode()).hexdigest()[:16]
    if not (out / "done").exists():
        done = subprocess.run([sys.executable, __file__, "convert", model, str(out), str(bits)], stdout=sys.stderr)
        if done.returncode:
            raise Missing(f"optimum does not convert {Path(model).name}; the log says why")
        (out / "done").touch()
    return str(out)


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    options, precision = settings["options"], PRECISIONS[settings["dtype"]]
    asked = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    asked["INFERENCE_NUM_THREADS"] = settings["threads"]
    speculation, draft_tokens = dict[str, Any](), dict[str, int]()
    if options.get("drafts"):
        speculation["draft_model"] = openvino_genai.draft_model(converted(settings["drafter"]), "CPU", **asked)
        speculation["scheduler_config"] = openvino_genai.SchedulerConfig()
        speculation["scheduler_config"].enable_prefix_caching = False  # which drafters refuse
        config = json.loads((Path(settings["drafter"]) / "config.json").read_text())
        draft_tokens = {"num_assistant_tokens": config["block_size"] - 1}
    elif options.get("lookup"):
        speculation["prompt_lookup"] = True
        draft_tokens = {"num_assistant_tokens": LOOKUP_TOKENS, "max_ngram_size": LOOKUP_NGRAM}
    target = converted(settings["target"], options.get("bits", 0))
    pipe = openvino_genai.LLMPipeline(target, "CPU", **speculation, **asked)

    def how(request: Request) -> Any:
        return openvino_genai.GenerationConfig(
            max_new_tokens=request["max_new_tokens"], stop_token_ids=set(request["stops"]), **draft_tokens
        )

    def decode(request: Request) -> Answer:
        steps = Steps()
        done = pipe.generate(openvino.Tensor(np.array([request["prompt"]], dtype=np.int64)), how(request), steps)
        return steps.clock.answer(list(done.tokens[0]))

    def decode_many(request: Request) -> Answer:
        """One batch, its prompts padded on their left."""
        longest = max(map(len, request["prompts"]))
        ids, mask = np.zeros((2, len(request["prompts"]), longest), dtype=np.int64)
        for row, prompt in enumerate(request["prompts"]):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        began = time.perf_counter()
        done = pipe.generate(openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask)), how(request))
        return {"tokens": sum(map(len, done.tokens)), "seconds": time.perf_counter() - began}

    functions = {"decode": decode} | ({} if speculation else {"decode_many": decode_many})
    return {name: version(name) for name in ("openvino-genai", "optimum-intel")}, functions


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        serve(load)
