"""On trial: DFlash drafts twice in a cycle, the second time given the beginning of its own guesses (arXiv 2610.06011).

Guesses of one pass do not know of each other. So the first ones of a block are put into its slots in place of masks, as
if they had been said, and a second pass of the same drafter guesses what follows them. It is trained for that: in a
share of the blocks the first slots hold the tokens of the data, and only those behind them are taught.

How many guesses are kept is one of these rules:
  once       none, so there is one pass; says what the training costs or brings by itself
  fixed:K    K of them
  sure:T     those whose chance to be accepted with all before them, as the drafter sees it, is at least T; at least one
  unsure:T   the same, but there is a second pass only where the first guess is as likely as that and the last is not
In a tree what follows these guesses has the chances of the second pass, and all else those of the first.

    python -m benchmarks.trials.redraft --data DATA --prompts gsm8k.jsonl --prompts humaneval.jsonl

DATA is what `blockdraft data --regenerate` makes of the target's answers. For each seed a plain drafter (the base) and
one for redrafting are trained by the same recipe on the same tokens, and answer all prompts in all ways. A pass costs
its share of the target's weights; a second one is not given for free. It pays if with one of these rules the speed-up
is more than 1.03 times that of the base for each seed on each of at least two prompt sets (see report.py); the last
line says so. An interrupted trial goes on where it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.command import in_words
from benchmarks.trials.trial import ROOT, Contender, CountedDFlash, Trial, learn, parser
from blockdraft.data.documents import read_data
from blockdraft.drafters.base import Entry
from blockdraft.drafters.dflash import independent_guesses, load, log_probabilities
from blockdraft.errors import UsageError
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.proposal import Plan, Proposal, chain
from blockdraft.sampling import best_tokens
from blockdraft.settings import Share, settings
from blockdraft.targets import Target
from blockdraft.training.batches import Rows, generator
from blockdraft.training.objectives import Slots
from blockdraft.training.recipe import Recipe
from blockdraft.training.variants.dflash import DFlashFamily, DFlashRecipe

BASE, ON_TRIAL = "base", "redraft"
RULES = "once,fixed:1,fixed:2,fixed:4,sure:0.3,sure:0.5,sure:0.7,unsure:0.3,unsure:0.5,unsure:0.7"


# Drafting


@dataclass(frozen=True)
class Rule:
    """How many of the first pass's guesses the second one is given.

    Attributes:
        kind: "once", "fixed", "sure" or "unsure", see above.
        value: K or T.
    """

    kind: str = "once"
    value: float = 0.0

    @property
    def name(self) -> str:
        return self.kind if self.kind == "once" else f"{self.kind}:{self.value:g}"

    def kept(self, chances: Sequence[float]) -> int:
        """Of one row.

        Args:
            chances: Of each guess to be accepted with all before it.

        Returns:
            A number below that of the guesses; 0 where there is no second pass.
        """
        most, sure = len(chances) - 1, sum(chance >= self.value for chance in chances)
        if self.kind == "once":
            return 0
        if self.kind == "fixed":
            return min(int(self.value), most)
        if self.kind == "unsure" and not 0 < sure < len(chances):
            return 0
        return min(max(sure, 1), most)


def parse(name: str) -> Rule:
    """Raises UsageError for what is no rule."""
    kind, _, value = name.partition(":")
    try:
        rule = Rule(kind, float(value or "0"))
    except ValueError:
        rule = Rule("")
    least_most = {"once": (0, 0), "fixed": (1, math.inf), "sure": (1e-9, 1), "unsure": (1e-9, 1)}
    low, high = least_most.get(kind, (1, 0))
    if not low <= rule.value <= high or (kind == "fixed" and rule.value % 1):
        raise UsageError(f"Rule {name!r} is unknown; a rule is once, fixed:K, sure:T or unsure:T, K from 1, T up to 1.")
    return rule


class RedraftDrafter(CountedDFlash):
    """DFlash with a second pass where its rule asks for one. Its guesses are chosen, so the output has the same law.
    Trees have as many nodes as they may.

    Attributes:
        rule: To be set before use; by itself there is one pass.
    """

    rule = Rule()

    @torch.no_grad()
    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        masks = self._masks[:, 1 : plan.block_size].expand(len(anchor), -1)
        first = self._draft_pass(state, torch.cat([anchor[:, None], masks], dim=1), 1, plan.draft_window)[1]
        laws = log_probabilities(first, plan.params)
        kept = [self.rule.kept(row) for row in laws.amax(dim=-1).cumsum(dim=-1).exp().tolist()]
        rows = [row for row, count in enumerate(kept) if count]
        if not rows:
            return independent_guesses(anchor, first, plan)
        guesses = best_tokens(first)
        known = torch.arange(masks.size(1), device=anchor.device) < torch.tensor(kept, device=anchor.device)[:, None]
        blocks = torch.cat([anchor[:, None], torch.where(known, guesses, masks)], dim=1)[rows]
        part = state.of([state.rows[row] for row in rows])
        second = first.clone()
        second[rows] = self._draft_pass(part, blocks, 1, plan.draft_window)[1]
        # Slots that the second pass was given have the laws of the first.
        second = torch.where(known.unsqueeze(-1), first, second)
        if not plan.tree_budget:
            return independent_guesses(anchor, second, plan)
        return _tree(anchor, guesses, kept, laws, log_probabilities(second, plan.params), plan.tree_budget)


def _tree(anchor: Tensor, guesses: Tensor, kept: Sequence[int], first: Tensor, second: Tensor, budget: int) -> Proposal:
    """The likeliest nodes by the second pass's chances behind the guesses that it was given, and by the first's
    elsewhere.

    Args:
        guesses: `[B, D]`, of which the first `kept` of each row were given.
        first, second: Log probabilities `[B, D, V]`.
    """
    tops = [laws.topk(min(budget, laws.size(-1)), dim=-1) for laws in (first, second)]
    scores, tokens = zip(*((top.values.tolist(), top.indices.tolist()) for top in tops), strict=True)
    rows = []
    for row, count in enumerate(kept):
        given, nodes = guesses[row, :count].tolist(), list[tuple[int, int]]()
        # Of a candidate cost, parent, depth and rank, what its parent costs, and whether that is on the path given.
        heap = [(-scores[0][row][0][0], 0, 0, 0, 0.0, True)]
        while heap and len(nodes) < budget:
            cost, parent, depth, rank, before, on_path = heappop(heap)
            law = int(on_path and depth >= count > 0)
            token = tokens[law][row][depth][rank]
            nodes.append((parent, token))
            if rank + 1 < len(scores[law][row][depth]):
                sibling = before - scores[law][row][depth][rank + 1]
                heappush(heap, (sibling, parent, depth, rank + 1, before, on_path))
            if depth + 1 < guesses.size(1):
                goes_on = on_path and (depth >= count or token == given[depth])
                child = cost - scores[int(goes_on and depth + 1 >= count > 0)][row][depth + 1][0]
                heappush(heap, (child, len(nodes), depth + 1, 0, cost, goes_on))
        rows.append([(-1, 0), *nodes])
    found = torch.tensor(rows)  # a vocabulary has more tokens than a tree has nodes, so that all trees are alike
    parents, chosen = found[..., 0], found[..., 1].to(anchor.device)
    chosen[:, 0] = anchor
    return Proposal(chosen, parents)


# Training


@settings
class RedraftRecipe(DFlashRecipe):
    """Fields of DFlash's recipe mean the same here.

    Attributes:
        shown: Share of the blocks whose first slots hold the tokens of the data, as those of a second pass hold
            guesses.
    """

    shown: Share = 0.5


class RedraftVariant(DFlashFamily[RedraftRecipe, DFlashNetwork]):
    """Figures of training count the slots that are shown as guesses too; those of held-out documents are of a first
    pass."""

    recipe_class: ClassVar[type[Recipe]] = RedraftRecipe

    def hidden(self, network: DFlashNetwork, target: Target, features_BSF: Tensor, rows: Rows) -> Tensor:
        """`[B, A, K, H + 1]`: last comes how many slots of the block were shown."""
        known_BA = self.known(rows) if network.training else torch.zeros_like(rows.anchors_BA)
        known_BA11 = known_BA[..., None, None]
        slots_K1 = torch.arange(1, rows.tokens_BAL.size(2), device=known_BA11.device)[:, None]
        tokens = target.embed(rows.tokens_BAL[:, :, 1:]).float()
        mask = target.embed(torch.tensor(network.config.mask_token_id, device=tokens.device)).float()
        shown = torch.where(slots_K1 <= known_BA11, tokens - mask, 0.0)
        hidden = self.pass_over_blocks(network, target, features_BSF, rows)(shown)[:, :, 1:]
        return torch.cat([hidden, known_BA11.expand(*hidden.shape[:-1], 1).to(hidden)], dim=-1)

    def logits(self, network: DFlashNetwork, target: Target, hidden_CKH: Tensor) -> Tensor:
        return super().logits(network, target, hidden_CKH[..., :-1])

    def losses(self, network: DFlashNetwork, slots: Slots) -> dict[str, Tensor]:
        """Slots behind those that are shown weigh as if the block began there."""
        known_CK = slots.hidden_CKH[..., -1].float()
        hidden = torch.arange(1, known_CK.size(1) + 1, device=known_CK.device) > known_CK
        found = super().losses(network, replace(slots, taught_CK=slots.taught_CK & hidden))
        grown = torch.exp(known_CK / self.gamma) if self.gamma else torch.ones_like(known_CK)
        return {
            name: (losses * grown if self.decayed(name) else losses).masked_fill(~hidden, 0)
            for name, losses in found.items()
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def known(self, rows: Rows) -> Tensor:
        """How many slots of each block are shown, `[B, A]` int64: each number alike that leaves one to be taught. Drawn
        from the seed, the text and the anchors, so that a run that goes on draws the same."""
        order = torch.arange(1, 1 + rows.anchors_BA.size(1), device=rows.anchors_BA.device)
        texts, anchors = rows.tokens_BS.sum(dim=1), ((1 + rows.anchors_BA) * order).sum(dim=1)
        drawn = [
            torch.rand(2, len(order), generator=generator(self.recipe.seed, text, anchor))
            for text, anchor in torch.stack([texts, anchors], dim=1).tolist()
        ]
        is_shown, share = torch.stack(drawn, dim=1).to(rows.anchors_BA.device)
        most = (rows.taught_BAK.long().cumprod(dim=-1).sum(dim=-1) - 1).clamp(min=0)
        count = 1 + (share * most).long()
        return torch.where((is_shown < self.recipe.shown) & (most > 0), count, 0)


VARIANT = RedraftVariant
# What is trained is a DFlash checkpoint, which is loaded as one; this names the layout alone.
DRAFTER = Entry(partial(load, kind=RedraftDrafter), layouts=("zlab",), variant=ON_TRIAL)


class Redraft:
    """The trial; arguments as on the command line."""

    def __init__(self, words: list[str] | None = None) -> None:
        options = parser(__doc__, ON_TRIAL)
        add = options.add_argument
        add("--data", type=Path, required=True, metavar="DIR", help="token data of the target, by `blockdraft data`")
        add(
            "--recipe",
            type=Path,
            default=ROOT / "recipes" / "tiny" / "drafter.toml",
            help="of `blockdraft train dflash`",
        )
        add("--steps", type=int, help="of each training, instead of the recipe's")
        add("--features", help="folder of stored features, or memory, instead of the recipe's")
        add("--seeds", type=int, default=3, help="of each drafter (3)")
        add("--shown", type=float, default=RedraftRecipe.shown, help="share of the blocks that show tokens (0.5)")
        add("--rules", default=RULES, help=f"when there is a second pass ({RULES})")
        self.given = given = options.parse_args(words)
        if given.seeds < 1:
            raise UsageError(f"--seeds is {given.seeds}; give at least 1.")
        self.rules = [parse(word) for word in given.rules.split(",")]
        fixed = {"recipe": hashlib.sha256(given.recipe.read_bytes()).hexdigest()[:16]}
        fixed |= {"data": read_data(given.data).fingerprint}
        self.trial = Trial(given, fixed | {"steps": given.steps, "shown": given.shown})

    def made(self, name: str, rule: Rule, seed: int) -> tuple[Target, RedraftDrafter]:
        given, target, out = self.given, self.trial.target, self.trial.out / "drafters" / f"{name}-{seed}"
        changes: dict[str, Any] = {"seed": seed}
        changes |= {key: getattr(given, key) for key in ("steps", "features") if getattr(given, key) is not None}
        changes |= {} if name == BASE else {"shown": given.shown}
        learn("dflash" if name == BASE else ON_TRIAL, target, given.data, out, given.recipe, **changes)
        drafter = load(out, target, RedraftDrafter)
        assert isinstance(drafter, RedraftDrafter)
        drafter.rule = rule
        return target, drafter

    def run(self) -> None:
        contenders = [Contender(BASE, partial(self.made, BASE, Rule()), True)]
        contenders += [Contender(rule.name, partial(self.made, ON_TRIAL, rule)) for rule in self.rules]
        self.trial.run(contenders, range(self.given.seeds))


if __name__ == "__main__":
    with in_words():
        Redraft().run()
