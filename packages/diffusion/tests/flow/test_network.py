"""Jumps of flow maps, and equality of a new network with the v1 network in it."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from copies import copy_with
from torch import Tensor

from blockdraft.nn.draft_config import LayerAttention
from blockdraft_diffusion.flow.network import LIKELY, FlowConfig, FlowNetwork, mean_embedding, moved, position_noise

CONFIG = FlowConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=20,
    block_size=4,
    mask_token_id=19,
    target_layers=(1,),
    num_target_layers=3,
    rope_theta=1e4,
    layers=(LayerAttention(False, None),),
    noise_std=3.0,
    diffusion_steps=2,
)


def same(x: Tensor) -> Tensor:
    return x


def linear(share: float) -> float:
    return share


def test_a_new_network_adds_nothing_to_the_masks() -> None:
    network = FlowNetwork(CONFIG)
    added = network.entering(torch.randn(2, 3, 16), torch.tensor([0.2]), torch.tensor([0.7]))
    assert added.shape == (2, 3, 16) and not added.any()


def test_the_network_tells_states_and_both_times_apart() -> None:
    network = FlowNetwork(CONFIG)
    for weight in (network.state_proj.weight, network.time_proj.weight):
        torch.nn.init.normal_(weight)
    state, levels = torch.randn(3, 16), [torch.tensor([time]) for time in (0.0, 0.3, 0.31, 1.0)]
    actual = [network.entering(state, begin, end) for begin in levels for end in levels]
    actual += [network.entering(state + 1, levels[0], levels[1])]
    assert all((one - other).abs().max() > 1e-2 for i, one in enumerate(actual) for other in actual[:i])
    # The network sees only the direction of a state, because states are larger near noise than near tokens.
    torch.testing.assert_close(network.entering(9 * state, levels[1], levels[2]), actual[6])


def test_jumps_to_one_place_compose() -> None:
    state, clean = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(moved(state, clean, 0.3, 1.0), clean)
    torch.testing.assert_close(moved(state, clean, 0.3, 0.3), state)
    torch.testing.assert_close(moved(moved(state, clean, 0.1, 0.4), clean, 0.4, 0.8), moved(state, clean, 0.1, 0.8))


def test_the_mean_embedding_is_that_of_the_likeliest_tokens() -> None:
    table, logits = torch.randn(30, 8), 3 * torch.randn(2, 5, 30)
    best = logits.topk(LIKELY, dim=-1)
    kept = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
    torch.testing.assert_close(mean_embedding(logits, table.__getitem__), kept.softmax(dim=-1) @ table)
    few = torch.tensor([[0.0, -torch.inf, -torch.inf]])  # fewer tokens than are averaged, one of them possible
    torch.testing.assert_close(mean_embedding(few, table.__getitem__), table[:1])


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_block_goes_from_noise_to_tokens_by_as_many_passes(passes: int) -> None:
    """If all passes draft the same token, the states are on the line from the noise to it."""
    seen = list[tuple[float, float]]()
    noise, clean = torch.randn(2, 3, 16), torch.randn(2, 3, 16)

    def entering(state: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        expected = (1 - begin) * CONFIG.noise_std * noise + begin * clean
        torch.testing.assert_close(state, expected)
        seen.append((float(begin), float(end)))
        return state

    network = copy_with(FlowNetwork(CONFIG), entering=entering)
    out = network.denoised(noise, passes, linear, same, lambda hidden: clean)
    assert seen == [(pytest.approx(i / passes), pytest.approx((i + 1) / passes)) for i in range(passes)]
    assert out.shape == noise.shape


def test_each_pass_sees_what_the_one_before_drafted() -> None:
    network, from_draft = copy_with(FlowNetwork(CONFIG), entering=lambda state, begin, end: state), list[Tensor]()

    def clean(hidden: Tensor) -> Tensor:
        from_draft.append(hidden + 1)
        return from_draft[-1]

    noise, quarters = torch.randn(3, 16), [0.0, 0.25, 1.0]
    share: Callable[[float], float] = lambda done: quarters[round(2 * done)]  # noqa: E731
    out = network.denoised(noise, 2, share, same, clean)
    torch.testing.assert_close(out, 0.75 * 3 * noise + 0.25 * (3 * noise + 1))
    assert len(from_draft) == 1


def test_noise_is_the_same_each_time_and_spread_as_it_should_be() -> None:
    noise = position_noise(16)
    assert torch.equal(noise, position_noise(16)) and noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    assert len(noise.unique(dim=0)) == len(noise)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_std": 0.0}, "noise_std must be a positive number.*, got 0.0"),
        ({"noise_std": None}, "noise_std must be .*is absent"),
        ({"diffusion_steps": 0}, "diffusion_steps must be a whole number of at least 1.*, got 0"),
    ],
)
def test_config_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
