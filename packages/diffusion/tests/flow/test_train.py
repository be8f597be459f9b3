"""Training of flow maps: draft tokens of the data's tokens, and jumps as far as two shorter ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.targets import Target
from blockdraft_diffusion.flow.network import FlowConfig, FlowNetwork, mean_embedding, moved
from blockdraft_diffusion.flow.train import FlowRecipe, FlowVariant, Moments, noise_std
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.batches import PackedSequences
from blockdraft_train.loss import DraftLoss
from blockdraft_train.objectives import Slots

RECIPE = FlowRecipe(layers=1, target_layers=(0, 1), block_size=4, save_dtype="float32", mask_token_id=3)
ANCHORS = torch.tensor([[2, 5, 9, 12], [1, 4, 7, -1]])


@pytest.fixture(scope="module")
def batch(target: Target) -> tuple[Tensor, PackedSequences]:
    """Features and rows of two texts of 18 tokens."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 200, (2, 18), generator=random)
    places = ANCHORS.unsqueeze(-1) + torch.arange(4)
    blocks = tokens.gather(1, places.clamp(min=0).flatten(1)).view(places.shape)
    taught = (ANCHORS >= 0).unsqueeze(-1).expand(-1, -1, 3)
    positions = torch.arange(18).expand(2, -1)
    rows = PackedSequences(tokens, positions, torch.zeros(2, 18, dtype=torch.long), ANCHORS, blocks, taught)
    return torch.randn(2, 18, 2 * target.hidden_size, generator=random), rows


def made(target: Target, disturbed: bool = True, **changes: Any) -> tuple[FlowVariant, FlowNetwork]:
    variant = FlowVariant(replace(RECIPE, **changes))
    network = variant.network(variant.config(target))  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.15 * disturbed * torch.randn(parameter.shape, generator=random)
    return variant, network.train()


def test_a_longer_jump_learns_from_two_shorter_ones(target: Target, batch: tuple[Tensor, PackedSequences]) -> None:
    """Loss and gradient equal those by hand. One block learns from the data, the others different jumps."""
    variant, network = made(target)
    hidden_states, rows = batch
    random = torch.Generator().manual_seed(1)
    begin = torch.tensor([[0.3, 0.0, 0.0, 0.5], [0.1, 0.2, 0.3, 0.4]])[..., None, None]
    middle = torch.tensor([[0.3, 0.4, 0.6, 0.5], [0.3, 0.2, 0.8, 0.5]])[..., None, None]
    end = torch.tensor([[0.3, 0.7, 1.0, 0.9], [0.9, 0.3, 1.0, 0.6]])[..., None, None]
    second = (end - middle) * (1 - begin) / ((end - begin) * (1 - middle))
    second[0, 0] = -1
    noise = torch.randn(2, 4, 3, target.hidden_size, generator=random)
    variant.moments = lambda rows, size: Moments(noise, begin, middle, end, second)  # type: ignore[method-assign]
    hidden = variant.hidden(network, target, hidden_states, rows).flatten(0, 1)
    logits = variant.logits(network, target, hidden)
    slots = Slots(hidden, logits, rows.tokens_BAL.flatten(0, 1), rows.taught_BAK.flatten(0, 1))
    actual = variant.losses(network, slots)

    run = variant.pass_over_blocks(network, target, hidden_states, rows)

    def dist(state: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = target.head(run(network.entering(state, s, t))[:, :, 1:])
        return logits.log_softmax(dim=-1), mean_embedding(logits, target.embed)

    data = target.embed(rows.tokens_BAL[:, :, 1:])
    state = (1 - begin) * network.config.noise_std * noise + begin * data
    own, _ = dist(state, begin, end)
    with torch.no_grad():
        first, clean = dist(state, begin, middle)
        other, _ = dist(moved(state, clean, begin, middle), middle, end)
        share = second.clamp(min=0)
        wanted = (1 - share) * first.exp() + share * other.exp()
    jumped = -(wanted * own).sum(dim=-1)
    losses = -own.gather(-1, rows.tokens_BAL[:, :, 1:, None]).squeeze(-1)
    is_jump = (second >= 0).squeeze(-1)
    expected = {"decay": losses.masked_fill(is_jump, 0), "jump": jumped.masked_fill(~is_jump, 0)}
    assert actual.keys() == expected.keys() == variant.factors().keys()
    for name, losses in actual.items():
        torch.testing.assert_close(losses.unflatten(0, (2, 4)), expected[name], atol=1e-4, rtol=1e-4)
    assert torch.equal(variant.draft_tokens(network, slots), own.argmax(dim=-1).flatten(0, 1))
    ours, theirs = (
        torch.autograd.grad(losses["jump"].sum(), [*network.parameters()], retain_graph=True)
        for losses in (actual, expected)
    )
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_the_shares_of_two_jumps_lead_where_both_lead(target: Target, batch: tuple[Tensor, PackedSequences]) -> None:
    variant, _ = made(target)
    _, begin, middle, end, second = variant.moments(batch[1], 8)
    state, one, two = torch.randn(3, 2, 4, 3, 8, dtype=torch.float64)
    both = moved(moved(state, one, begin, middle), two, middle, end)
    at_once = moved(state, torch.lerp(one, two, second.double()), begin, end)
    is_jump = (second >= 0).expand(both.shape)
    assert is_jump.any()
    torch.testing.assert_close(at_once[is_jump], both[is_jump], atol=1e-5, rtol=1e-5)


def test_moments_follow_from_the_seed_the_text_and_the_anchors(
    target: Target, batch: tuple[Tensor, PackedSequences]
) -> None:
    variant, rows = made(target)[0], batch[1]
    first = variant.moments(rows, 8)
    before = torch.random.get_rng_state()
    assert all(map(torch.equal, first, variant.moments(rows, 8)))
    assert torch.equal(torch.random.get_rng_state(), before)
    alone = variant.moments(PackedSequences(*(one[1:] for one in rows)), 8)  # as where each process has a row
    assert all(torch.equal(one[1:], two) for one, two in zip(first, alone, strict=True))
    for others in (rows._replace(anchors_BA=rows.anchors_BA + 1), rows._replace(tokens_BS=rows.tokens_BS + 1)):
        assert not torch.equal(first.noise_BAKH, variant.moments(others, 8).noise_BAKH)
    assert not torch.equal(first.noise_BAKH, made(target, seed=1)[0].moments(rows, 8).noise_BAKH)


def test_moments_are_of_both_kinds_and_begin_and_end_where_drafting_does(target: Target) -> None:
    variant = made(target, jumps=0.25)[0]
    blocks = torch.zeros(1, 4000, 4, dtype=torch.long)
    rows = PackedSequences(
        *torch.zeros(3, 1, 8, dtype=torch.long), torch.arange(4000)[None], blocks, blocks[..., 1:] == 0
    )
    noise, begin, middle, end, second = (one.squeeze() for one in variant.moments(rows, 2))
    jumps = second >= 0
    assert abs(float(jumps.float().mean()) - 0.25) < 0.03 and abs(float(noise.std()) - 1) < 0.03
    assert abs(float((begin == 0).float().mean()) - 0.5) < 0.03
    assert abs(float((end[jumps] == 1).float().mean()) - 0.5) < 0.06
    assert (begin[jumps] <= middle[jumps]).all() and (middle[jumps] < end[jumps]).all() and end.max() == 1
    assert torch.equal(begin[~jumps], end[~jumps]) and torch.equal(begin[~jumps], middle[~jumps])
    assert second.max() <= 1 + 1e-5 and (second[~jumps] == -1).all()
    assert begin.min() == 0 and 0.9 < float(begin.max()) < 1


def test_evaluation_is_drafting(
    target: Target,
    tmp_path: Path,
    parity: Callable[..., Any],
    tiny_flow_dir: Path,
    batch: tuple[Tensor, PackedSequences],
) -> None:
    """With three passes. The held-out loss has no part for jumps."""
    variant, network = made(target, diffusion_steps=3)
    config = variant.config(target)
    assert isinstance(config, FlowConfig) and config.diffusion_steps == 3
    export(tmp_path / "drafter", ExportFormat("zlab"), config, variant.saved(network.state_dict()), target)
    parity(variant, network.eval(), load_drafter(tmp_path / "drafter", target=target), target)
    sums = DraftLoss(network, variant, target).eval()(batch[0], None, *batch[1])
    assert sums.terms_T[0] > 0 and sums.terms_T[1] == 0


def test_both_losses_fall(target: Target, batch: tuple[Tensor, PackedSequences]) -> None:
    variant, network = made(target, disturbed=False)
    loss, lines = DraftLoss(network, variant, target).train(), list[list[float]]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(30):
        terms = loss(batch[0], None, *batch[1]).terms_T
        terms.sum().backward()
        assert network.state_proj.weight.grad is not None and network.state_proj.weight.grad.any()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(terms.tolist())
    for early, late in zip(zip(*lines[:3], strict=True), zip(*lines[-3:], strict=True), strict=True):
        assert sum(late) < 0.6 * sum(early)


def test_noise_goes_with_the_spread_of_the_embedding(target: Target) -> None:
    before, embed = noise_std(target), target.embed
    table = embed(torch.arange(target.vocab_size))
    spread = float((table - table.mean(dim=0)).square().mean().sqrt())
    assert before == pytest.approx(spread / 2 * (32 / torch.tensor(265.0).log().item()) ** 0.5, rel=1e-3)
    target = copy_with(target, embed=lambda tokens: 3 * embed(tokens) + 7)
    assert noise_std(target) == pytest.approx(3 * before, rel=1e-3)
    with torch.device("meta"):  # shapes alone are wanted
        assert noise_std(target) == pytest.approx(3 * before, rel=1e-3)


def test_a_flow_map_goes_on_from_a_flow_map_of_other_passes(target: Target, tiny_flow_dir: Path) -> None:
    changes = {"layers": 2, "block_size": 8, "init": str(tiny_flow_dir), "diffusion_steps": 1}
    variant = FlowVariant(replace(RECIPE, **changes))  # type: ignore[arg-type]
    config = replace(variant.config(target), noise_std=0.5)  # type: ignore[call-arg]
    network = variant.network(config)
    assert network.state_proj.weight.any() and network.config.diffusion_steps == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("jumps", 0.0, "greater than 0"), ("jumps", 1.0, "less than 1"), ("diffusion_steps", 0, "at least 1")],
)
def test_recipes_are_checked(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be {message}, got {value}"):
        FlowRecipe(**{field: value})  # type: ignore[arg-type]
