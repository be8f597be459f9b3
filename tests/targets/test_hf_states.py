"""Recurrent states of transformers' models depend on committed tokens only, not on scored ones."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_exact import Oracle
from thinned import LONG, thinned
from tiny_families import RECURRENT, make_model
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.decode.proposal import chain
from blockdraft.drafters import load_drafter
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.engine import Engine
from blockdraft.targets import Target
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.hf_states import OnePast
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

QUICK = ("qwen3_5_text", "bamba", "lfm2")
EVERY_FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RECURRENT]
)
PROMPTS = [[(7 * i * i + 5 * row) % 55 + 4 for i in range(3 + (5 * row) % 19)] for row in range(4)]
GREEDY = SamplingParams(14, ignore_eos=True)
CLOSE = {"atol": 2e-3, "rtol": 1e-3}


def paths(parents: Sequence[int]) -> list[list[int]]:
    actual: list[list[int]] = []
    for node, parent in enumerate(parents):
        actual.append([*(actual[parent] if parent >= 0 else []), node])
    return actual


def test_a_state_is_where_releases_before_5_21_look_for_it() -> None:
    past = OnePast(None)
    assert not past.has_previous_state() and not past.layers[3].record_past
    past.update_conv_state(torch.ones(1, 2, 5), 3, conv_kernel_size=4)
    past.update_recurrent_state(torch.ones(1, 2), 3)
    assert past.has_previous_state(3, state_idx=0)
    assert past.layers[3].conv_states[0] is past.state.convolution
    assert past.layers[3].recurrent_states[0] is past.state.recurrence


@EVERY_FAMILY
def test_nodes_of_trees_and_lines_are_scored_as_their_paths_alone(family: str, scatter: Callable[..., Any]) -> None:
    model = make_model(family)
    check_scores(HFTarget(model), model, scatter)


def check_scores(target: Target, model: PreTrainedModel, scatter: Callable[..., Any]) -> None:
    """Check scores while sequences come and go, and commit different paths of different trees."""
    random = torch.Generator().manual_seed(1)
    cache = scatter(target.new_cache(1, 200), (90, 50), (10, 60))
    texts: dict[int, list[int]] = {90: [], 10: []}

    def score(rows: list[int], parents: list[list[int]], kept: list[list[int]]) -> None:
        tokens = torch.randint(3, 61, (len(rows), len(parents[0])), generator=random)
        part = cache.of(rows)
        output = target.forward(tokens, torch.tensor(parents), part, (1,))
        for place, row in enumerate(rows):
            for node, path in enumerate(paths(parents[place])):
                ids = torch.tensor([texts[row] + tokens[place, path].tolist()])
                with torch.no_grad():
                    alone = model(ids, use_cache=False, output_hidden_states=True)
                torch.testing.assert_close(output.logits[place, node], alone.logits[0, -1], **CLOSE)
                assert output.hidden_states is not None
                torch.testing.assert_close(output.hidden_states[place, node], alone.hidden_states[2][0, -1], **CLOSE)
            texts[row] += tokens[place, kept[place]].tolist()
        part.commit(kept)
        assert part.lengths == [len(texts[row]) for row in rows]

    line = [-1, 0, 1, 2, 3, 4]
    score([10], [line], [[0, 1, 2, 3]])
    score([90, 10], [line, line], [[0, 1, 2, 3, 4, 5], [0]])  # one row begins, the other goes on
    score([90, 10], [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, -1, -1, 0]], [[0, 2, 5], [0, 1, 2]])
    score([10, 90], [[-1], [-1]], [[0], [0]])
    score([10, 90], [line[:3], line[:3]], [[], [0, 1]])  # one row commits nothing
    cache.close(90)
    cache.open(80, 40)
    texts[80] = []
    score([80, 10], [[-1, 0, 0, 2], [-1, 0, 1, 2]], [[0, 2, 3], [0, 1, 2, 3]])
    cache.of([10]).truncate([0])
    texts[10] = []
    score([10, 80], [line[:2], line[:2]], [[0, 1], [0]])
    score([10, 80], [line[:2], line[:2]], [[0, 1], [0]])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "budget"), thinned(RECURRENT, [0, 9], keep=2, marks=LONG))
def test_drafting_changes_no_answer(family: str, budget: int) -> None:
    check_drafting(HFTarget(make_model(family)), budget)


def check_drafting(target: Target, budget: int) -> None:
    none = load_drafter("none", target=target)
    alone = [Engine(target, none).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    oracle = Oracle(alone)
    oracle.texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone, strict=True)]
    with Engine(target, oracle, 3, Drafting(tree_budget=budget), prefix_tokens=300, prefill_tokens=16) as engine:
        completions = engine.generate(PROMPTS, GREEDY)
        assert [completion.checked().token_ids for completion in completions] == alone
        assert max(max(completion.stats.committed) for completion in completions) > 2
        lines = engine.submit(PROMPTS[1], GREEDY, drafting=RequestDrafting(tree_budget=0))
        assert lines.result().checked().token_ids == alone[1]


def test_what_a_failed_forward_leaves_is_not_committed() -> None:
    target = HFTarget(make_model("bamba"))
    cache, tokens = target.new_cache(1, 20), torch.tensor([[5, 6, 7]])
    target.forward(tokens, chain(tokens).parents, cache)
    cache.commit([[0, 1, 2]])
    expected = target.forward(tokens, chain(tokens).parents, cache).logits
    cache.zero_slots(0)
    last = target.model.lm_head.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        target.forward(tokens + 9, chain(tokens).parents, cache)
    last.remove()
    assert torch.equal(target.forward(tokens, chain(tokens).parents, cache).logits, expected)


def test_the_model_is_left_as_it_was() -> None:
    target = HFTarget(make_model("qwen3_5_text"))
    ids = torch.tensor([[5, 6, 7, 8]])

    def by_transformers() -> Tensor:
        with torch.no_grad():
            actual: Tensor = target.model.generate(ids, max_new_tokens=8, do_sample=False)
        return actual

    expected, cache = by_transformers(), target.new_cache(1, 20)
    target.forward(ids, chain(ids).parents, cache)
    assert not any("forward" in module.__dict__ for module in target.model.modules())
    assert torch.equal(by_transformers(), expected)
    cache.commit([range(4)])
    [answer] = Engine(target).generate([ids[0].tolist()], SamplingParams(8, ignore_eos=True))
    assert answer.token_ids == expected[0, 4:].tolist()


def test_what_takes_more_is_refused() -> None:
    target = HFTarget(make_model("bamba"))
    with pytest.raises(ValueError, match=r"exact is refused: BambaForCausalLM keeps more than keys and values"):
        HFTarget(make_model("bamba"), exact=True)
    with pytest.raises(ValueError, match=r"draft model .* recurrent"):
        DraftLMDrafter(target, target)


def test_memory_counts_a_state_a_row() -> None:
    target = HFTarget(make_model("bamba"))
    cache = target.new_cache(3, 10)
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    target.forward(tokens, chain(tokens).parents, cache)
    cache.commit([[0, 1]] * 3)
    states = [part for row in cache.stored_states.values() for state in row for part in state]  # type: ignore[attr-defined]
    held = sum(store.nbytes for store in cache.stores)
    assert target.cache_bytes(3, 10) == held + sum(part.nbytes for part in states)
    assert target.forward_bytes(2, 8, 64) > 2 * target.cache_sizes[1]
