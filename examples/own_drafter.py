"""Train a drafter for a model of your own with three commands: data, train, bench.

    python examples/own_drafter.py FOLDER [TARGET]

The settings are tiny, so that it takes a minute with the bundled target, and the drafter predicts little. A real run
takes thousands of prompts, more layers and more steps; docs/training.md says which settings matter.
"""

import json
import subprocess
import sys
from pathlib import Path

PROMPTS = [f"Ann has {n} apples and buys {n + 3} more. How many apples does she have now?" for n in range(2, 34)]
RECIPE = """
layers = 1
target_layers = 2
block_size = 4
length = 128      # tokens of a training sequence
anchors = 32      # blocks of a sequence: about length / block_size
batch = 4
held_out = 4      # documents to measure on
eval_prompts = 2
optimizer = "muon"
"""


def blockdraft(*arguments: object) -> None:
    print("$ blockdraft", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "blockdraft", *map(str, arguments)], check=True)


def main(folder: Path, target: str | None = None, steps: int = 30) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    of = ["--target", target] if target else []
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (folder / "recipe.toml").write_text(RECIPE)
    # The drafter learns to predict the target's own responses.
    blockdraft("data", folder / "prompts.jsonl", *of, "--regenerate", "--out", folder / "data")
    blockdraft(
        *("train", "dflash", folder / "recipe.toml", *of, "--data", folder / "data"),
        *("--out", folder / "drafter", "--steps", steps),
    )
    blockdraft(
        *("bench", *of, "--drafter", folder / "drafter", "--prompts", folder / "prompts.jsonl"),
        *("--limit", 4, "--methods", "none,chain"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
