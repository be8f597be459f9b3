"""Combinations: which drafter's drafts a tree or chain takes, and that a bad choice never changes the output."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from two_trees import LOOKUP, MODEL, Tree, plan, proposal

from blockdraft.decode import merging
from blockdraft.decode.proposal import ChainPlan, DraftTurn, HybridPlan, Plan, Proposal, SparseDistribution
from blockdraft.drafters import Drafter, hybrid, load_drafter
from blockdraft.drafters.hybrid import HybridDrafter
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams


class Scripted(Drafter):
    """Proposes what it is given, and records its plans and observations."""

    path, chooses_tree_size, chooses_length = None, True, False

    def __init__(self, proposal: Proposal, block_size: int = 9, target_layers: tuple[int, ...] = ()) -> None:
        self.proposal, self.block_size, self.target_layers = proposal, block_size, target_layers
        self.plans: list[Plan] = []
        self.hidden_states: list[Tensor | None] = []
        self.observed: list[tuple[list[int], list[list[int]]]] = []  # first KV slots and tokens
        self.fails = False

    def new_state(self, batch: int, capacity: int) -> Any:
        return LookupDrafter().new_state(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return 10 * batch * capacity

    def weight_bytes(self) -> int:
        return 7

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        self.plans.append(plan)
        return self.proposal

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        if self.fails:
            raise RuntimeError("cannot observe")
        self.hidden_states.append(hidden_states)
        self.observed.append((state.starts, [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)]))


def test_each_member_gets_its_own_block_size_and_hidden_states() -> None:
    first, second = Scripted(proposal(LOOKUP), 4, (2, 0)), Scripted(proposal(MODEL), 9, (1,))
    drafter = HybridDrafter([first, second])
    assert (drafter.target_layers, drafter.block_size) == ((0, 1, 2), 9)
    assert (drafter.weight_bytes(), drafter.state_bytes(2, 3)) == (14, 120)
    state = drafter.new_state(1, 20)
    hidden_states = torch.arange(6.0).view(1, 1, 6)  # two numbers a layer
    drafter.observe(state, torch.tensor([[1]]), hidden_states, [1])
    drafter.propose(state, torch.tensor([3]), plan(7, step_seconds=[2.0] * 8, calibration=0.5))
    assert [each.hidden_states[0].tolist() for each in (first, second)] == [[[[4, 5, 0, 1]]], [[[2, 3]]]]  # type: ignore[union-attr]
    drafter.propose(state, torch.tensor([3]), plan(0, uniforms=torch.rand(1, 8)))
    asked = [each.plans[0] for each in (first, second)]
    assert [(each.block_size, each.step_seconds, each.calibration) for each in asked] == [
        (4, [2.0] * 8, 0.5),
        (9, [2.0] * 8, 0.5),
    ]
    assert [each.plans[1].uniforms.shape for each in (first, second)] == [(1, 3), (1, 8)]  # type: ignore[union-attr]
    drafter.propose(state, torch.tensor([3]), ChainPlan(1, [SamplingParams()]))
    assert len(first.plans) == 2


def test_a_chain_is_that_of_the_drafter_that_expects_most() -> None:
    long: Tree = [(5, 0, 0.5), (6, 1, 0.4), (7, 2, 0.3)]
    sure = Proposal(torch.tensor([[0, 8], [0, 9]]), torch.tensor([[-1, 0], [-1, 0]]), expected=(0.9, 0.95))
    drafter = HybridDrafter([Scripted(proposal(long, [])), Scripted(sure)])
    actual = drafter.propose(drafter.new_state(2, 20), torch.tensor([3, 4]), plan(0, 2))
    assert actual.tokens.tolist() == [[3, 5, 6, 7], [4, 9, 0, 0]] and actual.q is None
    assert actual.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]


def turns(first: float, second: float, seconds: Sequence[float] = (1.0, 1.1, 1.2, 1.3)) -> HybridPlan:
    """A plan by which two drafters are asked in turn, whose steps have yielded so many tokens a second."""
    return in_turn((first, second), seconds)


def in_turn(rates: Sequence[float], seconds: Sequence[float] = (1.0, 1.1, 1.2, 1.3)) -> HybridPlan:
    turns = [DraftTurn(index, plan(0, 2, step_seconds=seconds), rate) for index, rate in enumerate(rates)]
    return HybridPlan(9, turns[0].plan.params, turns)


def test_drafters_in_turn_are_asked_until_one_promises_more_than_those_after_it_have_yielded() -> None:
    few = replace(proposal([(5, 0, 0.5)], []), expected=(0.5, 0.0))  # 2.5 tokens in 1.1 s, 2.27 a second
    many = replace(proposal([(7, 0, 0.9), (8, 1, 0.8)], [(9, 0, 0.9)]), expected=(1.7, 0.9))
    cheap, dear = Scripted(few), Scripted(many)
    drafter = HybridDrafter([cheap, dear])
    state, anchors = drafter.new_state(2, 20), torch.tensor([3, 4])
    actual = drafter.propose(state, anchors, turns(1.0, 2.2))
    assert (actual.part, actual.tokens.tolist(), actual.expected) == (0, [[0, 5], [0, 0]], (0.5, 0.0))
    assert not dear.plans
    actual = drafter.propose(state, anchors, turns(1.0, 2.3))
    assert (actual.part, actual.tokens.tolist()) == (1, many.tokens.tolist()) and len(dear.plans) == 1
    doubted = replace(
        turns(1.0, 2.2),
        turns=[turn._replace(plan=replace(turn.plan, calibration=0.1)) for turn in turns(1.0, 2.2).turns],
    )
    assert drafter.propose(state, anchors, doubted).part == 1
    alone = replace(turns(1.0, 0.0), turns=turns(1.0, 9.0).turns[1:])
    assert drafter.propose(state, anchors, alone).part == 1
    cheap.proposal = replace(proposal([], []), expected=(0.0, 0.0))  # it passes
    assert drafter.propose(state, anchors, turns(1.0, 0.1)).part == 1
    cheap.proposal = replace(few, expected=None)  # it does not say what it expects
    assert [drafter.propose(state, anchors, turns(rate, 2.0)).part for rate in (1.9, 2.1)] == [1, 0]
    three = HybridDrafter([Scripted(few), Scripted(few), Scripted(many)])  # the last of those behind may be the best
    assert three.propose(three.new_state(2, 20), anchors, in_turn((1.0, 0.5, 2.3))).part == 2


def test_the_time_to_observe_what_others_drafted_is_stated(clock: list[float]) -> None:
    class Slow(Scripted):
        def observe(self, *given: Any) -> None:
            clock[0] += 5.0

    many = replace(proposal([(7, 0, 0.9)], []), expected=(0.9, 0.0))
    drafter = HybridDrafter([Scripted(replace(proposal([], []), expected=(0.0, 0.0))), Slow(many, block_size=3)])
    state, anchors, stated = drafter.new_state(2, 40), torch.tensor([3, 4]), list[float]()
    for count in (3, 4):  # as many tokens as its own step may commit, and more
        drafter.observe(state, torch.ones(2, count, dtype=torch.int64), None, [count, 1])
        stated.append(drafter.propose(state, anchors, turns(1.0, 0.5)).catch_up_seconds)
    assert stated[0] == 0 and stated[1] >= 5.0


def test_a_member_that_does_not_draft_observes_later() -> None:
    none = replace(proposal([], []), expected=(0.0, 0.0))
    cheap, dear = Scripted(none), Scripted(none, target_layers=(0,))
    drafter = HybridDrafter([cheap, dear])
    cheap.runs_network = False
    state, anchors = drafter.new_state(2, 200), torch.tensor([3, 4])

    def observe(rows: list[int], *texts: list[int]) -> None:
        most = max(map(len, texts))
        tokens = torch.tensor([[*text, *[99] * (most - len(text))] for text in texts])
        drafter.observe(state.of(rows), tokens, tokens[..., None] / 2, list(map(len, texts)))

    for texts in ([1, 2], [3]), ([4], []), ([5], [6, 7, 8]):
        observe([0, 200], *texts)
    drafter.propose(state, anchors, replace(turns(9.0, 0.0), turns=turns(9.0, 0.0).turns[:1]))
    assert len(cheap.observed) == 3 and not dear.observed
    drafter.propose(state, anchors, turns(0.0, 9.0))
    assert dear.observed == [([0, 200], [[1, 2, 4, 5], [3, 6, 7, 8]])]
    assert dear.hidden_states[0] is not None and dear.hidden_states[0].tolist()[1] == [[1.5], [3.0], [3.5], [4.0]]
    observe([200], [9])
    drafter.propose(state, anchors, turns(0.0, 9.0))
    assert dear.observed[1:] == [([200], [[9]])]
    drafter.propose(state, anchors, turns(0.0, 9.0))
    assert len(dear.observed) == 2  # there is nothing to tell
    observe([0], [10])
    state.shrink(0, 100)  # a change of rows comes after what was before it
    assert dear.observed[2:] == [([0], [[10]])]
    observe([0, 200], [11], [12])
    state.close(200)
    state.open(200, 200)
    observe([200], [13])
    state.close(0)
    state.open(0, 200)
    drafter.propose(state, anchors, turns(0.0, 9.0))
    assert dear.observed[3:] == [([200], [[13]])]
    observe([0, 200], [14, 15], [16])
    drafter.propose(state, anchors, turns(0.0, 9.0))
    assert dear.observed[4:] == [
        ([0], [[14, 15]]),
        ([200], [[16]]),
    ]  # without KV slots for what other sequences observe


def test_pending_tokens_are_bounded_and_outlive_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    none = replace(proposal([]), expected=(0.0,))
    free, dear = Scripted(none), Scripted(none)
    free.runs_network = False
    drafter = HybridDrafter([free, dear])
    state = drafter.new_state(1, 200)

    def observe(count: int) -> None:
        drafter.observe(state, torch.arange(count)[None], None, [count])

    observe(hybrid.MAX_PENDING)
    assert not dear.observed
    dear.fails = True
    with pytest.raises(RuntimeError, match="cannot observe"):
        observe(1)
    assert len(free.observed) == 1  # it has not observed what will be observed again
    dear.fails = False
    observe(1)
    assert dear.observed == [([0], [[*range(hybrid.MAX_PENDING)]])] and len(free.observed) == 2
    observe(5)
    dear.fails = True
    state.shrink(0, 3)  # other requests need not end
    assert "may draft worse: RuntimeError: cannot observe" in caplog.text
    dear.fails = False
    state.shrink(0, 2)
    assert len(dear.observed) == 1


def test_a_sampled_chain_is_chosen_by_what_such_chains_have_yielded() -> None:
    """The choice does not depend on the sampled tokens."""
    dist = SparseDistribution(torch.tensor([[8, 9], [8, 9]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    sampled = Proposal(torch.tensor([[0, 8], [0, 9]]), torch.tensor([[-1, 0], [-1, 0]]), (dist, dist))
    chains: list[Tree] = [[(5, 0, 0.9), (6, 1, 0.6), (7, 2, 0.5)], [(5, 0, 0.5)]]
    drafter = HybridDrafter([Scripted(proposal(*chains)), Scripted(sampled)])
    state, asked = drafter.new_state(2, 20), plan(0, 2, uniforms=torch.rand(2, 8))
    actual = drafter.propose(state, torch.tensor([3, 4]), asked)
    assert actual.tokens.tolist() == [[3, 5, 6, 7], [4, 9, 0, 0]]
    assert actual.q is not None and actual.q[0] is None and actual.q[1] is not None
    assert actual.q[1].ids.tolist() == [[8, 9]] * 2
    for _ in range(9):  # none of the sampled ones is accepted
        drafter.observe(state, torch.tensor([[1, 5], [1, 0]]), None, [2, 1])
        actual = drafter.propose(state, torch.tensor([3, 4]), asked)
    assert actual.tokens.tolist() == [[3, 5, 6, 7], [4, 5, 0, 0]] and actual.q is None
    state.shrink(20, 5)  # another request
    assert drafter.propose(state, torch.tensor([3, 4]), asked).tokens[1].tolist() == [4, 9, 0, 0]


def test_chosen_draft_tokens_stand_beside_a_sampled_chain() -> None:
    """The whole chain comes first; draft tokens of lookup follow its nodes where both agree."""
    dist = SparseDistribution(torch.tensor([[5, 9]] * 3), torch.tensor([[0.5, 0.5]] * 3))
    sampled = Proposal(
        torch.tensor([[0, 5, 9], [0, 4, 9]]), torch.tensor([[-1, 0, 1], [-1, 0, -1]]), (dist, None)
    )  # the second row is greedy and short
    drafter = HybridDrafter([Scripted(proposal(LOOKUP, [(4, 0, 0.2), (6, 0, 0.1)])), Scripted(sampled)])
    asked = plan(4, 2, uniforms=torch.rand(2, 8))
    actual = drafter.propose(drafter.new_state(2, 20), torch.tensor([3, 4]), asked)
    assert actual.tokens.tolist() == [[3, 5, 9, 6, 7], [4, 4, 6, 0, 0]]
    assert actual.parents.tolist() == [[-1, 0, 1, 1, 3], [-1, 0, 0, -1, -1]]
    assert actual.q is not None and actual.q[1] is None
    assert actual.q[0] is not None and actual.q[0].ids.tolist() == dist.ids.tolist()
    fewer = drafter.propose(drafter.new_state(2, 20), torch.tensor([3, 4]), replace(asked, tree_budget=2))
    assert fewer.tokens.tolist() == [[3, 5, 9], [4, 4, 6]]


REPEATING = "Read this aloud: one red apple, two green pears. One red apple, two green pears. Then: 1, 2, 3, 4."


@pytest.mark.slow
def test_a_hybrid_accepts_more_than_each_member_on_repetitive_text() -> None:
    pair, params = load_target("bundled"), SamplingParams(max_new_tokens=48, ignore_eos=True)
    lookup, model, both = (load_drafter(n, target=pair) for n in ("lookup", "bundled", "lookup+bundled"))
    [plain] = Engine(pair).generate([REPEATING], params)
    for drafting in (Drafting(None), Drafting(tree_budget=16)):
        actual = [
            Engine(pair, each, drafting=drafting).generate([REPEATING], params)[0] for each in (lookup, model, both)
        ]
        assert {tuple(completion.token_ids) for completion in actual} == {tuple(plain.token_ids)}
        assert actual[2].tau > max(actual[0].tau, actual[1].tau) + 0.1 > 1.2, [completion.tau for completion in actual]


def backwards(trees: Any, budget: int) -> list[tuple[float, int, int]]:
    """Nodes with wrong tokens, the least likely first, in one chain."""
    last = [
        (tokens[node] + 1) % 200
        for tokens, _, acceptance_probs in trees
        for node in range(len(acceptance_probs), 0, -1)
    ]
    return [(1e-9, place, token) for place, token in enumerate(last[: min(budget, 7)])]


@pytest.mark.parametrize(
    ("broken", "drafting"),
    [
        pytest.param(broken, drafting, marks=() if (kind + way) % 3 == 0 else pytest.mark.slow)
        for kind, broken in enumerate(["tree", "choice", "deaf", "hidden_states"])
        for way, drafting in enumerate([Drafting(None), Drafting(tree_budget=12), Drafting(tree_budget="auto")])
    ],
)
def test_a_broken_hybrid_changes_no_token(
    broken: str, drafting: Drafting, target: Target, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = load_drafter(f"lookup+{tiny_drafter_dir}", target=target)
    assert isinstance(drafter, HybridDrafter)
    if broken == "tree":
        monkeypatch.setattr(merging, "likeliest", backwards)
    elif broken == "choice":
        monkeypatch.setattr(hybrid, "expected_accepted", lambda proposal, row, known: -proposal.tokens.size(1))
    elif broken == "deaf":  # the lookup hears nothing of the text
        drafter.parts[0].observe = lambda *arguments: None  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(hybrid, "select_layers", lambda states, given, wanted: torch.zeros_like(states))
    prompts = [[(7 * i * i + row) % 60 + 4 for i in range(5 + 4 * row)] for row in range(3)]
    params = [SamplingParams(16, (0.0, 0.8, 1.0)[row], seed=row, ignore_eos=True) for row in range(3)]
    actual = Engine(target, drafter, 2, drafting).generate(prompts, params)
    plain = Engine(target).generate(prompts, params)
    assert [each.token_ids for each in actual] == [each.token_ids for each in plain]


def test_folders_may_have_the_sign_in_their_names(tmp_path: Path, target: Target, tiny_drafter_dir: Path) -> None:
    odd = tmp_path / "a+b" / "c++"
    shutil.copytree(tiny_drafter_dir, odd)
    assert load_drafter(odd, target=target).path == odd

    def paths(drafter: Drafter) -> list[Path | None]:
        return [part.path for part in drafter.parts]

    assert paths(load_drafter(f"lookup+{odd}", target=target)) == [None, odd]
    assert paths(load_drafter(f"{odd}+lookup+{tiny_drafter_dir}", target=target)) == [
        odd,
        None,
        tiny_drafter_dir,
    ]
    assert paths(load_drafter(odd, target=target)) == [odd]


def test_its_kind_names_its_members(target: Target, tiny_drafter_dir: Path) -> None:
    assert load_drafter(f"lookup+{tiny_drafter_dir}", target=target).kind == "lookup+dflash"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lookup+", r"drafter is 'lookup\+'; put a folder or a name on each side of \+"),
        ("lookup+lookup", "names lookup twice"),
        ("lookup+none", "drafts nothing, as the drafter none does; leave it out"),
        ("lookup+nowhere", "nowhere is no drafter"),
        ("hybrid", "hybrid is no drafter"),
    ],
)
def test_wrong_hybrids_are_refused(name: str, message: str, target: Target) -> None:
    with pytest.raises(UsageError, match=message):
        load_drafter(name, target=target)
    with pytest.raises(UsageError, match="has 1 members; join two or more"):
        HybridDrafter([LookupDrafter()])
