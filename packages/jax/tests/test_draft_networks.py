"""Draft networks in JAX make the same drafts as in torch."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax.numpy", reason="JAX is not installed: make test-jax")

import jax

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan, TreePlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.drafters.mtp.drafter import MTPDrafter
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import Target, backends, load_target
from blockdraft.types import LoadOptions, SamplingParams
from blockdraft_jax.draft_runner import JaxDraftRunner
from blockdraft_jax.model import local_layout

pytestmark = pytest.mark.jax

SECONDS = [1.0 + 0.02 * count for count in range(41)]
GREEDY = [SamplingParams()] * 3
MIXED = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7)]
UNIFORMS = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PLANS = [
    ChainPlan(4, MIXED),
    ChainPlan(5, GREEDY, draft_window=3),
    ChainPlan(6, GREEDY, step_seconds=SECONDS),
    SampledPlan(5, MIXED, UNIFORMS),
    TreePlan(5, MIXED, 9),
    TreePlan(5, GREEDY, 40, step_seconds=SECONDS),
]
EAGLE3 = [
    {"qk_norm": True, "norm_before_residual": True, "norm_output": True, "attention_bias": True},
    {"fc_norm": True, "draft_vocab_size": 7},
    {"norm_before_fc": True, "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.fixture(scope="module")
def targets(tiny_target_dir: Path) -> tuple[Target, Target]:
    """The target in JAX on one device, and natively."""
    options = LoadOptions(dtype="float32", device="cpu")
    ours: Target = backends()["jax"].load(tiny_target_dir, options, local_layout(jax.local_devices()[:1]))
    return ours, load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")


def randomized(network: Any) -> Any:
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    if isinstance(network, Eagle3Network):
        order = torch.randperm(network.config.vocab_size, generator=generator)
        network.keep(order[: network.config.draft_vocab_size].sort().values)
    return network


def proposals(drafter: Any, plans: Sequence[Plan]) -> list[Proposal]:
    """Return drafts of three sequences, one of them empty at first: one per plan after each of several observations."""
    state, generator, drafts = drafter.new_state(3, 40), torch.Generator().manual_seed(1), []
    size = len(drafter.target_layers) * drafter.config.hidden_size
    for lengths in ([0, 6, 1], [1, 0, 5], [9, 2, 1]):
        tokens = torch.randint(4, 60, (3, max(lengths)), generator=generator)
        drafter.observe(state, tokens, torch.randn(3, max(lengths), size, generator=generator), lengths)
        anchors = torch.randint(4, 60, (3,), generator=generator)
        drafts += [drafter.propose(state, anchors, plan) for plan in plans]
    return drafts


def assert_same_drafts(ours: Any, theirs: Any, plans: Sequence[Plan] = PLANS) -> None:
    for mine, reference in zip(proposals(ours, plans), proposals(theirs, plans), strict=True):
        torch.testing.assert_close((mine.tokens, mine.parents), (reference.tokens, reference.parents), rtol=0, atol=0)
        torch.testing.assert_close(mine.expected, reference.expected, rtol=1e-3, atol=1e-4)
        for q, reference_q in zip(mine.q or (), reference.q or (), strict=True):
            if q is not None and reference_q is not None:
                torch.testing.assert_close(q.probs, reference_q.probs, rtol=1e-3, atol=1e-4)


def test_dflash(targets: tuple[Target, Target], tiny_drafter_dir: Path) -> None:
    """Includes causal and windowed layers, scaled embeddings, soft-capped logits, and several draft passes."""
    loaded: Any = load_drafter(tiny_drafter_dir, target=targets[1])
    layers = (LayerAttention(True, 4), LayerAttention(False, None))
    changed = {"num_hidden_layers": 2, "layers": layers, "input_embedding_scale": 2.0}
    changed |= {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "block_size": 6}
    config = type(loaded.config)(**{**vars(loaded.config), **changed})
    ours, theirs = (DFlashDrafter(randomized(loaded.network_class(config)), target) for target in targets)
    assert_same_drafts(ours, theirs, [*PLANS, ChainPlan(5, GREEDY, draft_passes=3)])
    assert ours.state_bytes(2, 50) == theirs.state_bytes(2, 50)


@pytest.mark.parametrize("changed", EAGLE3)
def test_eagle3(changed: dict[str, Any], targets: tuple[Target, Target], tiny_eagle3_dir: Path) -> None:
    loaded: Any = load_drafter(tiny_eagle3_dir, target=targets[1])
    config = Eagle3Config(**{**vars(loaded.config), **changed})
    ours, theirs = (Eagle3Drafter(randomized(Eagle3Network(config)), target) for target in targets)
    assert_same_drafts(ours, theirs)
    assert ours.state_bytes(2, 50) == theirs.state_bytes(2, 50)


@pytest.mark.parametrize("normed", [False, True])
def test_mtp(normed: bool, targets: tuple[Target, Target], tiny_mtp_dir: Path) -> None:
    loaded: Any = load_drafter(tiny_mtp_dir, target=targets[1])
    changed = {"block_size": 6, "normed_feedback": normed, "attention_bias": True}
    config = MTPConfig(**{**vars(loaded.config), **changed})
    assert_same_drafts(*(MTPDrafter(randomized(MTPNetwork(config)), target) for target in targets))


def test_a_new_kind(targets: tuple[Target, Target], installed_plugin: Callable[..., None]) -> None:
    """Two layers of different kinds, declared in one file of the tests."""
    folder = Path(__file__).parents[3] / "tests/drafters/new_kind"
    installed_plugin("mixed-layers", "[blockdraft.drafters]\nmixed = mixed_layers\n", folder)
    ours, theirs = (load_drafter("mixed", target=target) for target in targets)
    assert isinstance(ours.runner, JaxDraftRunner)  # type: ignore[attr-defined]
    assert_same_drafts(ours, theirs)
    sys.modules.pop("mixed_layers")


def test_what_jax_does_not_run(targets: tuple[Target, Target], tiny_dflash2_dir: Path, tiny_medusa_dir: Path) -> None:
    for folder, kind in ((tiny_dflash2_dir, "convolutions"), (tiny_medusa_dir, "heads")):
        reason = load_drafter(folder, target=targets[0]).compile_reason
        assert reason == f"it does not know {kind}, and torch runs it on the CPU"
