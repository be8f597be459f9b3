"""Step 9: copy the pair into the package and write its model cards from the measured figures."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from making import Took, answers_kept, digest, took_drafter, took_target
from safetensors import safe_open

from blockdraft.formats import read_config, zlab
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.types import CPU_BLOCK_SIZE

PACKAGE = Path(__file__).parents[2] / "src/blockdraft/pair/tiny"
KEPT = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
KEPT |= {"chat_template.jinja", "special_tokens_map.json"}
MAX_BYTES = 40e6  # of the pair
TARGET, DFLASH = "target", "drafter"

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
(MIT), LeetCode solutions (MIT), and generated word problems and Python tasks of `recipes/tiny`; at last on its own
greedy answers, which makes it surer of what it says. No benchmark prompt was seen.

| greedy answers of up to {new} tokens | GSM8K test ({gsm8k[prompts]}) | HumanEval ({humaneval[prompts]}) |
|---|---|---|
| end by themselves | {gsm8k[ended_by_themselves]:.1%} | {humaneval[ended_by_themselves]:.1%} |
| loop (one run of 8 tokens four times or more) | {gsm8k[repetitive]:.1%} | {humaneval[repetitive]:.1%} |
| mean length, tokens | {gsm8k[mean_tokens]} | {humaneval[mean_tokens]} |
| right final answer | {gsm8k[right_answers]:.1%} | not measured |

Of generated word problems that it was not trained on ({problems[problems]}) it solves
{problems[solved_of_one_or_two_steps]:.0%} of those of one or two steps; by steps: {solved}.
{making}"""

DRAFTER_CARD = """\
---
license: apache-2.0
---
# The bundled drafter

{intro} Trained by `recipes/tiny` on the target's own answers to training prompts, greedy and sampled.

Measured in float32 on prompts that neither model was trained on, at temperature 0 where nothing else is said; answers
that loop are left out of tau.

| | GSM8K test ({gsm8k[prompts]}) | HumanEval ({humaneval[prompts]}) |
|---|---|---|
{rows}

Share of steps in which the first i draft tokens were accepted, i = 1, 2, ...:

{positions}
{making}"""

DFLASH_INTRO = """\
A DFlash v1 drafter (arXiv 2602.06036) of {parameters:.2f} M parameters for the bundled target: {layers} layers, blocks
of {block_size} tokens, target layers {target_layers}, bidirectional full attention, taught by D-PACE and distillation.
Every engine that reads DFlash reads it."""


def parameters(folder: Path) -> float:
    """Return the millions of parameters on disk."""
    total = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            count = 1
            for size in file.get_slice(name).get_shape():
                count *= size
            total += count
    return total / 1e6


def making_table(rows: list[Took], note: str = "") -> str:
    """Return a section of a card; empty if nothing was recorded."""
    if not rows:
        return ""
    table = "\n".join(["| | steps | tokens | minutes |", "|---|---|---|---|", *(row.row() for row in rows)])
    return f"\n## What making it took\n\n{table}\n" + (f"\n{note}\n" if note else "")


def target_card(folder: Path, figures: dict[str, Any], making: list[Took]) -> str:
    config, problems = read_config(folder), figures["problems"]
    assert isinstance(config, dict)
    return TARGET_CARD.format(
        parameters=parameters(folder),
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        new=figures["max_new_tokens"],
        problems=problems,
        solved=", ".join(f"{steps}: {share:.0%}" for steps, share in problems["solved"].items()),
        making=making_table(making),
        **figures["sets"],
    )


def rows_of(name: str, sets: list[dict[str, Any]]) -> str:
    """Return the table of a drafter's card, with a column for each prompt set."""
    budget, temperature = sets[0]["tree_budget"], sets[0]["temperature"]

    def row(title: str, *values: Any) -> str:
        return "| " + " | ".join([title, *map(str, values)]) + " |"

    own = [each["drafters"][name] for each in sets]
    rows = [
        row("tau (all tokens over all steps)", *(f"{each['tau']:.2f}" for each in own)),
        row("tau (mean over answers)", *(f"{each['tau_mean_over_answers']:.2f}" for each in own)),
        row(f"tau of trees of {budget} draft tokens", *(f"{each['tree']['tau']:.2f}" for each in own)),
        row(f"tau at temperature {temperature:g}", *(f"{each['sampled']['tau']:.2f}" for each in own)),
        row("answers with the same tokens as plain decoding", *(each["identical_to_plain"] for each in own)),
    ]
    for backend, how in (("hf", ""), ("native", f" in blocks of {CPU_BLOCK_SIZE}")):
        rates = [
            f"{rates[f'{backend}, plain']}, {rates[f'{backend}, {name}']}"
            for rates in (each["tokens_per_second"] for each in sets)
        ]
        title = "transformers" if backend == "hf" else backend
        rows.append(row(f"{title} backend, tokens/s plain, drafted{how} (2 CPU cores)", *rates))
    return "\n".join(rows)


def drafter_card(folder: Path, figures: dict[str, Any], making: str) -> str:
    config: DraftConfig = zlab.read_checkpoint(folder)[0]
    sets: dict[str, Any] = figures["sets"]
    facts: dict[str, Any] = {
        "parameters": parameters(folder),
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "target_layers": ", ".join(map(str, config.target_layers)),
    }
    positions = {
        key: " ".join(f"{share:.2f}" for share in each["drafters"][DFLASH]["acceptance_by_position"])
        for key, each in sets.items()
    }
    return DRAFTER_CARD.format(
        intro=DFLASH_INTRO.format(**facts),
        rows=rows_of(DFLASH, [sets["gsm8k"], sets["humaneval"]]),
        positions=f"- GSM8K: {positions['gsm8k']}\n- HumanEval: {positions['humaneval']}",
        making=making,
        **sets,
    )


def bundle(build: Path, out: Path) -> str:
    """Copy the pair from `build` into the package: all of it, or nothing where something is missing or too large.

    Returns:
        Report of what was done.
    """
    figures: dict[str, Any] = json.loads((build / "figures.json").read_text(encoding="utf-8"))
    for name in (TARGET, DFLASH):
        if digest(build / name) != figures["weights"][name]:
            sys.exit(
                f"figures.json was measured with other weights of {name} than {build / name} holds; "
                "delete it and measure again."
            )
    answers, tokens = answers_kept([build / "answers.jsonl", build / "hard_answers.jsonl"])
    learned = f"Learned from {answers:,} answers, {tokens:,} tokens." if answers else ""
    took = took_drafter(build / DFLASH)
    cards = {
        TARGET: target_card(build / TARGET, figures, took_target(build / TARGET)),
        DFLASH: drafter_card(build / DFLASH, figures, making_table([took] if took else [], learned)),
    }
    files = {name: [file for file in sorted((build / name).iterdir()) if file.name in KEPT] for name in cards}
    size = sum(file.stat().st_size for each in files.values() for file in each)
    size += sum(len(card.encode()) for card in cards.values())
    if size > MAX_BYTES:
        sys.exit(
            f"The pair would take {size / 1e6:.1f} MB, and {MAX_BYTES / 1e6:g} MB is the limit; nothing was copied. "
            "Make the drafter smaller (in its TOML file)."
        )
    for name in cards:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        for file in files[name]:
            shutil.copy(file, out / name)
        (out / name / "README.md").write_text(cards[name], encoding="utf-8")
    return f"{out}: {size / 1e6:.1f} MB."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="holds target, drafters, figures.json")
    parser.add_argument("--out", type=Path, default=PACKAGE)
    args = parser.parse_args()
    print(bundle(args.build, args.out))


if __name__ == "__main__":
    main()
