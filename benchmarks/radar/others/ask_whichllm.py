"""Answers of whichllm: questions as JSON on the standard input, one answer a line; run by a Python that has it."""

import json
import sys

from whichllm.engine.compatibility import check_compatibility
from whichllm.engine.performance import estimate_speed_uncertainty, estimate_tok_per_sec
from whichllm.hardware.gpu_simulator import create_synthetic_gpu
from whichllm.hardware.types import HardwareInfo
from whichllm.models.types import GGUFVariant, ModelInfo

for question in json.load(sys.stdin):
    hub = question["hub"]
    try:
        gpu = create_synthetic_gpu(question["device"], question["memory_gb"])
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        continue
    model = ModelInfo(
        id=hub,
        family_id=hub,
        name=hub.split("/")[-1],
        parameter_count=question["parameters"],
        parameter_count_active=question["active"],
        is_moe=question["active"] is not None,
        architecture=question["family"],
        context_length=question["longest"],
    )
    variant = GGUFVariant(hub.split("/")[-1] + ".gguf", question["quant"], question["bytes"])
    hardware = HardwareInfo(gpus=[gpu], os="darwin" if gpu.vendor == "apple" else "linux")
    fit = check_compatibility(model, variant, hardware, question["context"])
    speed = estimate_tok_per_sec(model, variant, gpu, "full_gpu")
    _, interval, _ = estimate_speed_uncertainty(model, variant, gpu, "full_gpu", speed)
    low, high = interval or (None, None)
    print(json.dumps({"fits": fit.can_run and fit.fit_type == "full_gpu", "speed": speed, "low": low, "high": high}))
