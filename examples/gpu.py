"""Decode on an NVIDIA GPU with CUDA graphs, with and without a drafter.

    python examples/gpu.py [TARGET DRAFTER]

Needs an NVIDIA GPU. Without arguments it uses the default model. For real speed-ups pass a model of some billion
parameters and its drafter, such as Qwen/Qwen3-4B and a folder of z-lab/Qwen3-4B-DFlash-b16.
"""

import sys

import torch

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target

PROMPT = "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?"


def main(path: str | None = None, drafter_path: str | None = None) -> None:
    if not torch.cuda.is_available():
        sys.exit("This example needs an NVIDIA GPU, and torch sees none.")
    target = load_target(path, device="cuda", compile="on")  # "on" captures CUDA graphs
    params = SamplingParams(max_new_tokens=256)
    outputs = []
    for name in ("none", drafter_path):
        drafter = load_drafter(name, target=target)
        with Engine(target, drafter, drafting=Drafting(block_size=None)) as engine:
            engine.generate([PROMPT], params)  # warm-up: captures the graphs
            [completion] = engine.generate([PROMPT], params)
        outputs.append(completion.token_ids)
        speed = completion.stats.tokens_per_second
        print(f"{name or 'drafted':8} {speed:8.1f} tokens/s, tau {completion.tau:.2f}")
    print(f"{torch.cuda.get_device_name()}: tokens {'equal' if outputs[0] == outputs[1] else 'differ at a near tie'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
