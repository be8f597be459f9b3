"""Step 5: train a DFlash drafter on the target's own answers. Interrupted, it goes on from its last checkpoint.

Random anchors, drawn anew for each batch; blocks of masks behind them; cross-entropy that decays with the distance from
the anchor. The target's features are computed once and kept in memory in half precision.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from train_target import save_checkpoint

from blockdraft import Target, load_target
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, default_taps
from blockdraft.proposal import chain
from blockdraft.training.dflash import (
    accepted_length,
    block_tokens,
    decayed_cross_entropy,
    default_gamma,
    draft_hidden,
    sample_anchors,
)
from blockdraft.training.muon import Muon

HELD_OUT = 64  # answers kept back to watch the accepted length


def read_answers(path: Path, target: Target, length: int) -> tuple[list[list[int]], list[int]]:
    """Token ids of prompt and answer, cut to `length`, and where each answer begins."""
    rows, starts = [], []
    tokenizer = target.tokenizer
    assert tokenizer is not None
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if "ids" not in row:
                continue
            chat = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            ids = (prompt + row["ids"])[:length]
            if len(ids) - len(prompt) >= 4:
                rows.append(ids)
                starts.append(len(prompt))
    return rows, starts


def tapped_features(rows: list[list[int]], target: Target, taps: tuple[int, ...], batch: int = 32) -> list[Tensor]:
    """Features `[S, m * H]` of every row, in bfloat16."""
    features: list[Tensor | None] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for begin in range(0, len(order), batch):
        group = order[begin : begin + batch]
        longest = max(len(rows[i]) for i in group)
        tokens = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in group], device=target.device)
        cache = target.new_cache(len(group), longest)
        last = torch.zeros(len(group), dtype=torch.long, device=target.device)
        proposal = chain(tokens)
        found = target.forward(proposal.tokens, proposal.parents, cache, taps, logits_at=last).features
        assert found is not None
        for i, one in zip(group, found.bfloat16(), strict=True):
            features[i] = one[: len(rows[i])].clone()
    return [feature for feature in features if feature is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, default=Path("build/tiny/answers.jsonl"))
    parser.add_argument("--target", type=Path, default=Path("build/tiny/target"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/drafter"))
    parser.add_argument("--init", type=Path, default=None, help="begin with the weights of this drafter")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence; longer ones are cut")
    parser.add_argument("--batch", type=int, default=20, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=32, help="anchors a sequence")
    parser.add_argument("--gamma", type=float, default=None, help="decay of the loss; by default by block size")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="set the number of steps by the time they take")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    target = load_target(args.target)
    assert target.tokenizer is not None
    hf = target.model.config  # type: ignore[attr-defined]
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        vocab_size=target.vocab_size,
        block_size=args.block_size,
        mask_token_id=target.tokenizer.mask_token_id,
        taps=default_taps(target.num_layers, args.taps),
        num_target_layers=target.num_layers,
        rope_theta=hf.rope_parameters["rope_theta"],
        layers=(LayerAttention(causal=False, window=None),) * args.layers,
        max_position_embeddings=target.max_context,
    )
    rows, starts = read_answers(args.answers, target, args.length)
    tokens = sum(map(len, rows))
    print(f"{len(rows)} answers, {tokens - sum(starts)} of {tokens} tokens supervised", flush=True)
    began = time.time()
    features = tapped_features(rows, target, config.taps)
    print(f"features: {sum(f.nbytes for f in features) / 2**30:.1f} GiB in {time.time() - began:.0f} s", flush=True)

    network = DFlashNetwork(config).to(target.device)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02 if "fc" not in name else parameter.size(1) ** -0.5)
    if args.init is not None:
        network.load_state_dict(read_checkpoint(args.init, target.tokenizer.get_vocab())[1])
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    print(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters, taps {config.taps}", flush=True)
    optimizers = [Muon(matrices, args.muon_lr), torch.optim.AdamW(others, args.adam_lr, weight_decay=0.0)]
    checkpoint = args.out.with_suffix(".training_state.pt")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=target.device)
        network.load_state_dict(state["network"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
        print(f"going on from step {start}", flush=True)

    gamma = args.gamma or default_gamma(args.block_size)
    mask_embedding = target.embed(torch.tensor(config.mask_token_id, device=target.device)).clone()

    def forward(
        features_BSF: Tensor, tokens_BS: Tensor, supervised_BS: Tensor, anchors_BA: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        block, positions = block_tokens(tokens_BS, anchors_BA, args.block_size)
        inside = (positions < tokens_BS.size(1)) & (anchors_BA >= 0).unsqueeze(-1)
        taught = inside & supervised_BS.gather(1, positions.clamp(0, tokens_BS.size(1) - 1).flatten(1)).view_as(inside)
        hidden = draft_hidden(network, features_BSF, anchors_BA, target.embed(block[:, :, 0]), mask_embedding)
        logits = network.adjust_logits(target.head(hidden[:, :, 1:]))
        total, weight = decayed_cross_entropy(logits, block[:, :, 1:], taught[:, :, 1:], gamma)
        lengths = accepted_length(logits, block[:, :, 1:], taught[:, :, 1:])
        return total, weight, lengths.masked_fill(~taught[:, :, 1], 0)

    compiled = torch.compile(forward, dynamic=False)

    def batch_of(chosen: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = torch.zeros(len(chosen), args.length, dtype=torch.long)
        supervised = torch.zeros(len(chosen), args.length, dtype=torch.bool)
        tapped = torch.zeros(len(chosen), args.length, features[0].size(1))
        for row, i in enumerate(chosen):
            tokens[row, : len(rows[i])] = torch.tensor(rows[i])
            supervised[row, starts[i] : len(rows[i])] = True
            tapped[row, : len(rows[i])] = features[i].float().cpu()
        anchors = sample_anchors(supervised, args.anchors, generator)
        return tuple(t.to(target.device) for t in (tapped, tokens, supervised, anchors))  # type: ignore[return-value]

    rng = random.Random(args.seed)
    order: list[int] = []
    steps, seen, began = args.steps, [], time.time()
    step = 0
    while step < steps:
        while len(order) < args.batch:
            order += rng.sample(range(HELD_OUT, len(rows)), len(rows) - HELD_OUT)
        chosen, order = order[: args.batch], order[args.batch :]
        if step < start:
            step += 1
            continue
        factor = min((step + 1) / 40, 1.0, 1.6 * (1 - step / steps))
        for optimizer, peak in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        total, weight, lengths = compiled(*batch_of(chosen, generator))
        (total / weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen.append((float(total.detach() / weight), float(lengths.sum() / (lengths > 0).sum())))
        step += 1
        if step == start + 5:
            timed = time.time()  # compilation is over
        if step == start + 25 and args.minutes is not None:
            steps = step + int((args.minutes * 60 - (time.time() - began)) / ((time.time() - timed) / 20))
            print(f"{steps} steps fit into {args.minutes:.0f} minutes", flush=True)
        if step % 20 == 0:
            loss, length = (sum(column[-20:]) / len(column[-20:]) for column in zip(*seen, strict=True))
            left = (time.time() - began) / (step - start) * (steps - step) / 60
            print(f"step {step}/{steps} loss {loss:.3f} accepted length {length:.2f} {left:.0f} min left", flush=True)
        if step % args.save_every == 0 or step == steps:
            state = {"network": network.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
            save_checkpoint(checkpoint, state)
            with torch.no_grad():
                sample = batch_of(list(range(HELD_OUT)), torch.Generator().manual_seed(0))
                parts = [forward(*(t[i : i + 16] for t in sample))[2] for i in range(0, HELD_OUT, 16)]
            lengths = torch.cat(parts)
            print(f"held out: accepted length {float(lengths.sum() / (lengths > 0).sum()):.2f}", flush=True)
            write_checkpoint(args.out, config, {n: t.bfloat16() for n, t in network.state_dict().items()})
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
