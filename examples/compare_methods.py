"""Decode the same prompts plainly, with chains and with trees of draft tokens: equal tokens, different speeds.

    python examples/compare_methods.py [TARGET DRAFTER]

`blockdraft bench` does this with whole prompt sets and repeats.
"""

import sys

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine import merge

PROMPTS = [
    "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?",
    "Ben reads 15 pages a day. His book has 180 pages. After 7 days, how many pages are left to read?",
]
METHODS = {
    "plain": ("none", Drafting(block_size=None)),
    "chains": ("", Drafting(block_size=None)),
    "trees of 16": ("", Drafting(tree_budget=16)),
    "as far as pays": ("", Drafting(tree_budget="auto")),
    "lookup": ("lookup", Drafting(block_size=None)),
}


def main(path: str | None = None, drafter: str | None = None) -> None:
    target = load_target(path)
    params = SamplingParams(max_new_tokens=128)
    tokens = []
    for name, (method_drafter, drafting) in METHODS.items():
        engine = Engine(target, load_drafter(method_drafter or drafter, target=target), drafting=drafting)
        engine.generate(PROMPTS[:1], params)  # warm-up
        answers = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
        tokens.append([answer.token_ids for answer in answers])
        stats = merge(answer.stats for answer in answers)
        print(f"{name:15} {stats.tokens_per_second:8.1f} tokens/s, tau {stats.tau:.2f}")
    print("same tokens:", all(other == tokens[0] for other in tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
