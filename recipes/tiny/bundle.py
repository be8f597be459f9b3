"""Step 7: copy the pair into the package and write its model cards from the measured figures."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from blockdraft.types import CPU_BLOCK_SIZE

PACKAGE = Path(__file__).parents[2] / "src/blockdraft/pair"
KEPT = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
KEPT |= {"chat_template.jinja", "special_tokens_map.json"}

TARGET_CARD = """\
---
license: apache-2.0
language: en
---
# The bundled target

A Qwen3 model of {parameters:.1f} M parameters ({layers} layers, hidden size {hidden}, {vocabulary} tokens, context
{context}), trained from nothing by `recipes/tiny` so that `blockdraft` can be shown and tested without a network. It
answers grade-school word problems step by step and completes short Python functions. It is often wrong: do not use it
for anything but decoding.

Trained on GSM8K's training questions (MIT), short MATH problems (MIT), documented functions of TheAlgorithms/Python
(MIT), LeetCode solutions (MIT), and program-made word problems and Python tasks of `recipes/tiny`. No benchmark prompt
was seen.

| greedy answers of up to {new} tokens | GSM8K test ({gsm8k[prompts]}) | HumanEval ({humaneval[prompts]}) |
|---|---|---|
| end by themselves | {gsm8k[ended_by_themselves]:.1%} | {humaneval[ended_by_themselves]:.1%} |
| loop (one run of 8 tokens four times or more) | {gsm8k[looping]:.1%} | {humaneval[looping]:.1%} |
| mean length, tokens | {gsm8k[mean_tokens]} | {humaneval[mean_tokens]} |
| right final answer | {gsm8k[right_answers]:.1%} | not measured |
"""

DRAFTER_CARD = """\
---
license: apache-2.0
---
# The bundled drafter

A DFlash v1 drafter (arXiv 2602.06036) of {parameters:.2f} M parameters for the bundled target: {layers} layers, blocks
of {block_size} tokens, taps {taps}, bidirectional full attention. Trained by `recipes/tiny` on the target's own answers
to training prompts, greedy and sampled, with random anchors, D-PACE and distillation.

Measured at temperature 0 in float32 on prompts that neither model was trained on; answers that loop are left out of
tau.

| | GSM8K test ({gsm8k[prompts]}) | HumanEval ({humaneval[prompts]}) |
|---|---|---|
| tau (all tokens over all cycles) | {gsm8k[tau]:.2f} | {humaneval[tau]:.2f} |
| tau (mean over answers) | {gsm8k[tau_mean_over_answers]:.2f} | {humaneval[tau_mean_over_answers]:.2f} |
| answers with the same tokens as plain decoding | {gsm8k[identical_to_plain]} | {humaneval[identical_to_plain]} |
| transformers backend, tokens/s plain, drafted (2 CPU cores) | {gsm8k[hf][tokens_per_second_plain]}, \
{gsm8k[hf][tokens_per_second_drafted]} | {humaneval[hf][tokens_per_second_plain]}, \
{humaneval[hf][tokens_per_second_drafted]} |
| native backend, tokens/s plain, drafted in blocks of {cpu_block_size} | {gsm8k[native][tokens_per_second_plain]}, \
{gsm8k[native][tokens_per_second_drafted]} | {humaneval[native][tokens_per_second_plain]}, \
{humaneval[native][tokens_per_second_drafted]} |

Share of cycles in which the first i guesses were accepted, i = 1, 2, ...:

- GSM8K: {gsm8k_positions}
- HumanEval: {humaneval_positions}
"""


def parameters(folder: Path) -> float:
    """Millions of parameters on disk."""
    total = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            count = 1
            for size in file.get_slice(name).get_shape():
                count *= size
            total += count
    return total / 1e6


def copy(source: Path, destination: Path) -> None:
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for file in source.iterdir():
        if file.name in KEPT:
            shutil.copy(file, destination)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="holds target, drafter, figures.json")
    parser.add_argument("--out", type=Path, default=PACKAGE)
    args = parser.parse_args()
    figures: dict[str, Any] = json.loads((args.build / "figures.json").read_text(encoding="utf-8"))
    for name in ("target", "drafter"):
        copy(args.build / name, args.out / name)
    target = json.loads((args.out / "target/config.json").read_text(encoding="utf-8"))
    draft = json.loads((args.out / "drafter/config.json").read_text(encoding="utf-8"))
    (args.out / "target/README.md").write_text(
        TARGET_CARD.format(
            parameters=parameters(args.out / "target"),
            layers=target["num_hidden_layers"],
            hidden=target["hidden_size"],
            vocabulary=target["vocab_size"],
            context=target["max_position_embeddings"],
            new=figures["max_new_tokens"],
            **figures["sets"],
        ),
        encoding="utf-8",
    )
    positions = {
        f"{name}_positions": " ".join(f"{share:.2f}" for share in figure["acceptance_by_position"])
        for name, figure in figures["sets"].items()
    }
    (args.out / "drafter/README.md").write_text(
        DRAFTER_CARD.format(
            parameters=parameters(args.out / "drafter"),
            layers=draft["num_hidden_layers"],
            block_size=draft["block_size"],
            cpu_block_size=CPU_BLOCK_SIZE,
            taps=", ".join(map(str, draft["dflash_config"]["target_layer_ids"])),
            **figures["sets"],
            **positions,
        ),
        encoding="utf-8",
    )
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
