"""Convolutions and selector, compared with twins that go position by position; a new network adds nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import CandidateSelector, DFlash2Config, DFlash2Network, DynamicConv
from blockdraft.formats.zlab import read_checkpoint


@pytest.fixture(scope="module")
def config(tiny_dflash2_dir: Path) -> DFlash2Config:
    config, _ = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(config, DFlash2Config)
    return config


def disturbed(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def convolved(y: Tensor, base: Tensor, delta: Tensor, group_size: int) -> Tensor:
    """Readable twin of a convolution: y `[N, H]`, base `[K, H]`, delta `[N, K, groups]`."""
    out = torch.zeros_like(y)
    for slot in range(len(y)):
        for channel in range(y.size(1)):
            for target_layer in range(min(len(base), slot + 1)):
                weight = base[target_layer, channel] + delta[slot, target_layer, channel // group_size]
                out[slot, channel] += weight * y[slot - target_layer, channel]
    return out


@pytest.mark.parametrize("count", [1, 2, 6])  # blocks may be shorter than the kernel
def test_convolutions_stand_around_the_sublayer(config: DFlash2Config, count: int) -> None:
    conv = disturbed(DynamicConv(config))
    torch.manual_seed(1)
    x, target_layers, groups = torch.randn(2, count, 32), config.conv_kernel_size, 32 // config.conv_group_size
    out = conv(x, torch.sin)
    for row in range(2):
        delta = (x[row] @ conv.kernel_projection.weight.T).view(count, 2, target_layers, groups)
        before = convolved(x[row], conv.base_kernel[0], delta[:, 0], config.conv_group_size)
        after = convolved(before.sin(), conv.base_kernel[1], delta[:, 1], config.conv_group_size)
        torch.testing.assert_close(out[row], after, atol=1e-5, rtol=1e-4)


def test_gradients_reach_input_and_kernels(config: DFlash2Config) -> None:
    conv = disturbed(DynamicConv(config)).double()
    x = torch.randn(1, 3, 32, dtype=torch.float64, requires_grad=True)
    weights = [conv.base_kernel, conv.kernel_projection.weight]

    def run(x: Tensor, base: Tensor, projection: Tensor) -> Tensor:
        named = {"base_kernel": base, "kernel_projection.weight": projection}
        return torch.func.functional_call(conv, named, (x, torch.sin))

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


def test_the_lattice_holds_every_candidate_after_every_candidate_before(config: DFlash2Config) -> None:
    torch.manual_seed(2)
    network = DFlash2Network(config)
    selector = disturbed(network.candidate_selector)
    hidden, logits, anchor = torch.randn(2, 4, 32), torch.randn(2, 4, config.vocab_size), torch.tensor([7, 9])
    ids, scores = network.lattice(hidden, logits, anchor)
    assert ids.shape == (2, 4, 5) and scores.shape == (2, 4, 5, 5)
    for row in range(2):
        for slot in range(4):
            best = logits[row, slot].topk(5).indices.tolist()
            assert ids[row, slot].tolist() == sorted(best)
            for p in range(5):
                a = int(anchor[row] if slot == 0 else ids[row, slot - 1, p])
                gate = selector.predecessor_codebook[a] * selector.hidden_projection(hidden[row, slot])
                for k, b in enumerate(sorted(best)):
                    expected = logits[row, slot, b] + gate @ selector.successor_codebook[b]
                    torch.testing.assert_close(scores[row, slot, p, k], expected)


def test_a_new_network_is_the_v1_network_in_it(config: DFlash2Config, tiny_drafter_dir: Path) -> None:
    v1_config, tensors = read_checkpoint(tiny_drafter_dir)
    v1, v2 = DFlashNetwork(v1_config), DFlash2Network(config)
    v1.load_state_dict(tensors)
    assert not v2.load_state_dict(tensors, strict=False).unexpected_keys
    torch.manual_seed(3)
    block, positions = torch.randn(2, 8, 32), torch.arange(8).expand(2, 8)

    def own_values(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return queries * values.repeat_interleave(2, dim=1)

    hidden = [network(block, positions, own_values) for network in (v1, v2)]
    assert torch.equal(*hidden)
    logits = torch.randn(2, 8, config.vocab_size)
    ids, scores = v2.lattice(hidden[1], logits, torch.tensor([7, 9]))
    assert torch.equal(scores, logits.gather(2, ids).unsqueeze(2).expand_as(scores))


def test_of_equal_scores_the_lowest_id_wins(config: DFlash2Config) -> None:
    logits = torch.zeros(1, 1, config.vocab_size)
    logits[0, 0, [90, 17, 55, 200]] = 3.0
    ids, scores = DFlash2Network(config).lattice(torch.randn(1, 1, 32), logits, torch.tensor([7]))
    assert ids[0, 0, scores[0, 0, 0].argmax()] == 17


def test_a_new_selector_can_learn(config: DFlash2Config) -> None:
    """The successor codebook is zero, so it alone has a gradient at first; the others have one once it has changed."""
    selector = CandidateSelector(config)
    tokens = torch.tensor([[3, 4]])
    optimizer = torch.optim.SGD(selector.parameters(), lr=1.0)
    for moved in (1, 3):
        optimizer.zero_grad()
        selector(torch.ones(1, 32), tokens, tokens).logsumexp(dim=(1, 2)).sum().backward()
        assert sum(bool(parameter.grad.any()) for parameter in selector.parameters()) == moved
        optimizer.step()
