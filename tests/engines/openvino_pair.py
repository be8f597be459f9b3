"""Converts a pair for OpenVINO GenAI and decodes with it; runs in the environment of `make test-openvino`.

    python openvino_pair.py '{"target": DIR, "drafter": DIR, "folder": DIR, "prompts": [ids], "tokens": 64,
                              "draft_tokens": 15, "ends": [ids]}'

The last line printed is JSON: for each prompt the tokens and the number of accepted draft tokens.
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
from transformers import dynamic_module_utils

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def convert(model: str, out: Path) -> None:
    main_export(
        model,
        out,
        task="text-generation-with-past",
        trust_remote_code=True,
        convert_tokenizer=False,
        ov_config=OVConfig(dtype="fp32"),
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    # The check asks for diffusers, which the exporter's code for drafters does not use.
    dynamic_module_utils.check_imports = dynamic_module_utils.get_relative_imports
    target, drafter = (Path(given["folder"]) / name for name in ("target", "drafter"))
    convert(given["target"], target)
    convert(given["drafter"], drafter)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # which DFlash refuses
    pipe = openvino_genai.LLMPipeline(
        str(target),
        "CPU",
        draft_model=openvino_genai.draft_model(str(drafter), "CPU", **EXACT),
        scheduler_config=scheduler,
        **EXACT,
    )
    config = openvino_genai.GenerationConfig(
        max_new_tokens=given["tokens"], num_assistant_tokens=given["draft_tokens"], stop_token_ids=set(given["ends"])
    )
    found = []
    for prompt in given["prompts"]:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        done = pipe.generate(ids, config)
        accepted = done.extended_perf_metrics.get_num_accepted_tokens()
        found.append({"tokens": list(done.tokens[0]), "accepted": accepted})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
