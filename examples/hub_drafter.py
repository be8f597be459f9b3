"""Decode a model of the Hugging Face hub with its published DFlash drafter.

    python examples/hub_drafter.py [TARGET DRAFTER]

Needs the network, some 10 GB of disk and, for real speed, a GPU. `blockdraft models` lists published drafters.
"""

import sys

import huggingface_hub

import blockdraft

TARGET, DRAFTER = "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"


def download(name: str) -> str:
    """Return the folder of a repository of the hub, downloaded if necessary."""
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except Exception as error:
        sys.exit(f"{name} cannot be downloaded, and this example needs it: {error}")


def main(target_name: str = TARGET, drafter_name: str = DRAFTER) -> None:
    target = blockdraft.load_target(download(target_name))
    drafter = blockdraft.load_drafter(download(drafter_name), target=target)
    with blockdraft.Engine(target, drafter) as engine:
        chunks = []
        for chunk in engine.stream("Write a Python function that merges two sorted lists."):
            print(chunk.text, end="", flush=True)
            chunks.append(chunk)
    stats = chunks[-1].stats
    print(f"\ntau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
