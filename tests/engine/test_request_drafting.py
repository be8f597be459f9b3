"""Bounds on drafting of single requests change no token, of theirs or of others."""

from pathlib import Path

import pytest
from exact_distribution import LENGTH, NOISE, PROMPT, surprise, write_model
from simulation import request
from test_trees import Oracle
from thinned import thinned
from transformers import LlamaForCausalLM

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Chunk, Engine
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.runner import Outcome
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

OFF = RequestDrafting(enabled=False)
BOUNDS = [None, OFF, RequestDrafting(block_size=3), RequestDrafting(tree_budget=2), RequestDrafting(tree_budget=0)]
PROMPTS = [[5 + i, 9, *range(20, 20 + 3 * i % 7), 17 - i] for i in range(len(BOUNDS))]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def drafted(engine: Engine, bounds: RequestDrafting | None, params: SamplingParams) -> list[int]:
    return engine.submit(PROMPTS[0], params, drafting=bounds).result().checked().stats.drafted


@pytest.mark.parametrize(
    ("drafting", "temperature"),
    thinned(
        [
            Drafting(None),
            Drafting(tree_budget=12),
            Drafting("auto"),
            Drafting(tree_budget="auto"),
            Drafting(None, sampled=True),
        ],
        [0.0, 1.0],
        keep=2,
    ),
)
def test_bounds_change_no_token(target: Target, tiny_drafter_dir: Path, drafting: Drafting, temperature: float) -> None:
    """In one batch, each row with other bounds. A sampled chain's tokens depend on its own bounds, as on the
    drafter."""
    drafter = load_drafter(tiny_drafter_dir, target=target)
    params = [SamplingParams(24, temperature, seed=i, ignore_eos=True) for i in range(len(BOUNDS))]
    alike = drafting.sampled and temperature > 0
    with Engine(target, drafter, drafting=drafting) as engine, Engine(target) as plain:
        requests = [engine.submit(p, s, drafting=b) for p, s, b in zip(PROMPTS, params, BOUNDS, strict=True)]
        found = [each.result().checked() for each in requests]
        for prompt, param, bound, one in zip(PROMPTS, params, BOUNDS, found, strict=True):
            if alike and bound is not OFF:
                expected = engine.submit(prompt, param, drafting=bound).result()  # alone
            else:
                [expected] = plain.generate([prompt], param)
            assert one.token_ids == expected.token_ids
        assert not any(found[1].stats.drafted) and not any(found[1].drafted)
        assert max(found[2].stats.drafted) <= 2


def test_draft_tokens_are_no_more_than_allowed_and_no_fewer(target: Target) -> None:
    params = SamplingParams(24, ignore_eos=True)
    with Engine(target, Oracle(target, 0), drafting=Drafting(tree_budget=12)) as engine:  # type: ignore[arg-type]
        for bounds in (None, RequestDrafting(block_size=99, tree_budget=99)):
            assert min(drafted(engine, bounds, params)[:-1]) > 1
        assert set(drafted(engine, RequestDrafting(block_size=2), params)) == {1}
        assert set(drafted(engine, RequestDrafting(tree_budget=1), params)) == {1}
        assert set(drafted(engine, OFF, params)) == set(drafted(engine, RequestDrafting(block_size=1), params)) == {0}


def test_without_draft_tokens_the_drafter_is_not_asked(target: Target) -> None:
    drafter = Oracle(target, 0)
    drafter.propose = None  # type: ignore[assignment, method-assign]
    with Engine(target, drafter, drafting=Drafting(tree_budget=12)) as engine:  # type: ignore[arg-type]
        assert drafted(engine, OFF, SamplingParams(8, ignore_eos=True)) == [0] * 7


@pytest.mark.slow
def test_sampled_draft_tokens_that_are_cut_keep_the_distribution(tmp_path: Path) -> None:
    """As in test_sampled_distribution, with a third of the requests undrafted and a third with one draft token."""
    target = load_target(write_model(tmp_path / "target", 2))
    drafter = load_drafter(write_model(tmp_path / "drafter", 3), target=target)
    bounds = [None, OFF, RequestDrafting(block_size=2)]
    with Engine(target, drafter, max_batch_size=500, drafting=Drafting(None, sampled=True)) as engine:
        requests = [
            engine.submit(PROMPT, SamplingParams(LENGTH, 1.0, seed=seed, ignore_eos=True), drafting=bounds[seed % 3])
            for seed in range(9000)
        ]
        outputs = [tuple(each.result().token_ids) for each in requests]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    for kind in range(3):
        assert abs(surprise(outputs[kind::3], model)) < NOISE


class Knowing(Drafter):
    chooses_tree_size = chooses_length = True
    block_size = 16


@pytest.mark.parametrize("drafting", [Drafting("auto"), Drafting(tree_budget="auto")])
def test_the_controller_learns_nothing_of_what_was_cut(drafting: Drafting) -> None:
    """Rows without drafting do not change the plan for a row beside them."""

    def planned(others: list[RequestDrafting]) -> tuple[float, ...]:
        controller = Controller(Knowing(), drafting, lambda drafter: None)  # type: ignore[arg-type]
        free = request()
        rows = [free]
        for bounds in others:
            rows.append(request())
            rows[-1].drafting = bounds
        for _ in range(200):
            plan = controller.plan(rows)
            if plan.block_size > 1:
                accepted = [min(3, plan.block_size - 1)] + [0] * len(others)
                depths = [5] + [0] * len(others)
                controller.learn(Outcome(rows, plan, 5, depths, accepted, [3.0] * len(rows), seconds=1.0))
        known = controller.acceptance
        return known.calibration, known.tokens, known.num_draft_tokens, known.share(free)

    assert planned([]) == pytest.approx(planned([OFF, RequestDrafting(block_size=2)]), rel=0.02)


@pytest.mark.parametrize("drafting", [Drafting(None), Drafting("auto"), Drafting(tree_budget=40)])
def test_plans_reach_no_further_than_any_request_may(drafting: Drafting) -> None:
    controller = Controller(Knowing(), drafting, lambda drafter: None)  # type: ignore[arg-type]

    def plan(*bounds: RequestDrafting | None) -> Plan:
        rows = [request() for _ in bounds]
        for row, bound in zip(rows, bounds, strict=True):
            row.drafting = controller.tighter_limits(bound)
        return controller.plan(rows)

    assert plan(OFF, RequestDrafting(block_size=1)).block_size == 1
    assert 1 < plan(OFF, RequestDrafting(block_size=4)).block_size <= 4
    if drafting == Drafting(None):
        assert plan(OFF, None).block_size == plan(RequestDrafting(block_size=4), None).block_size == 16
        assert plan(RequestDrafting(tree_budget=1)).block_size == 16  # which bounds trees only


@pytest.mark.parametrize("bad", [{"enabled": 1}, {"block_size": 0}, {"tree_budget": -1}, {"block_size": 2.5}])
def test_bad_bounds_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(bad))} must be .*, got {next(iter(bad.values()))}"):
        RequestDrafting(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, 12])
def test_a_trace_tells_what_was_drafted_and_accepted(target: Target, budget: int, tiny_drafter_dir: Path) -> None:
    drafters = [load_drafter(tiny_drafter_dir, target=target)]
    if budget:
        drafters.append(Oracle(target, 2))  # type: ignore[arg-type]
    for drafter in drafters:
        with Engine(target, drafter, drafting=Drafting(tree_budget=budget)) as engine:
            other = engine.submit(PROMPTS[2], SamplingParams(40, ignore_eos=True))
            chunks = list(engine.stream(PROMPTS[1], SamplingParams(24, ignore_eos=True), trace=True))
            other.result()
        check_traces(chunks)
        assert chunks[0].step is None


def check_traces(chunks: list[Chunk]) -> None:
    """Each chunk's tokens are those of the accepted path and one more, as far as the answer goes."""
    before = chunks[0].token_ids[-1]
    for chunk in chunks[1:]:
        step = chunk.step
        assert step is not None and step.seconds > 0
        assert len(step.tokens) == len(step.parents)
        assert step.tokens[0] == before and step.parents[0] == -1 and step.path[0] == 0
        assert all(0 <= parent < node for node, parent in enumerate(step.parents) if node)
        assert all(step.parents[node] == above for above, node in zip(step.path, step.path[1:], strict=False))
        accepted = [step.tokens[node] for node in step.path[1:]]
        assert list(chunk.token_ids[: len(accepted)]) == accepted[: len(chunk.token_ids)]
        assert chunk.finish_reason or len(chunk.token_ids) == len(accepted) + 1
        before = chunk.token_ids[-1]


def test_there_are_no_traces_unless_asked_for(target: Target) -> None:
    with Engine(target) as engine:
        assert all(chunk.step is None for chunk in engine.stream([5, 6], SamplingParams(4)))
