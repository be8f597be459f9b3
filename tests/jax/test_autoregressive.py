"""Networks that guess a token at a time in JAX beside torch's: drafts of every shape, and cycles as one program."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax.numpy", reason="JAX is not installed: pip install 'blockdraft[jax]', or make test-jax")

import jax

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan, TreePlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.drafters.mtp.drafter import MTPDrafter
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.engine import Engine
from blockdraft.jax.autoregressive import JaxAutoregressive
from blockdraft.jax.cache import JaxTensor
from blockdraft.jax.drafting import latest, padded
from blockdraft.jax.model import local_layout
from blockdraft.targets import Target, backends, load_target
from blockdraft.targets.base import LoadOptions
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.jax

FLAGS = [
    {"qk_norm": True, "norm_before_residual": True, "norm_output": True, "attention_bias": True},
    {"fc_norm": True, "draft_vocab_size": 7},
    {"norm_before_fc": True, "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]
SECONDS = [1.0 + 0.02 * count for count in range(41)]


@pytest.fixture(scope="module")
def targets(tiny_target_dir: Path) -> tuple[Target, Target]:
    """In JAX on one device, and the native one."""
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"))
    ours: Target = backends()["jax"].load(tiny_target_dir, options, local_layout(jax.local_devices()[:1]))
    return ours, load_target(tiny_target_dir, "float32", "cpu", backend="native", compile="off")


def eagle3(folder: Path, target: Target, flags: dict[str, Any]) -> Eagle3Drafter:
    """Random drafter like that of the folder, but for these fields of its configuration."""
    drafter: Any = load_drafter(folder, target=target)
    config = Eagle3Config(**{**vars(drafter.config), **flags})
    return Eagle3Drafter(randomised(Eagle3Network(config)), target)


def randomised(network: Any) -> Any:
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    if isinstance(network, Eagle3Network):
        order = torch.randperm(network.config.vocab_size, generator=generator)
        network.keep(order[: network.config.draft_vocab_size].sort().values)
    return network


def proposals(drafter: Any) -> list[Any]:
    """Drafts of every shape for three rows, of which one is empty at first, behind texts of several calls."""
    state, generator, found = drafter.new_state(3, 40), torch.Generator().manual_seed(1), []
    greedy = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7)]
    even = [SamplingParams()] * 3
    size = len(drafter.target_layers) * drafter.config.hidden_size
    for lengths in ([0, 6, 1], [1, 0, 5], [9, 2, 1]):
        tokens = torch.randint(4, 60, (3, max(lengths)), generator=generator)
        drafter.observe(state, tokens, torch.randn(3, max(lengths), size, generator=generator), lengths)
        anchors = torch.randint(4, 60, (3,), generator=generator)
        draws = torch.rand(3, 4, dtype=torch.float64, generator=generator)
        for plan in (
            ChainPlan(4, greedy),
            ChainPlan(5, even, draft_window=3),
            ChainPlan(6, even, cycle_seconds=SECONDS),
            SampledPlan(5, greedy, draws),
            TreePlan(5, greedy, 9),
            TreePlan(5, even, 40, cycle_seconds=SECONDS),
        ):
            found.append(drafter.propose(state, anchors, plan))
            run = drafter._run
            if plan.tree_budget and plan.cycle_seconds is None and isinstance(run, JaxAutoregressive):
                found[-1] = of_the_program(run, state, anchors, plan)
    return found


def of_the_program(run: JaxAutoregressive, state: Any, anchors: torch.Tensor, plan: Plan) -> Proposal:
    """The same draft as cycles make it."""
    heat = padded([each.temperature for each in plan.params], (4,)).astype("float32")
    given = padded(anchors, (4,)).astype("int32"), jax.numpy.int32(plan.block_size), latest(None), heat
    drafted = run.propose(run._known(state), *run._layout.put(given), count=8, budget=plan.tree_budget)
    tokens, parents, _ = (JaxTensor(each, (len(anchors), 1 + plan.tree_budget)).real for each in drafted)
    return Proposal(tokens, parents)


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close((one.tokens, one.parents), (other.tokens, other.parents), rtol=0, atol=0)
        torch.testing.assert_close(one.expected, other.expected, rtol=1e-3, atol=1e-4)
        for mine, its in zip(one.q or (), other.q or (), strict=True):
            if its is not None:
                torch.testing.assert_close(mine.probs, its.probs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("flags", FLAGS)
def test_drafts_of_eagle3_are_those_of_torch(
    flags: dict[str, Any], targets: tuple[Target, Target], tiny_eagle3_dir: Path
) -> None:
    ours, theirs = (eagle3(tiny_eagle3_dir, target, flags) for target in targets)
    assert isinstance(ours._run, JaxAutoregressive)
    assert_same(proposals(ours), proposals(theirs))
    assert ours.state_bytes(2, 50) == theirs.state_bytes(2, 50)


@pytest.mark.parametrize("normed", [False, True])
def test_drafts_of_an_mtp_head_are_those_of_torch(
    normed: bool, targets: tuple[Target, Target], tiny_mtp_dir: Path
) -> None:
    drafter: Any = load_drafter(tiny_mtp_dir, target=targets[1])
    flags = {"block_size": 6, "normed_feedback": normed, "attention_bias": True}
    config = MTPConfig(**{**vars(drafter.config), **flags})
    ours, theirs = (MTPDrafter(randomised(MTPNetwork(config)), target) for target in targets)
    assert isinstance(ours._run, JaxAutoregressive)
    assert_same(proposals(ours), proposals(theirs))


@pytest.mark.parametrize("budget", [0, 400])
def test_a_cycle_transfers_nothing_and_drafts_as_its_parts_do(
    budget: int, targets: tuple[Target, Target], tiny_eagle3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, one of them at a temperature, among few tokens: a tree may want more guesses than there are."""
    params = [SamplingParams(7, (0.0, 0.9, 0.0)[row], seed=row, ignore_eos=True) for row in range(3)]
    prompts, found, cycles = [[7, 60, 33], [5], [40, 41, 42, 40, 41]], [], 0
    for target in targets:
        drafter: Any = eagle3(tiny_eagle3_dir, target, {"draft_vocab_size": 3})
        if target is targets[0]:
            own = drafter._run.jax_cycle

            def guarded(*args: Any) -> Any:
                nonlocal cycles
                cycles += 1
                with jax.transfer_guard("disallow_explicit"):
                    told = own(*args)  # noqa: B023
                assert all(array.is_deleted() for memory in args[4:6] for array in memory)
                return told

            monkeypatch.setattr(drafter._run, "jax_cycle", guarded)
        with Engine(target, drafter, 3, Drafting(6, tree_budget=budget)) as engine:
            found.append([engine.submit(*each) for each in zip(prompts, params, strict=True)])
            found[-1] = [each.result().checked() for each in found[-1]]
    ours, theirs = found
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert [each.stats.committed for each in ours] == [each.stats.committed for each in theirs]
    assert cycles and not jax.config.jax_enable_x64
