"""Time of the target's forward by number of nodes, and of a draft: compiled and not, few bits, numbers of threads.

    python benchmarks/forwards.py [--shape pair|120m] [--threads 1,2] [--ways off,on,int8,int4] [--dtype float32]

The shape of 120 M parameters has random weights and no drafter; `--keep DIR` leaves it there, for `benchmarks.peers`.
Ways take turns; minima and medians in milliseconds.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[1]))  # for those who start it as a script

from benchmarks.harness.command import Parser, in_words, listed
from benchmarks.harness.models import forward_calls, milliseconds, why_uncompiled
from benchmarks.harness.turns import time_in_turns
from blockdraft.drafters import BUNDLED_DFLASH, load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.targets import BUNDLED, load_target

COUNTS = {
    "nodes": (1, 2, 4, 6, 8, 16, 32),
    "blocks": (4, 8, 16),  # tokens of a draft's block, the anchor included
    "observed": (1, 4, 16),  # tokens that a drafter is told of at once
}
REPEATS = 8  # of a call in a round; the first one warms up
CONTEXT = 200
SHAPE_120M = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 15, "num_attention_heads": 12}
SHAPE_120M |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 1024}
SHAPE_120M |= {"tie_word_embeddings": True, "eos_token_id": 2}
SHAPE_120M |= {"initializer_range": 0.06}  # with the usual one greedy answers repeat one token


def random_120m(folder: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE_120M)).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(folder)
    return folder


def draft_calls(drafter: DFlashDrafter) -> dict[tuple[str, int], Callable[[], Any]]:
    """Calls of a draft pass with the logits of its guesses, and of the keys and values of observed tokens."""
    width = len(drafter.target_layers) * drafter.config.hidden_size
    state, no_tokens = drafter.new_state(1, CONTEXT + 56), torch.zeros(1, CONTEXT, dtype=torch.long)
    hidden_states = torch.randn(1, CONTEXT, width, dtype=drafter.network.fc.weight.dtype)
    drafter.observe(state, no_tokens, hidden_states, [CONTEXT])
    block = torch.full((1, max(COUNTS["blocks"])), drafter.config.mask_token_id)
    drafts = {n: partial(drafter._draft_pass, state, block[:, :n], 1) for n in COUNTS["blocks"]}
    observed = {n: partial(drafter.observe, state, block, hidden_states[:, :n], [0]) for n in COUNTS["observed"]}
    return {("blocks", n): call for n, call in drafts.items()} | {("observed", n): c for n, c in observed.items()}


def measure(options: Any, path: Path) -> None:
    targets, drafters = {}, {}
    for way in options.ways:
        bits = way if way in ("int8", "int4") else None
        how = {"compile": "on" if bits else way, "quantize": bits, "threads": 1}
        targets[way] = load_target(path, options.dtype, "cpu", "native", **how)
        if options.shape == "pair":
            drafters[way] = load_drafter(BUNDLED_DFLASH, target=targets[way])
            if how["compile"] == "on" and (reason := why_uncompiled(targets[way], drafters[way])):
                raise ValueError(f"Not measured, since {reason}.")
    for threads in options.threads:
        torch.set_num_threads(threads)
        found: dict[tuple[str, str], dict[int, list[float]]] = {}
        for _ in range(options.rounds):
            for way, target in targets.items():
                calls = {("nodes", n): call for n, call in forward_calls(target, CONTEXT, COUNTS["nodes"]).items()}
                calls |= draft_calls(drafters[way]) if way in drafters else {}
                for (what, count), call in calls.items():
                    times = time_in_turns({count: call}, REPEATS - 1, warm_up=1)[count]
                    found.setdefault((way, what), {}).setdefault(count, []).extend(times)
        for (way, what), times in found.items():
            cells = "  ".join(map(milliseconds, times.values()))
            print(f"{options.shape} {options.dtype} {way:5} {threads} threads, {what} {tuple(times)}: {cells}")


@torch.no_grad()
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--shape", choices=("pair", "120m"), default="pair")
    parser.add_argument("--threads", type=listed(int), default="1,2")
    parser.add_argument("--ways", type=listed(), default="off,on,int8,int4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the shape of 120 M parameters is written")
    options = parser.parse()
    with tempfile.TemporaryDirectory() as folder, in_words():
        measure(options, BUNDLED if options.shape == "pair" else random_120m(options.keep or Path(folder)))


if __name__ == "__main__":
    main()
