"""Block-diffusion model as drafter: its draft tokens are those of a model without a cache."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.proposal import SPARSE_SIZE, ChainPlan, SampledPlan
from blockdraft.decode.sampling import draw
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.nn.attention import visible_slots
from blockdraft.targets import Target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_diffusion import drafter as drafter_module
from blockdraft_diffusion.create import convert
from blockdraft_diffusion.drafter import BlockDiffusionDrafter, BlockState
from blockdraft_diffusion.settings import ConvertSettings

GREEDY = SamplingParams(20, ignore_eos=True)
MASK = 3  # of the tiny tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["shift", "no shift"])
def drafter(request: Any, tiny_target_dir: Path, target: Target, tmp_path_factory: Any) -> BlockDiffusionDrafter:
    folder = tmp_path_factory.mktemp("blocks") / "model"
    convert(tiny_target_dir, folder, ConvertSettings(block_size=4, token_shift=request.param))
    loaded = load_drafter(folder, target=target)
    assert isinstance(loaded, BlockDiffusionDrafter) and loaded.block_size == 5
    return loaded


def observe(drafter: BlockDiffusionDrafter, state: BlockState, rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([row + [77] * (longest - len(row)) for row in rows], dtype=torch.long)
    drafter.observe(state, padded, None, [len(row) for row in rows])


def dists(drafter: BlockDiffusionDrafter, text: list[int], settled: dict[int, int] | None = None) -> Tensor:
    """Logits of the missing tokens of the block behind a text, from one pass over the whole text."""
    model, size = drafter.model, drafter.model.config.block_size
    free = size - len(text) % size
    tokens = text + [(settled or {}).get(place, MASK) for place in range(free)]
    blocks = torch.arange(len(tokens)) // size
    visible = visible_slots([0], (blocks[:, None] >= blocks[None, :])[None])
    with torch.no_grad():
        states = model.network.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None], visible)[0]
        first = len(text) - model.config.token_shift
        logits = model.network.logits(states[first : first + free])
    logits[:, MASK] = -torch.inf
    return logits


def slow_draft_tokens(drafter: BlockDiffusionDrafter, text: list[int], passes: int) -> list[int]:
    """Drafts that are fixed pass by pass, the surest first, by the cosine schedule."""
    settled: dict[int, int] = {}
    count = len(dists(drafter, text))
    for step in range(1, passes):
        actual = dists(drafter, text, settled).softmax(-1).max(-1)
        wanted = max(1, round((1 - math.cos(math.pi / 2 * (step / passes))) * count))
        open_places = sorted({*range(count)} - settled.keys(), key=lambda place: -actual.values[place].item())
        for place in open_places[: max(0, wanted - len(settled))]:
            settled[place] = int(actual.indices[place])
    best = dists(drafter, text, settled).argmax(-1).tolist()
    return [settled.get(place, token) for place, token in enumerate(best)]


@pytest.mark.parametrize("passes", [1, 3])
def test_draft_tokens_equal_those_of_a_model_without_a_cache(
    drafter: BlockDiffusionDrafter, passes: int, scatter: Callable[..., Any], constants: Callable[..., None]
) -> None:
    """With any number of committed draft tokens, and rows that leave, come, are cut and copied."""
    constants(drafter_module, PIECE=8)  # prompts are read in several pieces
    generator = torch.Generator().manual_seed(4)
    texts: dict[int, list[int]] = {90: [9, 8, 7], 5: [4] * 22, 170: [30]}
    state = scatter(drafter.new_state(1, 250), (90, 60), (5, 60), (170, 70))
    observe(drafter, state, [*texts.values()])
    for step in range(9):
        if step == 3:
            state.close(90)
            state.open(70, 80)
            del texts[90]
            texts[70] = list(range(20, 41))
            observe(drafter, state.of([70]), [texts[70]])
        if step == 5:  # one gives up its end, and another begins as it does
            state.shrink(5, len(texts[5]) - 3)
            state.close(70)
            texts[5] = texts[5][:-3]
            state.open(70, 40)
            state.copy(5, 70, 14)
            texts[70] = texts[5][:14]
            state.close(5)
            del texts[5]
        rows = [*texts]
        part = state.of(rows)
        if step == 6:  # drafted in vain: no token was committed
            drafter.propose(part, torch.tensor([11, 12]), ChainPlan(5, [GREEDY] * 2))
            observe(drafter, part, [[], []])
        anchors = torch.randint(4, 60, (len(rows),), generator=generator).tolist()
        plan = ChainPlan(5, [GREEDY] * len(rows), draft_passes=passes)
        proposal = drafter.propose(part, torch.tensor(anchors), plan)
        new = []
        for row, anchor, ids, parents in zip(
            rows, anchors, proposal.tokens.tolist(), proposal.parents.tolist(), strict=True
        ):
            wanted = slow_draft_tokens(drafter, [*texts[row], anchor], passes)
            count = 4 - (len(texts[row]) + 1) % 4
            assert len(wanted) == count and ids[: 1 + count] == [anchor, *wanted]
            assert parents == [*range(-1, count), *[-1] * (len(parents) - 1 - count)]
            new.append(ids[: 1 + (step + row) % (1 + count)])
        observe(drafter, part, new)
        for row, more in zip(rows, new, strict=True):
            texts[row] = texts[row] + more


def test_half_a_block_is_not_kept(drafter: BlockDiffusionDrafter) -> None:
    """Its keys and values have seen the other half."""
    state = drafter.new_state(1, 40)
    observe(drafter, state, [list(range(10, 31))])
    drafter.propose(state, torch.tensor([31]), ChainPlan(5, [GREEDY]))
    assert state.cache.lengths == [20]
    state.shrink(0, 14)
    assert state.cache.lengths == [12]


def test_sampled_draft_tokens_follow_their_distributions(drafter: BlockDiffusionDrafter) -> None:
    state = drafter.new_state(2, 40)
    texts = [[5, 6, 7, 8, 9], [10, 11]]  # three and one to draft
    observe(drafter, state, texts)
    params = [SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=5)]
    draws = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    proposal = drafter.propose(state, torch.tensor([20, 21]), SampledPlan(5, params, draws))
    assert proposal.q is not None and proposal.tokens.shape == (2, 3)
    for row, (text, anchor) in enumerate(zip(texts, (20, 21), strict=True)):
        probs = probabilities(dists(drafter, [*text, anchor])[None], [params[row]])[0]
        dist = proposal.q[row]
        assert dist is not None
        for depth in range(len(probs)):
            wanted = probs[depth].clone()
            wanted[wanted.argsort(descending=True)[SPARSE_SIZE:]] = 0
            dense = torch.zeros_like(wanted).index_add(0, dist.ids[depth], dist.probs[depth])
            torch.testing.assert_close(dense, wanted / wanted.sum(), atol=1e-5, rtol=1e-3)
            [[index]] = draw(dist.probs[None, depth : depth + 1], draws[row : row + 1, depth : depth + 1]).tolist()
            assert proposal.tokens[row, depth + 1] == dist.ids[depth, index]


def test_more_passes_change_draft_tokens_and_no_token(drafter: BlockDiffusionDrafter, target: Target) -> None:
    """Holds for greedy and sampled answers, and for chosen and sampled draft tokens."""
    prompts = [[(7 * i + row) % 60 + 4 for i in range(3 + row)] for row in range(3)]
    params = [SamplingParams(20, (0.0, 0.8, 0.8)[row], seed=row, ignore_eos=True) for row in range(3)]
    plain = Engine(target, load_drafter("none", target=target)).generate(prompts, params)
    for passes in (1, 4):
        actual = Engine(target, drafter, drafting=Drafting(draft_passes=passes)).generate(prompts, params)
        assert [each.token_ids for each in actual] == [each.token_ids for each in plain]
    [sampled] = Engine(target, drafter, drafting=Drafting(None, sampled=True, draft_passes=2)).generate(
        prompts[:1], params[:1]
    )
    assert sampled.token_ids == plain[0].token_ids


def test_blocks_of_one_token_are_the_target_itself(tiny_target_dir: Path, target: Target, tmp_path: Path) -> None:
    """A token shift makes it a plain language model, so every draft token is right."""
    convert(tiny_target_dir, tmp_path / "one", ConvertSettings(block_size=1))
    drafter = load_drafter(tmp_path / "one", target=target)
    [actual] = Engine(target, drafter, drafting=Drafting(2)).generate([[5, 6, 7]], GREEDY)
    assert actual.stats.committed[:-1] == [2] * ((GREEDY.max_new_tokens - 2) // 2)


def test_nothing_is_drafted_past_the_context(tiny_target_dir: Path, target: Target, tmp_path: Path) -> None:
    convert(tiny_target_dir, tmp_path / "short", ConvertSettings(block_size=4))
    config = tmp_path / "short/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 18}))
    drafter = load_drafter(tmp_path / "short", target=target)
    state = drafter.new_state(3, 60)
    observe(drafter, state, [[7] * 13, [7] * 15, [7] * 40])  # type: ignore[arg-type]
    proposal = drafter.propose(state, torch.tensor([6] * 3), ChainPlan(5, [GREEDY] * 3))
    assert [sum(parent >= 0 for parent in parents) for parents in proposal.parents.tolist()] == [2, 0, 0]
    [actual] = Engine(target, drafter, drafting=Drafting(None)).generate([[7] * 9], GREEDY)
    [plain] = Engine(target, load_drafter("none", target=target)).generate([[7] * 9], GREEDY)
    assert actual.token_ids == plain.token_ids


def test_the_state_takes_the_memory_of_its_cache(drafter: BlockDiffusionDrafter) -> None:
    state = drafter.new_state(2, 50)
    observe(drafter, state, [[5] * 20, [6]])
    assert drafter.state_bytes(2, 50) == sum(store.nbytes for store in state.cache.stores)


def test_a_model_with_other_tokens_is_refused(tiny_target_dir: Path, target: Target, tmp_path: Path) -> None:
    """Its tokens must be the target's, except for a mask token that the target lacks."""
    source = Path(shutil.copytree(tiny_target_dir, tmp_path / "source"))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"mask_token": None}))
    actual = convert(source, tmp_path / "own", ConvertSettings(block_size=4))
    assert actual.is_new and load_drafter(tmp_path / "own", target=target).block_size == 5
    raw = json.loads((tmp_path / "own/tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    vocab["in"], vocab["the"] = vocab["the"], vocab["in"]
    (tmp_path / "own/tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=r"token 'in' has the id 261 .* and 262 in the target .265"):
        load_drafter(tmp_path / "own", target=target)
