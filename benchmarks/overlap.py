"""Whether drafting while the target verifies would pay: `python -m benchmarks.overlap --prompts FILE`.

Speculative speculative decoding (arXiv 2603.03251) drafts on a device of its own for the k likeliest outcomes of a
verification, while that runs. Where the real outcome is among them, the next draft is there at once; else it is made
afterwards, as usual. Smaller language models do so (`load_drafter(..., device=..., ahead=k)`); other drafters do not.
Times measured on this machine give the speed-up, and the share of the draft in a cycle from which on it pays.

Measured are the share h of outcomes (the number of accepted guesses, and the target's token after them) among the k
that the drafter thinks likeliest, one request at a time, and the seconds of a draft, of k drafts in one batch, and of
the rest of a cycle. With --drafter-device a language model really drafts ahead there, and outcomes that were not ready
in time count as not foreseen. Computed:

    cycle = handover + h * max(rest, k drafts) + (1 - h) * (rest + draft)

Blocks drafted ahead are assumed to be accepted as far as others. That favours drafters that read the target's hidden
states, which are not known yet for tokens under verification; one that reads tokens only loses nothing. On one device
for both, k drafts come on top of the rest.

Written: overlap.md, overlap.json and overlap.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.command import Parser, in_words
from benchmarks.harness.report import picture, table, write_files
from blockdraft.decode.proposal import ChainPlan, Plan, Proposal
from blockdraft.drafters import Drafter, hits, load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.machine import wait_for
from blockdraft.targets import Target, load_target
from blockdraft.timing import DRAFT_TOKENS, HEAD, PASS, listening
from blockdraft.types import Drafting, SamplingParams

COUNTS = (1, 2, 4, 8)  # outcomes that are drafted for
TREE = 256  # guesses among which the likeliest outcomes are searched
AHEAD = (
    PASS,
    HEAD,
    DRAFT_TOKENS,
)  # parts of a cycle that can be done ahead; keys and values of committed tokens cannot
NOISE = 1.96  # standard deviations of a 95 % interval

Outcome = tuple[int, int]  # guesses accepted, and the target's token after them


@dataclass(frozen=True)
class Times:
    """Median seconds.

    Attributes:
        rest: Of a cycle of one request, without its draft.
        drafts: Of so many drafts in one batch.
    """

    rest: float
    drafts: dict[int, float]


@dataclass(frozen=True)
class Figures:
    """Figures of drafting ahead for `count` outcomes.

    Attributes:
        hits: Share of the cycles whose outcome was foreseen.
        noise: Half the width of its 95 % interval.
        drafts: Seconds of so many drafts in one batch.
        speedup: Over drafting after verification, with a device of its own for the drafter.
        one_device: The same where both share one.
        pays: Shares of the draft in a usual cycle between which the former is above 1, with the same hits and the same
            cost of a batch of drafts over one; None where there are none.
    """

    count: int
    hits: float
    noise: float
    drafts: float
    speedup: float
    one_device: float
    pays: tuple[float, float] | None


def ranked(proposal: Proposal, draft_tokens: Sequence[int], most: int) -> list[Outcome]:
    """The outcomes of verifying a chain that the drafter thinks likeliest, best first.

    Args:
        proposal: The drafter's tree behind the same anchor, its first row, with chances.
        draft_tokens: The chain.
    """
    assert proposal.acceptance_probs is not None, "a drafter that grows trees says how likely its guesses are"
    tokens, parents = proposal.tokens[0].tolist(), proposal.parent_lists[0]
    on_chain, found = {0: 0}, list[tuple[float, Outcome]]()  # by node of the chain the guesses accepted there
    for node, acceptance_prob in enumerate(proposal.acceptance_probs[0], start=1):
        accepted = on_chain.get(parents[node])
        if accepted is None:
            continue
        if accepted < len(draft_tokens) and tokens[node] == draft_tokens[accepted]:
            on_chain[node] = accepted + 1
        else:
            found.append((acceptance_prob, (accepted, tokens[node])))
    found.sort(key=lambda each: -each[0])
    return [outcome for _, outcome in found[:most]]


def speedup(hits: float, rest: float, draft: float, drafts: float, handover: float = 0.0) -> float:
    """Speed-up of drafts on a device of their own over drafting after verification; times in any unit."""
    return (rest + draft) / (handover + hits * max(rest, drafts) + (1 - hits) * (rest + draft))


def one_device(hits: float, rest: float, draft: float, drafts: float) -> float:
    """Speed-up on one device, which does one thing after the other."""
    return (rest + draft) / (rest + drafts + (1 - hits) * draft)


def pays_between(hits: float, growth: float, handover: float) -> tuple[float, float] | None:
    """Shares of the draft in a usual cycle between which drafts on a device of their own make it faster.

    With the rest of a cycle as the unit and d for a draft, a hit saves 1 + d - max(1, growth * d), and that has to be
    more than handover / hits.

    Args:
        growth: Time of a batch of drafts over that of one.
        handover: Over the rest of a cycle.
    """
    least = handover / hits if hits else math.inf
    if least * growth >= 1:  # not even drafts that take just as long as the rest save enough
        return None
    most = (1 - least) / (growth - 1) if growth > 1 else math.inf
    return least / (1 + least), 1.0 if most == math.inf else most / (1 + most)


def shares(cycles: Sequence[tuple[Sequence[Outcome], Outcome]]) -> dict[int, float]:
    """Shares of foreseen outcomes, by the number that is drafted for.

    Args:
        cycles: Likeliest outcomes, and the real one, of each cycle.
    """
    return {count: sum(real in foreseen[:count] for foreseen, real in cycles) / len(cycles) for count in COUNTS}


def figures(foreseen: Mapping[int, float], cycles: int, times: Times, handover: float) -> list[Figures]:
    """Figures of each number of drafts that was timed.

    Args:
        foreseen: Shares, as from `shares`.
        cycles: Number of cycles.
        handover: Seconds.
    """
    draft, rest = times.drafts[1], times.rest
    return [
        Figures(
            count=count,
            hits=(share := foreseen[count]),
            noise=NOISE * math.sqrt(share * (1 - share) / cycles),
            drafts=drafts,
            speedup=speedup(share, rest, draft, drafts, handover),
            one_device=one_device(share, rest, draft, drafts),
            pays=pays_between(share, drafts / draft, handover / rest),
        )
        for count, drafts in times.drafts.items()
    ]


class Foreseer(Drafter):
    """Drafts chains as another drafter does, and notes which outcomes it thinks likeliest."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.path, self.target_layers, self.block_size = drafter.path, drafter.target_layers, drafter.block_size
        self.knows_probabilities = self.knows_lengths = False
        for name in ("new_state", "state_bytes", "weight_bytes", "observe"):
            setattr(self, name, getattr(drafter, name))
        self.foreseen: list[list[Outcome]] = []

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        tree = ChainPlan(self.block_size, plan.params, cycle_seconds=[1.0] * (1 + TREE)).as_tree(
            TREE
        )  # one token more than is verified
        said, chain = self._drafter.propose(state, anchor, tree), self._drafter.propose(state, anchor, plan)
        self.foreseen.append(ranked(said, chain.tokens[0, 1:].tolist(), max(COUNTS)))
        return chain


def measure_outcomes(
    target: Target, drafter: Drafter, prompts: Sequence[Any], block_size: int, params: SamplingParams
) -> list[tuple[list[Outcome], Outcome]]:
    """Foreseen outcomes and the real one, by cycle."""
    found = []
    with Engine(target, foreseer := Foreseer(drafter), 1, Drafting(block_size)) as engine:
        for prompt in prompts:
            foreseer.foreseen.clear()
            drafted = [
                (chunk.token_ids, len(chunk.cycle.path) - 1)
                for chunk in engine.stream(prompt, params, trace=True)
                if chunk.cycle is not None and len(chunk.cycle.tokens) > 1
            ]
            for foreseen, (tokens, accepted) in zip(foreseer.foreseen, drafted, strict=True):
                if len(tokens) == accepted + 1:  # not cut at the end of the answer
                    found.append((foreseen, (accepted, tokens[-1])))
    return found


def measure_ahead(
    target: Target, path: str, device: str, prompts: Sequence[Any], block_size: int, params: SamplingParams
) -> tuple[dict[int, float], int]:
    """The same shares of a language model that drafts ahead on a device of its own, and the cycles of the fewest."""
    found, cycles = dict[int, float](), list[int]()
    for count in COUNTS:
        drafter = load_drafter(path, target=target, device=device, ahead=count)
        with Engine(target, drafter, 1, Drafting(block_size)) as engine:
            for prompt in prompts:
                engine.generate([prompt], params)
        foreseen, tried = hits(drafter)
        cycles.append(tried)
        found[count] = foreseen / max(tried, 1)
    return found, min(cycles)


def measure_times(target: Target, drafter: Drafter, block_size: int, context: int, cycles: int) -> Times:
    """Times on this machine, with batches of arbitrary tokens."""
    rests, drafts = list[float](), dict[int, float]()
    for count in COUNTS:
        plan, ahead = ChainPlan(block_size, [SamplingParams()] * count), list[float]()
        with target.lock:
            runner, rows = Probe(target, drafter).rows(count, context, (1 + cycles) * block_size)
            for _ in range(1 + cycles):
                with listening(lambda: wait_for(target.device)) as seconds:
                    runner.step(rows, plan)
                ahead.append(sum(seconds[part] for part in AHEAD))
                if count == 1:
                    rests.append(sum(seconds.values()) - ahead[-1])
        drafts[count] = statistics.median(ahead[1:])
    return Times(statistics.median(rests[1:]), drafts)


def page(found: Sequence[Figures], times: Times, cycles: int) -> str:
    draft, rest = times.drafts[1], times.rest
    text = (
        f"Of {cycles} cycles. A draft takes {1000 * draft:.2f} ms and the rest of a cycle {1000 * rest:.2f} ms: the "
        f"draft's share is {draft / (rest + draft):.1%}. With every outcome foreseen, the speed-up would be "
        f"{speedup(1, rest, draft, draft):.3f}.\n\n"
    )
    header = ["drafts ahead", "outcomes foreseen", "ms a batch", "speed-up, own device", "speed-up, one device"]
    lines = []
    for each in found:
        pays = "never" if each.pays is None else f"{each.pays[0]:.1%} to {each.pays[1]:.1%}"
        speedups = (f"{each.speedup:.3f}", f"{each.one_device:.3f}")
        hits = f"{each.hits:.1%} ± {each.noise:.1%}"
        lines.append([str(each.count), hits, f"{1000 * each.drafts:.2f}", *speedups, pays])
    return text + table([*header, "own device pays where the draft's share is"], lines) + "\n"


def draw(found: Sequence[Figures], times: Times, handover: float, path: Path) -> None:
    """Outcomes foreseen, and the speed-up by the draft's share of a cycle, with that of this machine marked."""
    draft, parts = times.drafts[1], [n / 200 for n in range(1, 180)]
    with picture(path, 1, 2, figsize=(11, 4.5)) as (_, [[left, right]]):
        counts, hits = [str(each.count) for each in found], [each.hits for each in found]
        left.bar(counts, hits, yerr=[each.noise for each in found], capsize=4)
        left.set(xlabel="drafts ahead", ylabel="share of outcomes foreseen", ylim=(0, 1))
        for each in found:
            lengths = [times.rest * part / (1 - part) for part in parts]  # of a draft
            growth = each.drafts / draft
            gains = [speedup(each.hits, times.rest, length, growth * length, handover) for length in lengths]
            right.plot(parts, gains, label=f"{each.count} ahead")
        right.axhline(1, color="black", linewidth=0.8)
        right.axvline(draft / (times.rest + draft), color="tab:gray", linestyle="--", label="this machine")
        right.set(xlabel="draft's share of a usual cycle", ylabel="speed-up with a device of its own")
        right.legend()


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__, out=Path("build/overlap"))
    add = parser.add_argument
    add("--prompts", type=Path, action="append", required=True, help="prompt set; may be repeated")
    add("--target", help="by default the bundled pair's")
    add("--drafter", help="one that grows trees, or a language model; by default the bundled one")
    add("--drafter-device", help="where a language model, as --drafter, drafts ahead; needed for one")
    add("--block-size", type=int, help="tokens verified, at most; by default the drafter's, less one")
    add("--limit", type=int, default=16, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--handover", type=float, default=0.05, help="milliseconds a cycle, from device to device")
    add("--context", type=int, default=256, help="tokens of the text while times are measured")
    add("--cycles", type=int, default=30, help="cycles that are timed, for each number of drafts")
    args = parser.parse(words)
    with in_words():
        run(args)


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    sets = read_prompt_sets(args.prompts, args.limit)
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target=target, device=args.drafter_device)
    block_size = drafter.block_size - 1 if args.block_size is None else args.block_size
    if not 2 <= block_size < drafter.block_size:
        raise ValueError(
            f"--block-size is {block_size}; it must be from 2 to {drafter.block_size - 1}, since the last token of the "
            "drafter's block foresees what follows the others."
        )
    if not drafter.knows_probabilities:
        raise ValueError(f"{args.drafter} does not say how likely its guesses are; name another --drafter.")
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=0)
    prompts = [prompt for one in sets for prompt in one.prompts]
    how = {"prompts": prompts, "block_size": block_size, "params": params}
    if args.drafter_device is None:
        outcomes = measure_outcomes(target, drafter, **how)
        foreseen, cycles = shares(outcomes) if outcomes else {}, len(outcomes)
    else:
        foreseen, cycles = measure_ahead(target, args.drafter, args.drafter_device, **how)
    if not cycles:
        raise ValueError("No cycle drafted; raise --max-new-tokens or give other --prompts.")
    times = measure_times(target, drafter, block_size, args.context, args.cycles)
    found, handover = figures(foreseen, cycles, times, args.handover / 1000), args.handover / 1000
    facts = {"running": target.running, "device": str(target.device)}
    facts |= {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    facts |= {"prompts": [str(path) for path in args.prompts], "block_size": block_size, "outcomes": cycles}
    facts |= {"times": asdict(times), "figures": [asdict(each) for each in found]}
    text = page(found, times, cycles)
    write_files(args.out, {"overlap.json": facts, "overlap.md": text})
    draw(found, times, handover, args.out / "overlap.png")
    print(text, end="")


if __name__ == "__main__":
    main()
