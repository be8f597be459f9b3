"""What a draft tree costs on the host, against the target's forward that it feeds.

For trees of several sizes, median milliseconds of: log probabilities and top-k of one draft pass, building the tree,
its mask and depths, and the bundled target's forward over as many nodes behind a context. The distributions are random.
Steps are timed in turns, so that other work on the machine meets all of them alike.

    python benchmarks/tree_build.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from blockdraft import load_target
from blockdraft.decode.proposal import chain, depths, tree_mask
from blockdraft.decode.tree import best_first

SIZES = (16, 32, 64, 128, 256)


def milliseconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None, help="of torch; default: its own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    target = load_target(device="cpu")
    generator = torch.Generator().manual_seed(0)
    cache = target.new_cache(1, args.context + 1 + max(SIZES))
    context = chain(torch.randint(target.vocab_size, (1, args.context), generator=generator))
    target.forward(context.tokens, context.parents, cache)
    cache.commit([range(args.context)])
    logits = 4 * torch.randn(1, args.block_size - 1, target.vocab_size, generator=generator)
    anchor = torch.tensor([5])

    table = Table(title=f"Medians of {args.repeats} in ms, {torch.get_num_threads()} threads")
    for column in ("guesses", "top-k", "tree", "mask, depths", "sum", "target forward", "share"):
        table.add_column(column, justify="right")
    for size in SIZES:
        tops = logits.log_softmax(dim=-1).topk(size, dim=-1)
        tree = best_first(anchor, tops.values, tops.indices, size)
        steps: list[Callable[[], object]] = [
            lambda size=size: logits.log_softmax(dim=-1).topk(size, dim=-1),  # type: ignore[misc]
            lambda tops=tops, size=size: best_first(anchor, tops.values, tops.indices, size),  # type: ignore[misc]
            lambda tree=tree: (tree_mask(tree.parents), depths(tree.parents)),  # type: ignore[misc]
            lambda tree=tree: target.forward(tree.tokens, tree.parents, cache),  # type: ignore[misc]
        ]
        times = [[milliseconds(step) for step in steps] for _ in range(args.repeats + 3)][3:]  # the first ones warm up
        *host, forward = (median(column) for column in zip(*times, strict=True))
        cells = [*host, sum(host), forward]
        table.add_row(str(size), *(f"{cell:.2f}" for cell in cells), f"{sum(host) / forward:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
