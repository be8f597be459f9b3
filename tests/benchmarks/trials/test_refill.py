"""Slots that begin as what the target said after rejected guesses: in drafting, in what is collected, in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.trials.collected import Known, as_data, collect, key, known_of, known_places, prompts_of
from benchmarks.trials.overheard import Overheard, Rejected
from benchmarks.trials.refill import RefillDrafter, RefillRecipe, RefillVariant, filling
from blockdraft.data.documents import read_data
from blockdraft.data.features import tapped_features
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.proposal import Plan, chain
from blockdraft.targets import Target, load_target
from blockdraft.training.batches import Rows
from blockdraft.types import Drafting, SamplingParams

TEXT = torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(4))
LIKELY = [[(50, 0.4), (60, 0.2), (70, 0.1), (80, 0.1), (90, 0.1)], [(51, 0.8), (52, 0.1), (53, 0.0), (54, 0.0)]]
LEFT = Rejected([40, 41], LIKELY)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


@pytest.fixture
def drafter(target: Target, tiny_drafter_dir: Path) -> RefillDrafter:
    config, tensors = read_checkpoint(tiny_drafter_dir)
    network, random = DFlashNetwork(config), torch.Generator().manual_seed(3)
    network.load_state_dict({n: t + 0.6 * torch.randn(t.shape, generator=random) for n, t in tensors.items()})
    found = RefillDrafter(network.requires_grad_(False), target)
    found.heard = Overheard(target)
    return found


def test_slots_get_the_mean_embedding_of_the_likeliest_tokens(target: Target) -> None:
    found = filling(target.embed, [known_of(LEFT), None, known_of(Rejected([], []))], 3, target.device)
    assert found.shape == (3, 3, target.hidden_size) and not found[1:].any() and not found[0, 2].any()
    table = target.embed(torch.arange(200))
    assert torch.allclose(found[0, 0], (4 * table[50] + 2 * table[60] + table[70] + table[80]) / 8, atol=1e-5)
    assert torch.allclose(found[0, 1], (8 * table[51] + table[52]) / 9, atol=1e-5)
    one = filling(target.embed, [known_of(LEFT)], 1, target.device)  # of a shorter block
    assert torch.equal(one, found[:1, :1])


def test_a_draft_begins_with_what_the_last_cycle_left(drafter: RefillDrafter, target: Target) -> None:
    heard: Any = drafter.heard
    state, cache = drafter.new_state(1, 64), target.new_cache(1, 64)
    read = heard.forward(TEXT[None, :9], chain(TEXT[None, :9]).parents, cache, drafter.taps, torch.tensor([8]))
    cache.commit([range(9)])
    drafter.observe(state, TEXT[None, :9], read.features, [9])
    told: list[tuple[int, Known]] = []
    drafter.told = lambda length, known: told.append((length, known))
    plan = Plan(8, [SamplingParams()])
    first = drafter.propose(state, TEXT[9:10], plan).tokens
    drafter.filled = False
    assert torch.equal(first, drafter.propose(state, TEXT[9:10], plan).tokens)  # nothing was left, so all are masks
    nodes = first[:, :6]
    output = heard.forward(nodes, chain(nodes).parents, cache, drafter.taps)
    assert output.features is not None
    drafter.observe(state, nodes[:, :2], output.features[:, :2], [2])  # one guess stood, four were rejected
    without = drafter.propose(state, TEXT[11:12], plan).tokens
    drafter.filled = True
    drafter.counted.clear()
    found = drafter.propose(state, TEXT[11:12], plan).tokens
    assert drafter.counted == {8: 1} and not torch.equal(found, without)
    assert [(length, len(known.ids)) for length, known in told] == [(9, 0), (9, 0), (11, 4), (11, 4)]
    law = output.logits[0, 2:6].softmax(dim=-1).topk(4, dim=-1)
    assert torch.equal(told[-1][1].ids, law.indices) and torch.allclose(told[-1][1].chances, law.values)
    block = target.embed(torch.tensor([[int(TEXT[11]), *[drafter.config.mask_token_id] * 7]]))
    block[:, 1:] += filling(target.embed, [told[-1][1]], 7, target.device)
    assert torch.equal(found[:, 1:], target.head(drafter._run(state, block)[:, 1:]).argmax(dim=-1))


@pytest.mark.parametrize("budget", [0, 12])
def test_decoding_says_what_plain_decoding_says(budget: int, drafter: RefillDrafter, target: Target) -> None:
    prompts = [[5 + i, 9, 90 - i] for i in range(4)]
    params = [SamplingParams(14, 0.0 if i % 2 else 0.4, seed=i) for i in range(4)]
    plain = Engine(target, NoDrafter()).generate(prompts, params)
    listening: Any = drafter.heard
    drafted = Engine(listening, drafter, 3, Drafting(8, budget)).generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_training_sees_what_drafting_saw(
    drafter: RefillDrafter, target: Target, tmp_path: Path, tiny_data_dir: Path
) -> None:
    """Answers are collected, become data, and at an anchor that decoding had the training pass is the draft pass."""
    prompts = prompts_of(tiny_data_dir, 2, 200)
    document = read_data(tiny_data_dir)[0]
    assert len(prompts) == 2 and prompts[0] == document.tokens[~document.supervised].tolist()
    assert prompts_of(tiny_data_dir, 50, 8) == [each for each in prompts_of(tiny_data_dir, 50, 99) if len(each) <= 8]
    collected, drafter.filled = tmp_path / "collected.jsonl", False
    collect(drafter.heard, drafter, prompts[:1], 12, collected)
    first = collected.read_text()
    collected.write_text(first + first[:20])  # killed in the middle of a line
    collect(drafter.heard, drafter, prompts, 12, collected)
    lines = [json.loads(line) for line in collected.read_text().splitlines()]
    assert collected.read_text().startswith(first) and [line["tokens"][: line["prompt"]] for line in lines] == prompts
    plain = Engine(target, NoDrafter()).generate(prompts, SamplingParams(12))
    assert [line["tokens"][line["prompt"] :] for line in lines] == [one.token_ids for one in plain]

    tokens, [place, ids, chances] = torch.tensor(lines[0]["tokens"]), lines[0]["known"][0]
    recipe = RefillRecipe(layers=2, taps=(0, 1), block_size=8, mask_token_id=3, collected=str(collected))
    variant = RefillVariant(recipe)
    assert known_places(collected)[key(place, tokens[: place + 1].tolist())].ids.tolist() == ids
    # The document is the second one of its row, behind one that nothing is known of.
    row = torch.cat([TEXT[:5], tokens])[None]
    anchors = torch.tensor([[2, 5 + place, -1]])
    blocks = row[0][(anchors.unsqueeze(-1) + torch.arange(8)).clamp(0, row.size(1) - 1)]
    positions = torch.cat([torch.arange(5), torch.arange(len(tokens))])[None]
    rows = Rows(row, positions, (torch.arange(row.size(1)) >= 5).long()[None], anchors, blocks, blocks[..., 1:] >= 0)
    known = list(variant.known(rows))
    assert known[0] is known[2] is None and known[1] is not None and known[1].ids.tolist() == ids
    features = torch.zeros(1, row.size(1), 2 * target.hidden_size)
    features[0, 5:] = tapped_features(target, drafter.taps, [tokens])[0]
    hidden = variant.hidden(drafter.network, target, features, rows)
    state = drafter.new_state(1, 64)
    drafter.observe(state, tokens[None, :place], features[:, 5 : 5 + place], [place])
    drafter._left = {0: Rejected([], [list(zip(*each, strict=True)) for each in zip(ids, chances, strict=True)])}
    drafter.filled = True
    masked = torch.tensor([[int(tokens[place]), *[3] * 7]])
    drafted, _ = drafter._draft_pass(state, masked, 1)
    assert torch.allclose(hidden[0, 1], drafted[0], atol=1e-4)
    drafter.filled = False
    assert not torch.allclose(hidden[0, 1], drafter._draft_pass(state, masked, 1)[0][0], atol=1e-2)

    as_data(collected, target, tmp_path / "data")
    as_data(collected, target, tmp_path / "data")
    data = read_data(tmp_path / "data")
    assert [one.tokens.tolist() for one in data] == [line["tokens"] for line in lines]
    assert [int(one.supervised.sum()) for one in data] == [len(line["tokens"]) - line["prompt"] for line in lines]
