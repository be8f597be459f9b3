"""On trial: slots of a block begin as what the target said after rejected guesses (after arXiv 2609.06498, "DFlow").

A cycle computes the target's laws after guesses that turn out to be wrong, and forgets them. Here they are what the
next draft pass begins with: the slot of the j-th token behind the anchor gets, on top of the mask's embedding, the mean
embedding of the likeliest tokens after the j-th rejected guess. Positions are taken to stay, as if the anchor had
replaced the first rejected guess; the network, which sees the anchor, can learn where to move or to doubt them. Slots
without such a law, and blocks behind a cycle in which all was accepted, are masks as ever.

Why the laws and not the target's hidden states, which the papers hand on: laws need no weights, no further keys and no
further rows in the draft pass, so one pass costs what it did and checkpoints stay DFlash's; most of what the last
hidden state says of the next token is in the law. Why from decoding and not made up: what is rejected depends on what
the drafter gets wrong, and a target's forward on corrupted text would cost a training step as much as the target's
forward over all blocks. So each seed's drafter first answers the prompts of the training data, and what the target said
after rejected guesses is kept with the answers (collected-SEED.jsonl). From these answers it then learns on twice, by
the same recipe for the same steps: as it is (the base), and with refilled slots where an anchor is one of those that
decoding had.

    python -m benchmarks.trials.refill --data DATA --prompts gsm8k.jsonl --prompts humaneval.jsonl

The drafters (--drafter, once for each) are of DFlash's kind and differ in their seed of training; by default they are
those that the trial `redraft` has made as its base. Passes cost what they did. It pays if the speed-up is more than
1.03 times that of the base for each seed on each of at least two prompt sets (see report.py); the last line says so. An
interrupted trial goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.command import in_words
from benchmarks.trials.collected import LIKELY, WINDOW, Known, as_data, collect, key, known_of, known_places, prompts_of
from benchmarks.trials.overheard import Overheard, Rejected, rejected
from benchmarks.trials.trial import ROOT, Contender, CountedDFlash, Trial, drafters_of, learn, parser, with_drafters
from blockdraft.data.documents import read_data
from blockdraft.drafters.base import Entry
from blockdraft.drafters.dflash import load
from blockdraft.errors import UsageError
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.proposal import Plan, Proposal
from blockdraft.settings import settings
from blockdraft.targets import Target
from blockdraft.timing import HEAD, PASS, mark
from blockdraft.training.batches import Rows
from blockdraft.training.recipe import Recipe
from blockdraft.training.variants.dflash import DFlashFamily, DFlashRecipe

BASE, ON_TRIAL = "base", "refill"


def filling(embed: Callable[[Tensor], Tensor], blocks: Sequence[Known | None], slots: int, on: torch.device) -> Tensor:
    """What is added to the masks of blocks, `[M, slots, H]` float32: mean embeddings, 0 where nothing is known."""
    ids, shares = torch.zeros(len(blocks), slots, LIKELY, dtype=torch.long), torch.zeros(len(blocks), slots, LIKELY)
    for block, known in enumerate(blocks):
        if known is not None:
            chances = known.chances[:slots]
            ids[block, : len(chances)] = known.ids[:slots]
            shares[block, : len(chances)] = chances / chances.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    return (embed(ids.to(on)).float() * shares.to(on).unsqueeze(-1)).sum(dim=-2)


# Drafting


class RefillDrafter(CountedDFlash):
    """DFlash whose masks are refilled. Its guesses are chosen, so the output has the same law.

    Attributes:
        heard: The target that the engine decodes with.
        filled: Whether slots are refilled; else this is DFlash.
        told: Called before each draft with the number of a row's committed tokens and what is known behind its anchor.
    """

    heard: Overheard
    filled = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._left: dict[int, Rejected] = {}  # by row
        self.told: Callable[[int, Known], None] = lambda length, known: None

    def observe(self, state: Any, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        super().observe(state, tokens, features, lengths)
        last = self.heard.last
        for row, said, length in zip(state.rows, tokens.tolist(), lengths, strict=True):
            if length:
                known = last is not None and row in last.rows
                self._left[row] = (
                    rejected(last, list(last.rows).index(row), said[:length]) if known else Rejected([], [])
                )

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        for row, length in zip(state.rows, state.lengths, strict=True):
            self.told(length, known_of(self._left[row]))
        return super().propose(state, anchor, plan)

    def _draft_pass(
        self, state: Any, tokens: Tensor, first: int = 0, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.filled:
            return super()._draft_pass(state, tokens, first, window)
        self.counted[tokens.size(1)] += 1
        target, known = self._target, [known_of(self._left[row]) for row in state.rows]
        block = target.embed(tokens)
        added = filling(target.embed, known, tokens.size(1) - 1, tokens.device)
        block = torch.cat([block[:, :1], (block[:, 1:].float() + added).to(block.dtype)], dim=1)
        hidden = self._run(state, block, window)[:, first:]
        mark(PASS)
        logits = self.network.adjust_logits((self.reduced_head or target.head)(hidden))
        mark(HEAD)
        return hidden, logits


def drafting(path: Path, target: Target, filled: bool) -> tuple[Any, RefillDrafter]:
    """What an engine decodes with: the target, listened at, and the drafter of a folder."""
    drafter = load(path, target, RefillDrafter)
    assert isinstance(drafter, RefillDrafter)
    drafter.heard, drafter.filled = Overheard(target), filled
    return drafter.heard, drafter


# Training


@settings
class RefillRecipe(DFlashRecipe):
    """Fields of DFlash's recipe mean the same here.

    Attributes:
        collected: File of what was known behind anchors of these documents; empty for nothing.
    """

    collected: str = ""


class RefillVariant(DFlashFamily[RefillRecipe, DFlashNetwork]):
    """Blocks behind anchors that decoding had are refilled; all others are masks."""

    recipe_class: ClassVar[type[Recipe]] = RefillRecipe

    def __init__(self, recipe: RefillRecipe) -> None:
        super().__init__(recipe)
        self._known = known_places(Path(recipe.collected)) if recipe.collected else {}

    def hidden(self, network: DFlashNetwork, target: Target, features_BSF: Tensor, rows: Rows) -> Tensor:
        return self.pass_over_blocks(network, target, features_BSF, rows)(self.added(target, rows))[:, :, 1:]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def added(self, target: Target, rows: Rows) -> Tensor:
        """What is added to the masks, `[B, A, K, H]`."""
        slots = rows.tokens_BAL.size(2) - 1
        found = filling(target.embed, list(self.known(rows)), slots, rows.tokens_BS.device)
        return found.view(*rows.anchors_BA.shape, slots, -1)

    def known(self, rows: Rows) -> Iterator[Known | None]:
        """What is known behind each anchor, row after row."""
        places = rows.positions_BS.gather(1, rows.anchors_BA.clamp(min=0)).tolist()
        for tokens, anchors, where in zip(rows.tokens_BS.tolist(), rows.anchors_BA.tolist(), places, strict=True):
            for anchor, place in zip(anchors, where, strict=True):
                begin = anchor - min(place, WINDOW - 1)
                yield self._known.get(key(place, tokens[begin : anchor + 1])) if anchor >= 0 else None


VARIANT = RefillVariant
# What is trained is a DFlash checkpoint, which is loaded as one; this names the layout alone.
DRAFTER = Entry(partial(load, kind=RefillDrafter), layouts=("zlab",), variant=ON_TRIAL)


class Refill:
    """The trial; arguments as on the command line."""

    def __init__(self, words: list[str] | None = None) -> None:
        options = with_drafters(parser(__doc__, ON_TRIAL))
        add = options.add_argument
        add("--data", type=Path, required=True, metavar="DIR", help="token data of the target, by `blockdraft data`")
        recipe = ROOT / "recipes" / "tiny" / "drafter.toml"
        add("--recipe", type=Path, default=recipe, help="as for `blockdraft train dflash`")
        add("--documents", type=int, default=4000, help="whose prompts are answered to learn from (4000)")
        add("--steps", type=int, default=600, help="of learning on (600)")
        self.given = given = options.parse_args(words)
        self.drafters = drafters_of(given)
        fixed = {"recipe": hashlib.sha256(given.recipe.read_bytes()).hexdigest()[:16], "steps": given.steps}
        fixed |= {"data": read_data(given.data).fingerprint, "documents": given.documents}
        self.trial = Trial(given, fixed | {"drafters": list(map(str, self.drafters))})
        room = self.trial.target.max_context - given.max_new_tokens - 1
        self.prompts = prompts_of(given.data, given.documents, room)
        if not self.prompts:
            raise UsageError(f"No document of {given.data} has a prompt of at most {room} tokens; give other data.")

    def made(self, name: str, seed: int) -> tuple[Any, RefillDrafter]:
        given, target, out = self.given, self.trial.target, self.trial.out
        collected, data = out / f"collected-{seed}.jsonl", out / f"data-{seed}"
        if not data.exists():
            listened = drafting(self.drafters[seed], target, filled=False)
            collect(*listened, self.prompts, given.max_new_tokens, collected)
            as_data(collected, target, data)
        changes: dict[str, Any] = {"seed": seed, "steps": given.steps, "init": str(self.drafters[seed])}
        changes |= {} if name == BASE else {"collected": str(collected)}
        folder = out / "drafters" / f"{name}-{seed}"
        learn("dflash" if name == BASE else ON_TRIAL, target, data, folder, given.recipe, **changes)
        return drafting(folder, target, name != BASE)

    def run(self) -> None:
        contenders = [Contender(name, partial(self.made, name), name == BASE) for name in (BASE, ON_TRIAL)]
        self.trial.run(contenders, range(len(self.drafters)))


if __name__ == "__main__":
    with in_words():
        Refill().run()
