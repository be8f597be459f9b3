"""Proposals of a flow map: passes, noise, and that q is the distribution that draft tokens are sampled from."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan
from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_diffusion.flow.drafter import FlowDrafter
from blockdraft_tools.export import ExportFormat, convert, format_for
from blockdraft_tools.gguf.drafters import drafter_metadata
from blockdraft_tools.inspect import inspect
from blockdraft_train.doctor.checks import checker_of

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7)
CONTEXT = 9


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_flow_dir: Path) -> FlowDrafter:
    actual = load_drafter(tiny_flow_dir, target=target)
    assert isinstance(actual, FlowDrafter)
    return actual


def observed(drafter: FlowDrafter, batch: int = 1, length: int = CONTEXT) -> object:
    """State after a context of random hidden states, the same for all rows."""
    hidden_states = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(3)).expand(batch, -1, -1)
    state = drafter.new_state(batch, 40)
    drafter.observe(state, torch.zeros(batch, length, dtype=torch.long), hidden_states, [length] * batch)
    return state


def logits_of(drafter: FlowDrafter, plan: Plan | None = None, length: int = CONTEXT) -> Tensor:
    plan = plan or ChainPlan(drafter.block_size, [GREEDY])
    with torch.no_grad():
        return drafter.refined_pass(observed(drafter, 1, length), torch.tensor([7]), plan)[1][0]  # type: ignore[arg-type]


def test_passes_are_those_of_the_checkpoint_unless_asked_otherwise(drafter: FlowDrafter, target: Target) -> None:
    size = drafter.block_size
    actual = {passes: logits_of(drafter, ChainPlan(size, [GREEDY], draft_passes=passes)) for passes in range(1, 6)}
    assert torch.equal(logits_of(drafter), actual[2])
    assert all((actual[n] - actual[m]).abs().max() > 1e-3 for n in actual for m in range(1, n))
    # The times of the jumps are those of the schedule.
    linear = FlowDrafter(drafter.network, target)
    linear.noise_schedule = "linear"
    assert not torch.equal(logits_of(linear), actual[2])
    assert torch.equal(logits_of(linear, ChainPlan(size, [GREEDY], draft_passes=1)), actual[1])


def test_draft_tokens_repeat_and_depend_on_the_noise_of_their_positions(drafter: FlowDrafter) -> None:
    first = logits_of(drafter)
    assert torch.equal(first, logits_of(drafter))
    noise = drafter.noise.clone()
    try:
        drafter.noise[CONTEXT + 1] += 1.0  # that of the first draft token; the others see it
        changed = (logits_of(drafter) - first).abs().amax(dim=-1)
        assert (changed > 1e-4).all()
        drafter.noise.copy_(noise)
        drafter.noise[CONTEXT] += 1.0  # the anchor's, and of those behind the block
        drafter.noise[CONTEXT + drafter.block_size] += 1.0
        assert torch.equal(logits_of(drafter), first)
    finally:
        drafter.noise.copy_(noise)


def test_a_shorter_plan_runs_fewer_positions(drafter: FlowDrafter) -> None:
    assert logits_of(drafter, ChainPlan(3, [GREEDY])).shape == (2, 265)


def sampled(drafter: FlowDrafter, rows: int) -> Proposal:
    """Sampled chains of rows with the same context, with evenly spread random numbers for their first draft tokens."""
    draws = torch.rand(rows, drafter.block_size - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draws[:, 0] = (torch.arange(rows) + 0.5) / rows
    plan = SampledPlan(drafter.block_size, [SAMPLED] * rows, draws)
    return drafter.propose(observed(drafter, rows), torch.full((rows,), 7), plan)  # type: ignore[arg-type]


def test_q_is_the_distribution_that_draft_tokens_are_sampled_from(drafter: FlowDrafter) -> None:
    """The distribution of a position given the noise does not depend on draft tokens at other positions."""
    rows = 200
    proposal, expected = sampled(drafter, rows), (logits_of(drafter) / 0.7).softmax(dim=-1)
    assert proposal.q is not None
    for q in proposal.q:
        assert q is not None
        best = expected.topk(q.ids.size(1), dim=-1)  # as distributions are cut
        cut = torch.zeros_like(expected).scatter(1, best.indices, best.values / best.values.sum(dim=-1, keepdim=True))
        whole = torch.zeros_like(expected).scatter(1, q.ids[:7], q.probs[:7])
        torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-4)
    shares = proposal.tokens[:, 1].bincount(minlength=265) / rows
    assert (shares - whole[0]).abs().max() < 1.01 / rows


def test_torch_runs_it_next_to_a_compiled_target(tiny_target_dir: Path, tiny_flow_dir: Path) -> None:
    actual = []
    for compile in ("on", "off"):
        target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile=compile)
        drafter = load_drafter(tiny_flow_dir, target=target)
        assert isinstance(drafter, FlowDrafter) and drafter.compile_reason is not None
        actual.append(logits_of(drafter, ChainPlan(8, [GREEDY], draft_window=4)))
    torch.testing.assert_close(*actual, atol=1e-4, rtol=1e-4)


def test_it_is_inspected_and_refused_by_name_where_it_cannot_go(
    target: Target, drafter: FlowDrafter, tiny_flow_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    report = inspect(tiny_flow_dir, tiny_target_dir)
    assert report.about["architecture"] == "FlowMapDraftModel"
    assert report.conventions["FlowMapDraftModel"] == {"diffusion_steps": 2, "noise_std": 0.5}
    assert report.conventions["draft_tokens"] == 7
    assert [engine for engine, start in report.starts.items() if start.line] == ["blockdraft"]
    assert all(start.remedy is None for engine, start in report.starts.items() if engine != "blockdraft")
    assert "Flow" in str(report.starts["llama.cpp"].reason)
    with pytest.raises(UsageError, match="The kind of drafter is .Flow.; llama.cpp drafts with files of DFlash"):
        drafter_metadata(drafter.config)
    with pytest.raises(UsageError, match="the architecture must be one of.*, got 'FlowMapDraftModel'"):
        convert(tiny_flow_dir, tmp_path / "out", format_for("speculators", target, str(tiny_target_dir)), target)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"holds a FlowConfig, which cannot be examined"):
        checker_of(tiny_flow_dir, target)
    assert ExportFormat("zlab").check(drafter.config) is None
