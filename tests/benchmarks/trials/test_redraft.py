"""Suffix redrafting: what the second pass is given, what comes of it, and what its training sees."""

from dataclasses import replace
from heapq import nlargest
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.trials import redraft
from benchmarks.trials.redraft import RedraftDrafter, RedraftRecipe, RedraftVariant, Rule, parse
from benchmarks.trials.rooms import with_rooms
from blockdraft.data.features import tapped_features
from blockdraft.drafters import entry_of_variant
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.proposal import Plan, Proposal
from blockdraft.targets import Target, load_target
from blockdraft.training.batches import Rows
from blockdraft.training.objectives import Slots
from blockdraft.training.variants import find_variant, variant_names
from blockdraft.training.variants.dflash import DFlashVariant
from blockdraft.types import Drafting, SamplingParams

TEXTS = torch.randint(5, 200, (3, 24), generator=torch.Generator().manual_seed(2))
LENGTHS = [20, 12, 16]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


@pytest.fixture
def drafter(target: Target, tiny_drafter_dir: Path) -> RedraftDrafter:
    """With weights of some size, so that what is in a slot matters."""
    config, tensors = read_checkpoint(tiny_drafter_dir)
    network, random = DFlashNetwork(config), torch.Generator().manual_seed(3)
    network.load_state_dict({n: t + 0.6 * torch.randn(t.shape, generator=random) for n, t in tensors.items()})
    return RedraftDrafter(network.requires_grad_(False), target)


def told(drafter: RedraftDrafter, target: Target, rows: list[int]) -> tuple[Any, Tensor]:
    """The state after some texts, and what is their anchors."""
    state = drafter.new_state(len(rows), 64)
    features = torch.stack(tapped_features(target, drafter.taps, list(TEXTS[rows])))
    lengths = [LENGTHS[row] for row in rows]
    drafter.observe(state, TEXTS[rows], features, lengths)
    return state, TEXTS[rows, lengths]


def plan(rows: int, **changes: Any) -> Plan:
    return replace(Plan(8, [SamplingParams()] * rows), **changes)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("once", 0), ("fixed:2", 2), ("fixed:9", 3), ("sure:0.5", 2), ("sure:0.95", 1), ("sure:0.01", 3)]
    + [("unsure:0.5", 2), ("unsure:0.95", 0), ("unsure:0.01", 0)],
)
def test_rules_say_how_many_guesses_are_kept(name: str, kept: int) -> None:
    assert parse(name).name == name and parse(name).kept([0.9, 0.6, 0.4, 0.1]) == kept
    assert parse(name).kept([0.9]) == 0  # nothing stands behind it


@pytest.mark.parametrize("name", ["twice", "fixed", "fixed:0", "fixed:1.5", "sure:0", "sure:2", "sure:x", "once:1"])
def test_what_is_no_rule_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"Rule '{name}' is unknown"):
        parse(name)


def test_the_second_pass_sees_the_first_guesses(drafter: RedraftDrafter, target: Target) -> None:
    state, anchor = told(drafter, target, [0])
    mask = drafter.config.mask_token_id
    first = drafter.propose(state, anchor, plan(1)).tokens[0]
    drafter.rule = Rule("fixed", 2)
    drafter.counted.clear()
    found = drafter.propose(state, anchor, plan(1)).tokens[0]
    assert drafter.counted == {8: 2}
    expected = drafter._draft_pass(state, torch.tensor([[*first[:3].tolist(), *[mask] * 5]]), 1)[1].argmax(dim=-1)[0]
    assert torch.equal(found[:3], first[:3]) and torch.equal(found[3:], expected[2:])
    other = drafter._draft_pass(state, torch.tensor([[int(anchor), 7, 8, *[mask] * 5]]), 1)[1].argmax(dim=-1)[0]
    assert not torch.equal(found[3:], first[3:]) and not torch.equal(found[3:], other[2:])


def test_rows_are_repeated_each_by_itself(drafter: RedraftDrafter, target: Target) -> None:
    state, anchor = told(drafter, target, [0, 1, 2])
    once = drafter.propose(state, anchor, plan(3)).tokens
    log_probs = drafter._draft_pass(state, _masked(drafter, anchor), 1)[1].log_softmax(dim=-1).amax(dim=-1)
    drafter.rule = Rule("unsure", float(log_probs[:, 0].exp().min()) + 1e-6)  # so that two rows are sure
    for budget in (0, 8):
        together = drafter.propose(state, anchor, plan(3, tree_budget=budget))
        for row in range(3):
            alone = drafter.propose(*told(drafter, target, [row]), plan(1, tree_budget=budget))
            assert torch.equal(together.tokens[row], alone.tokens[0])
            assert torch.equal(together.parents[row], alone.parents[0])
        if not budget:
            changed = (together.tokens != once).any(dim=-1)
            sure = log_probs[:, 0].exp() >= drafter.rule.value
            assert changed.any() and sure.sum() == 2 and not changed[~sure].any()


@pytest.mark.parametrize("kept", [[1, 2], [0, 1]])
def test_a_tree_has_the_second_chances_behind_what_was_given(kept: list[int]) -> None:
    """Against all paths; of two rows, each with guesses and laws of its own."""
    random = torch.Generator().manual_seed(kept[0])
    first, second = ((3 * torch.randn(2, 3, 12, generator=random)).log_softmax(dim=-1) for _ in range(2))
    guesses = first.argmax(dim=-1)
    tree = redraft._tree(torch.tensor([3, 4]), guesses, kept, first, second, 40)
    assert tree.tokens[:, 0].tolist() == [3, 4]
    deep = set[bool]()
    for row, count in enumerate(kept):
        given = tuple(guesses[row, :count].tolist())
        chances: dict[tuple[int, ...], float] = {}
        for depth in (1, 2, 3):
            for path in product(range(12), repeat=depth):
                behind = second if given and path[:count] == given else first
                laws = [*first[row, :count], *behind[row, count:]]
                chances[path] = sum(float(law[token]) for law, token in zip(laws, path, strict=False))
        best = set(nlargest(40, chances, key=chances.__getitem__))
        assert _paths(tree, row) == best
        deep |= {path[:count] == given for path in best if given and len(path) > count}
    assert deep == {True, False}  # both laws decide


def test_trees_are_of_both_passes(drafter: RedraftDrafter, target: Target) -> None:
    state, anchor = told(drafter, target, [1])
    asked = plan(1, tree_budget=10, params=[SamplingParams(temperature=0.2)])
    once = drafter.propose(state, anchor, asked)
    drafter.rule = Rule("fixed", 1)
    assert _paths(drafter.propose(state, anchor, asked), 0) != _paths(once, 0)


def _masked(drafter: RedraftDrafter, anchor: Tensor) -> Tensor:
    return torch.cat([anchor[:, None], torch.full((len(anchor), 7), drafter.config.mask_token_id)], dim=1)


def _paths(tree: Proposal, row: int) -> set[tuple[int, ...]]:
    found = list[tuple[int, ...]]([()])
    for node in range(1, tree.tokens.size(1)):
        found.append((*found[tree.parent_lists[row][node]], int(tree.tokens[row, node])))
    return set(found[1:])


@pytest.mark.parametrize(("rule", "budget"), [("fixed:2", 0), ("sure:0.05", 12), ("unsure:0.05", 0)])
def test_decoding_says_what_plain_decoding_says(
    rule: str, budget: int, drafter: RedraftDrafter, target: Target
) -> None:
    prompts = [[5 + i, 9, 90 - i] for i in range(4)]
    params = [SamplingParams(14, 0.0 if i % 2 else 0.4, seed=i) for i in range(4)]
    plain = Engine(target, NoDrafter()).generate(prompts, params)
    drafter.rule = parse(rule)
    drafted = Engine(target, drafter, 3, Drafting(8, budget)).generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    cycles = max(len(one.stats.committed) for one in drafted)
    assert sum(drafter.counted.values()) > cycles  # some were repeated


# Training

RECIPE = RedraftRecipe(layers=2, taps=(0, 1), block_size=8, save_dtype="float32", mask_token_id=3, shown=1.0)
ANCHORS = torch.tensor([[3, 6, 12, 17], [1, 4, 7, -1]])


@pytest.fixture(scope="module")
def rows() -> Rows:
    places = (ANCHORS.unsqueeze(-1) + torch.arange(8)).clamp(min=0)
    inside = places.clamp(max=23)
    blocks = TEXTS[:2].gather(1, inside.flatten(1)).view(places.shape)
    taught = (ANCHORS >= 0).unsqueeze(-1) & (places[:, :, 1:] < 19)
    places, documents = torch.arange(24).expand(2, -1), torch.zeros(2, 24, dtype=torch.long)
    return Rows(TEXTS[:2], places, documents, ANCHORS, blocks, taught)


def test_some_slots_are_shown_and_at_least_one_is_taught(rows: Rows) -> None:
    variant = RedraftVariant(RECIPE)
    known = variant.known(rows)
    most = rows.taught_BAK.sum(dim=-1) - 1
    assert most.tolist() == [[6, 6, 5, 0], [6, 6, 6, -1]]
    assert torch.equal(known > 0, most > 0) and bool((known <= most.clamp(min=0)).all())
    assert torch.equal(known, variant.known(rows))
    other = [variant.known(rows._replace(tokens_BS=rows.tokens_BS + i)) for i in range(200)]
    assert {each[0, 2].item() for each in other} == {1, 2, 3, 4, 5}
    few = RedraftVariant(replace(RECIPE, shown=0.25))
    shares = [few.known(rows._replace(tokens_BS=rows.tokens_BS + i))[0, 0].item() > 0 for i in range(200)]
    assert 25 < sum(shares) < 75


def test_training_sees_what_a_second_pass_sees(drafter: RedraftDrafter, target: Target, rows: Rows) -> None:
    variant = RedraftVariant(RECIPE)
    network = variant.network(drafter.config)
    network.load_state_dict(_tensors(drafter))
    features = torch.stack(tapped_features(target, drafter.taps, list(rows.tokens_BS)))
    known = variant.known(rows)
    hidden = variant.hidden(network.train(), target, features, rows)
    logits = variant.logits(network, target, hidden.flatten(0, 1)).view(*hidden.shape[:3], -1)
    plain = variant.hidden(network.eval(), target, features, rows)
    assert not plain[..., -1].any() and torch.equal(hidden[..., -1], known.unsqueeze(-1).expand(-1, -1, 7).float())
    usual = DFlashVariant(_plain(RECIPE)).hidden(network, target, features, rows)
    assert torch.allclose(plain[..., :-1], usual)
    for row in range(2):
        for at, anchor in enumerate(ANCHORS[row].tolist()):
            if anchor < 0:
                continue
            state = drafter.new_state(1, 64)
            drafter.observe(state, rows.tokens_BS[row : row + 1, :anchor], features[row : row + 1, :anchor], [anchor])
            count = int(known[row, at])
            block = _masked(drafter, rows.tokens_BAL[row, at, :1])
            block[0, 1 : 1 + count] = rows.tokens_BAL[row, at, 1 : 1 + count]
            drafted = drafter._draft_pass(state, block, 1)[1]
            assert torch.allclose(logits[row, at], drafted[0], atol=1e-4)


def _plain(recipe: RedraftRecipe) -> Any:
    values = {name: value for name, value in vars(recipe).items() if name != "shown"}
    return DFlashVariant.recipe_class(**values)


def _tensors(drafter: RedraftDrafter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.network.state_dict().items()}


def test_what_is_shown_is_not_taught(target: Target) -> None:
    variant = RedraftVariant(RECIPE)
    random = torch.Generator().manual_seed(1)
    known = torch.tensor([0, 3])
    column = known[:, None, None].expand(-1, 7, 1).float()
    hidden = torch.cat([torch.randn(2, 7, target.hidden_size, generator=random), column], dim=-1)
    tokens, taught = torch.randint(5, 200, (2, 8), generator=random), torch.ones(2, 7, dtype=torch.bool)
    network: Any = type("Network", (), {"adjust_logits": staticmethod(lambda logits: logits)})()
    slots = Slots(hidden, variant.logits(network, target, hidden), tokens, taught)
    losses = variant.losses(network, slots)["decay"]
    usual = DFlashVariant(_plain(RECIPE)).losses(network, slots)["decay"]
    assert torch.allclose(losses[0], usual[0]) and not losses[1, :3].any()
    assert variant.gamma == 4  # the first slot behind three that are shown weighs as the first of a block
    assert torch.allclose(losses[1, 3:], usual[1, 3:] * torch.exp(torch.tensor(3 / 4)))


def test_it_is_found_in_its_rooms_alone() -> None:
    with with_rooms():
        assert find_variant("redraft").recipe_class(shown=0.25).shown == 0.25
        assert entry_of_variant("redraft").layouts == ("zlab",)
    assert "redraft" not in variant_names()
