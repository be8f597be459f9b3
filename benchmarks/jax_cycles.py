"""R of the bundled pair in JAX by block size and tree: the time of one cycle over that of one step without a drafter.

Run as `python -m benchmarks.jax_cycles`, on a machine that does nothing else.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.targets import load_target

PAIR = Path(__file__).parents[1] / "src/blockdraft/pair/tiny/target"
CONTEXT, REPEATS = 200, 21
SHAPES = ((2, 0), (4, 0), (8, 0), (16, 0), (16, 16), (16, 32))  # block size and guesses of a tree


def milliseconds(run: Callable[[], object]) -> float:
    """Median over repeats; the first run, which compiles, does not count."""
    run()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return 1000 * statistics.median(found)


def main() -> None:
    target = load_target(PAIR, device="cpu", backend="jax")
    drafter: Any = load_drafter("bundled-dflash", target=target)
    runner = target.runner(drafter.network)
    cache, state = target.new_cache(1, 2 * CONTEXT), runner.new_state(1, 2 * CONTEXT)
    prompt = torch.randint(target.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    hidden_states = target.forward(prompt, chain_parents(1, CONTEXT), cache, drafter.target_layers).hidden_states
    runner.observe(state, hidden_states)
    for each in (cache, state):
        each.commit([range(CONTEXT)])

    def step() -> None:
        best = target.forward(torch.tensor([[7]]), chain_parents(1, 1), cache, drafter.target_layers).best
        assert best is not None and best.tolist()
        cache.commit([[0]])
        cache.truncate([CONTEXT])

    def cycle(block_size: int, tree_budget: int) -> None:
        runner.cycle(cache, state, [7], None, block_size=block_size, tree_budget=tree_budget, temperatures=[0.0])
        for each in (cache, state):
            each.truncate([CONTEXT])

    plain = milliseconds(step)
    print(f"{target.running}, {target.dtype}: {plain:.2f} ms a step without a drafter")
    for block_size, budget in SHAPES:
        drafted = milliseconds(lambda size=block_size, draft_tokens=budget: cycle(size, draft_tokens))  # type: ignore[misc]
        shape = f"tree of {budget} guesses" if budget else "chain"
        print(f"block of {block_size}, {shape}: {drafted:.2f} ms, R {drafted / plain:.2f}")


if __name__ == "__main__":
    main()
