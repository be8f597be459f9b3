"""Time of the target's forward by number of nodes, and of a draft: compiled and not, few bits, numbers of threads.

    python benchmarks/forwards.py [--shape pair|120m] [--threads 1,2] [--ways off,on,int8,int4] [--dtype float32]

The shape of 120 M parameters has random weights and no drafter; `--keep DIR` leaves it there, for `benchmarks.peers`.
Ways take turns; minima and medians in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from blockdraft.decode.proposal import chain
from blockdraft.drafters import BUNDLED_DFLASH, load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.targets import BUNDLED, Target, load_target

NODES = (1, 2, 4, 6, 8, 16, 32)
BLOCKS = (4, 8, 16)  # tokens of a draft's block, the anchor included
OBSERVED = (1, 4, 16)  # tokens that a drafter is told of at once
REPEATS = 8
CONTEXT = 200


def random_120m(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=15,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with the usual one greedy answers repeat one token
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(folder)
    return folder


@torch.no_grad()
def seconds(work: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times[1:]


def forwards(target: Target) -> dict[tuple[str, int], list[float]]:
    cache = target.new_cache(1, 256)
    prompt = chain(torch.arange(CONTEXT)[None] + 5)
    target.forward(prompt.tokens, prompt.parents, cache)
    cache.commit([range(CONTEXT)])
    nodes = {count: chain(torch.arange(count)[None] + 10) for count in NODES}
    return {
        ("nodes", count): seconds(lambda each=each: target.forward(each.tokens, each.parents, cache))
        for count, each in nodes.items()
    }


def drafts(drafter: DFlashDrafter) -> dict[tuple[str, int], list[float]]:
    """Of a draft pass with the logits of its guesses, and of the keys and values of observed tokens."""
    width = len(drafter.taps) * drafter.config.hidden_size
    state = drafter.new_state(1, 256)
    features = torch.randn(1, CONTEXT, width, dtype=drafter.network.fc.weight.dtype)
    drafter.observe(state, torch.zeros(1, CONTEXT, dtype=torch.long), features, [CONTEXT])
    block = torch.full((1, max(BLOCKS)), drafter.config.mask_token_id)
    found = {
        ("blocks", count): seconds(lambda count=count: drafter._draft_pass(state, block[:, :count], 1))
        for count in BLOCKS
    }
    return found | {
        ("observed", count): seconds(lambda count=count: drafter.observe(state, block, features[:, :count], [0]))
        for count in OBSERVED
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="pair")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--ways", default="off,on,int8,int4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the shape of 120 M parameters is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = BUNDLED if options.shape == "pair" else random_120m(options.keep or Path(folder))
        targets, drafters = {}, {}
        for way in options.ways.split(","):
            quantize = way if way in ("int8", "int4") else None
            how = "on" if quantize else way
            targets[way] = load_target(path, options.dtype, "cpu", "native", how, quantize, threads=1)  # type: ignore[arg-type]
            if options.shape == "pair":
                drafters[way] = load_drafter(BUNDLED_DFLASH, target=targets[way])
                reason = drafters[way].compile_reason  # type: ignore[attr-defined]
                if how == "on" and reason is not None:
                    raise SystemExit(f"The drafter is not compiled: {reason}.")
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        found: dict[tuple[str, str, int], list[float]] = {}
        for _ in range(options.rounds):
            for way, target in targets.items():
                times = forwards(target) | (drafts(drafters[way]) if way in drafters else {})
                for what, each in times.items():
                    found.setdefault((way, *what), []).extend(each)
        for way in targets:
            for what, counts in (("nodes", NODES), ("blocks", BLOCKS), ("observed", OBSERVED)):
                cells = [(min(each), statistics.median(each)) for n in counts if (each := found.get((way, what, n)))]
                if not cells:
                    continue  # the larger shape has no drafter
                print(f"{options.shape} {options.dtype} {way:5} {threads} threads, {what} {counts}:", end=" ")
                print("  ".join(f"{1000 * low:.2f}/{1000 * middle:.2f}" for low, middle in cells), flush=True)


if __name__ == "__main__":
    main()
