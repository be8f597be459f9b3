"""Steps 3 to 5: train the target, a small Qwen3 model, on the corpus. Resumes from its last checkpoint.

Documents are packed whole into rows that begin with a document, as decoding does. Rows have 256 tokens, and 512 for the
last 40 % of the steps, when the longer documents join. Steps and seconds are noted in `making.jsonl`.

main     Reads everything; in its first quarter mostly easy documents: problems of one or two steps, and Python tasks.
finish   Goes on with a lower rate, without what a model of this size cannot follow (GSM8K answers of more than three
         steps, most MATH): after `main` 29 % of the greedy answers to GSM8K questions loop, because the model writes
         steps that lead nowhere. Adds tasks with random names, without which the model copies no name that it has not
         seen.
settle   Reads the model's own answers (`write_answers.py`), looping ones replaced by sampled ones that do not loop
         (rejection-sampling fine-tuning). It removes more of the loops and changes little else.
unlearn  Also lowers the likelihood of what repeats in the model's repetitive outputs (sequence-level unlikelihood
         training, arXiv 1908.04319), a little: with three times the weight and twice the steps, loops of one or two
         tokens took their place. Reads more problems than `settle`, so that fewer right answers are lost.
sharpen  Reads the model's own greedy answers to GSM8K and TheAlgorithms prompts, as they are and with other numbers
         (`write_answers.py --hard`), so that its answers at temperature 1 are little worse than its greedy ones. It
         unlearns loops as well, which otherwise come back.
"""

import argparse
import fileinput
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from making import Making
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from blockdraft.engine import loops
from blockdraft.formats.folder import with_rope_theta
from blockdraft.machine import multiplies_bfloat16
from blockdraft_train.optimizers import Muon

# Shares of the documents drawn, by kind; generated problems of at most EASY_STEPS steps are "easy".
MIXTURES = {
    "begin": {"easy": 0.6, "problem": 0.15, "task": 0.2, "gsm8k": 0.05},
    "main": {
        "gsm8k": 0.26,
        "easy": 0.22,
        "problem": 0.24,
        "task": 0.17,
        "algorithms": 0.03,
        "math": 0.04,
        "leetcode": 0.04,
    },
    "finish": {
        "gsm8k": 0.3,
        "easy": 0.2,
        "problem": 0.17,
        "task": 0.15,
        "odd_task": 0.15,
        "algorithms": 0.02,
        "math": 0.01,
    },
    "settle": {"own": 0.75, "gsm8k": 0.1, "easy": 0.03, "problem": 0.02, "task": 0.1},
    "unlearn": {"own": 0.45, "gsm8k": 0.08, "easy": 0.28, "problem": 0.07, "task": 0.06, "odd_task": 0.06},
    "sharpen": {"own": 0.6, "easy": 0.2, "problem": 0.07, "task": 0.06, "odd_task": 0.07},
}
STAGES = [stage for stage in MIXTURES if stage != "begin"]
BEGINNING = 0.25  # share of the stage `main` over which its mixture changes from `begin` to `main`
EASY_STEPS = 2
MAX_STEPS = 3  # of GSM8K answers in later stages than `main`
RUN = 6  # tokens; a run of them that occurs again in a repetitive output is unlearned
LOOPS_A_STEP = 8  # repetitive outputs in each step that unlearns
SHARPENED = {"gsm8k", "gsm8k_other", "algorithms", "algorithms_other"}  # kinds of prompts
MENDED = 4  # copies of an answer that was sampled where another had looped
SHORT, LONG, LONG_SHARE = 256, 512, 0.4


def mixture(stage: str, share: float) -> dict[str, float]:
    """Return the shares of the documents drawn when this share of a stage is done."""
    end = MIXTURES[stage]
    old = max(0.0, 1 - share / BEGINNING) if stage == "main" else 0.0
    return {kind: old * MIXTURES["begin"].get(kind, 0.0) + (1 - old) * end[kind] for kind in end}


def kind_of(row: dict[str, Any]) -> str:
    """Return the kind of a document of the corpus."""
    kind: str = row["kind"]
    if (
        kind == "problem" and row["messages"][1]["content"].count("\n") <= EASY_STEPS
    ):  # the result has a line of its own
        return "easy"
    return kind


def tokenized(corpus: Path, tokenizer: PreTrainedTokenizerBase, stage: str) -> dict[str, list[list[int]]]:
    texts = defaultdict(list)
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            kind = kind_of(row)
            if kind not in MIXTURES[stage]:
                continue
            if stage != "main" and kind == "gsm8k" and row["messages"][1]["content"].count("\n") > MAX_STEPS:
                continue
            if "text" in row:
                texts[kind].append(row["text"] + "<|endoftext|>")
            else:
                texts[kind].append(tokenizer.apply_chat_template(row["messages"], tokenize=False))
    return {kind: tokenizer(rows)["input_ids"] for kind, rows in texts.items()}


def check_kinds(documents: dict[str, list[list[int]]], stage: str) -> None:
    """Exit where a kind of documents is missing that the stage needs."""
    if missing := sorted(kind for kind in MIXTURES[stage] if not documents.get(kind)):
        sys.exit(f"The stage {stage} needs documents of the kinds {', '.join(missing)}; make corpus and answers again.")


def own_answers(paths: list[Path], tokenizer: PreTrainedTokenizerBase, stage: str) -> list[list[int]]:
    """Return chats of the model's own responses that ended by themselves and hardly repeat themselves.

    `sharpen` takes greedy answers of its kinds. Other stages leave out answers to TheAlgorithms prompts, most of which
    are checks without content, and take answers in the place of a looping one several times.
    """
    documents = []
    with fileinput.input(paths, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = row.get("ids", [None])
            if ids[-1] != tokenizer.eos_token_id or loops(ids, size=6, times=3):
                continue
            if stage == "sharpen":
                times = int(row["kind"] in SHARPENED and row["temperature"] == 0)
            else:
                times = 0 if row["kind"] == "algorithms" else MENDED if "looped" in row else 1
            if times:
                answer = tokenizer.decode(row["ids"][:-1])
                chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
                documents += [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]] * times
    return documents


def loop_rows(paths: list[Path], tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Tensor, Tensor]:
    """Return the model's repetitive outputs, and which of their tokens are unlearned.

    Returns:
        Tokens `[n, length]` int64, prompt first, padded with zeros; and `[n, length]` bool, true where a token ends a
        run of `RUN` tokens that the answer holds before.
    """
    found, wrong = [], []
    with fileinput.input(paths, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "looped" not in row:
                continue
            chat = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            ids, again, known = row["looped"], [], set[tuple[int, ...]]()
            for end in range(1, len(ids) + 1):
                run = tuple(ids[max(0, end - RUN) : end])
                again.append(run in known)
                known.add(run)
            fill = [0] * length
            found.append([*prompt, *ids, *fill][:length])
            wrong.append([*([False] * len(prompt)), *again, *fill][:length])
    return torch.tensor(found).view(-1, length), torch.tensor(wrong, dtype=torch.bool).view(-1, length)


def packed_rows(
    documents: dict[str, list[list[int]]], shares: Callable[[], dict[str, float]], seed: int, limit: Callable[[], int]
) -> Iterator[list[int]]:
    """Yield rows of `limit()` tokens; each begins with a document, and only its last document may be cut."""
    rng = random.Random(seed)
    queues: dict[str, list[list[int]]] = defaultdict(list)
    row: list[int] = []
    while True:
        now = shares()
        kind = rng.choices(list(now), list(now.values()))[0]
        if not queues[kind]:
            queues[kind] = rng.sample(documents[kind], len(documents[kind]))
        document = queues[kind].pop()
        if len(document) > limit():
            continue
        row += document
        if len(row) >= limit():
            yield row[: limit()]
            row = []


def learning_rate(step: int, steps: int) -> float:
    """Return the factor on the peak rate: 2 % warm-up, constant, then a linear fall to zero over the last half."""
    return min((step + 1) / (0.02 * steps), 1.0, 2.0 * (1 - step / steps))


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/tiny/corpus.jsonl"))
    parser.add_argument(
        "--answers",
        type=Path,
        nargs="+",
        default=[Path("build/tiny/answers.jsonl")],
        help="for settle, unlearn and sharpen",
    )
    parser.add_argument("--unlearning", type=float, default=0.01, help="weight of unlearning")
    parser.add_argument("--out", type=Path, default=Path("build/tiny/target"), help="holds the tokenizer already")
    parser.add_argument("--stage", choices=STAGES, default="main")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens-per-step", type=int, default=6144)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    documents = tokenized(args.corpus, tokenizer, args.stage)
    if "own" in MIXTURES[args.stage]:
        documents["own"] = own_answers(args.answers, tokenizer, args.stage)
    print({kind: len(rows) for kind, rows in documents.items()}, flush=True)
    check_kinds(documents, args.stage)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=224,
        intermediate_size=576,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    if args.stage != "main":
        model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    model.to(args.device).train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, args.muon_lr), torch.optim.AdamW(others, args.adam_lr, (0.9, 0.95), weight_decay=0.0)]
    peaks = [args.rate * args.muon_lr, args.rate * args.adam_lr]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {args.device}", flush=True)

    checkpoint = args.out / f"{args.stage}_state.pt"
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
        print(f"going on from step {start}", flush=True)

    def loss_of(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def unlikelihood(ids: Tensor, wrong: Tensor) -> Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        said = logits.log_softmax(dim=-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        others = torch.log1p(-said.exp().clamp(max=1 - 1e-6))
        return -(others * wrong[:, 1:]).sum() / wrong[:, 1:].sum().clamp(min=1)

    compiled, compiled_unlikelihood = (torch.compile(each, dynamic=False) for each in (loss_of, unlikelihood))
    bfloat16 = args.device != "cpu" or multiplies_bfloat16()
    switch = math.ceil(args.steps * (1 - LONG_SHARE)) if args.stage == "main" else 0
    step = 0
    rows = packed_rows(
        documents,
        lambda: mixture(args.stage, step / args.steps),
        args.seed,
        lambda: (SHORT if step < switch else LONG) + 1,
    )
    looped, order = None, torch.Generator().manual_seed(args.seed)
    if args.stage in ("unlearn", "sharpen"):
        looped = loop_rows(args.answers, tokenizer, SHORT + 1)
        print(f"{len(looped[0])} repetitive outputs, {int(looped[1].sum())} tokens to unlearn", flush=True)
        if not len(looped[0]):
            sys.exit(f"{args.answers[0]} holds no repetitive output, so there is nothing to unlearn; skip this stage.")
    losses, began = [], time.time()
    making = Making(args.out, args.stage, start, args.tokens_per_step)
    for step in range(args.steps):
        length = SHORT if step < switch else LONG
        batch = []
        while len(batch) < args.tokens_per_step // length:
            row = next(rows)
            if len(row) == length + 1:  # a row begun before the switch may be short
                batch.append(row)
        chosen = torch.randint(len(looped[0]), (LOOPS_A_STEP,), generator=order) if looped else None
        if step < start:
            continue
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(step, args.steps)
        with torch.autocast(args.device, torch.bfloat16, enabled=bfloat16):
            loss = compiled(torch.tensor(batch, device=args.device))
            objective = loss
            if looped:
                unlearned = compiled_unlikelihood(*(each[chosen].to(args.device) for each in looped))
                objective = loss + args.unlearning * unlearned
        objective.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % 20 == 0:
            mean = torch.stack(losses[-20:]).mean().item()
            rate = (time.time() - began) / (step + 1 - start)
            print(
                f"step {step + 1}/{args.steps} loss {mean:.3f} {args.tokens_per_step / rate:.0f} tokens/s "
                f"{rate * (args.steps - step - 1) / 60:.0f} min left",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1}
            save_checkpoint(checkpoint, state)
            making.note(step + 1)

    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(args.out)
    config = Path(args.out, "config.json")
    # Arithmetic in float32, in which the pair's figures are measured; the weights stay in bfloat16.
    fields = with_rope_theta(json.loads(config.read_text())) | {"dtype": "float32"}
    config.write_text(json.dumps(fields, indent=2) + "\n")
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
