"""Step 9: copy the pair into the package and write its model cards from the measured figures.

A second drafter is bundled, and then drafts by default, where `figures.json` says that it decodes the wide pair clearly
faster than the DFlash one.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from making import Took, answers_kept, digest, took_drafter, took_target
from safetensors import safe_open

from blockdraft.drafters.dflash2.network import DFlash2Config
from blockdraft.drafters.dspark.network import DSparkConfig
from blockdraft.formats import read_config, zlab
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.types import CPU_BLOCK_SIZE

PACKAGE = Path(__file__).parents[2] / "src/blockdraft/pair/tiny"
KEPT = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
KEPT |= {"chat_template.jinja", "special_tokens_map.json"}
FASTER = 1.10  # least speed over the DFlash drafter's for which a second one is bundled
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
# {title}

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
SECOND_INTRO = """\
A {kind} of {parameters:.2f} M parameters for the bundled target: {layers} layers, blocks of {block_size},
target layers {target_layers}, {more}.
It began with the weights of the bundled DFlash drafter (`bundled-dflash`), and drafts by default in its place, since a
pair of {wide:.0f} M parameters that says the same words decodes {over:.2f} times as fast with it."""


def second_facts(config: DraftConfig) -> dict[str, str]:
    """Return the kind of a second drafter, and what it adds to DFlash."""
    if isinstance(config, DSparkConfig):
        more = f"a bias of rank {config.markov_rank} by the token before, a confidence head"
        return {"kind": "DSpark drafter (arXiv 2607.05147)", "more": more}
    assert isinstance(config, DFlash2Config), f"no card for a {type(config).__name__}"
    selector = f"a selector of rank {config.selector_rank} among {config.selector_top_k} candidates of each slot"
    return {"kind": "DFlash2 drafter", "more": f"convolutions over {config.conv_kernel_size} slots, {selector}"}


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


def second_drafter(figures: dict[str, Any]) -> str | None:
    """Return the name of the fastest drafter that is clearly faster than DFlash, or None."""
    over: dict[str, float] = figures.get("wide", {}).get("over_first", {})
    best = max(over, key=lambda name: over[name], default=None)
    return best if best is not None and over[best] >= FASTER else None


def said_of(figures: dict[str, Any], chosen: str | None) -> str:
    """Return a sentence about the drafters besides DFlash."""
    over: dict[str, float] = figures.get("wide", {}).get("over_first", {})
    if not over:
        return f"only {DFLASH} is bundled: figures.json compares no other with it (measure.py --wide)"
    speeds = ", ".join(f"{name} {times:.2f} times as fast as {DFLASH}" for name, times in over.items())
    verdict = f"{chosen} is bundled too and drafts by default" if chosen else f"only {DFLASH} is bundled"
    return f"{verdict}: the wide pair decodes with {speeds}, and {FASTER:.2f} is the threshold"


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


def drafter_card(name: str, folder: Path, figures: dict[str, Any], making: str) -> str:
    config: DraftConfig = zlab.read_config(folder)
    sets: dict[str, Any] = figures["sets"]
    facts: dict[str, Any] = {
        "parameters": parameters(folder),
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "target_layers": ", ".join(map(str, config.target_layers)),
    }
    title, intro = "The bundled drafter", DFLASH_INTRO
    if name != DFLASH:
        title, intro, wide = "The bundled drafter that drafts by default", SECOND_INTRO, figures["wide"]
        facts |= second_facts(config)
        facts |= {"wide": wide["parameters"] / 1e6, "over": wide["over_first"][name]}
    positions = {
        key: " ".join(f"{share:.2f}" for share in each["drafters"][name]["acceptance_by_position"])
        for key, each in sets.items()
    }
    return DRAFTER_CARD.format(
        title=title,
        intro=intro.format(**facts),
        rows=rows_of(name, [sets["gsm8k"], sets["humaneval"]]),
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
    second = second_drafter(figures)
    names = [TARGET, DFLASH, *([second] if second else [])]
    for name in names:
        if digest(build / name) != figures["weights"][name]:
            sys.exit(
                f"figures.json was measured with other weights of {name} than {build / name} holds; "
                "delete it and measure again."
            )
    answers, tokens = answers_kept([build / "answers.jsonl", build / "hard_answers.jsonl"])
    learned = f"Learned from {answers:,} answers, {tokens:,} tokens." if answers else ""
    cards = {TARGET: target_card(build / TARGET, figures, took_target(build / TARGET))}
    for name in names[1:]:
        took = [row for row in (took_drafter(build / each) for each in dict.fromkeys((DFLASH, name))) if row]
        cards[name] = drafter_card(name, build / name, figures, making_table(took, learned))
    files = {name: [file for file in sorted((build / name).iterdir()) if file.name in KEPT] for name in names}
    size = sum(file.stat().st_size for each in files.values() for file in each)
    size += sum(len(card.encode()) for card in cards.values())
    if size > MAX_BYTES:
        sys.exit(
            f"The pair would take {size / 1e6:.1f} MB ({', '.join(names)}), and {MAX_BYTES / 1e6:g} MB is the limit; "
            "nothing was copied. Make a drafter smaller (in its TOML file), or measure without the second one."
        )
    gone = [old for old in out.glob("drafter-*") if old.name != second]
    for old in [*gone, *(out / name for name in names)]:
        shutil.rmtree(old, ignore_errors=True)
    for name in names:
        (out / name).mkdir(parents=True)
        for file in files[name]:
            shutil.copy(file, out / name)
        (out / name / "README.md").write_text(cards[name], encoding="utf-8")
    removed = f" {', '.join(old.name for old in gone)} was removed." if gone else ""
    return f"{out}: {', '.join(names)}, {size / 1e6:.1f} MB. {said_of(figures, second)}.{removed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="holds target, drafters, figures.json")
    parser.add_argument("--out", type=Path, default=PACKAGE)
    args = parser.parse_args()
    print(bundle(args.build, args.out))


if __name__ == "__main__":
    main()
