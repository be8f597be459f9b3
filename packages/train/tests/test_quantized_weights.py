"""Weights that are rounded in training: to what, for how long, and what it is good for."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from blockdraft import load_drafter, load_target
from blockdraft.kernels.cpu.compiled_network import pack_together
from blockdraft.nn.quantize_weight import quantize_weight
from blockdraft.targets import Target
from blockdraft_train.quantized_weights import quantized_layers, quantized_weights
from blockdraft_train.variant import find_variant
from blockdraft_train.variants import variant_names


def some_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 24, bias=False), nn.LayerNorm(24))


def linear(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def own(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


@pytest.mark.parametrize("bits", [4, 8])
def test_linear_layers_are_rounded_meanwhile_and_get_the_gradients_of_what_they_were(bits: int) -> None:
    network, twin, x = some_network(), some_network(), torch.randn(5, 48)
    before = own(network)
    for name, layer in twin.named_children():
        if isinstance(layer, nn.Linear):
            near = quantize_weight(
                layer.weight.detach(), bits, 16 if name == "0" else 32, shares=(1.0, 0.9)
            ).dequantize()
            assert not torch.equal(near, layer.weight)
            layer.weight.data = near
    twin(x).square().sum().backward()
    with quantized_weights(linear(network), bits):
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))
        network(x).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_an_error_leaves_the_weights_as_they_were() -> None:
    network = some_network()
    before = own(network)
    with pytest.raises(KeyError), quantized_weights(linear(network), 4):
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))


@pytest.mark.slow
def test_learning_with_rounded_weights_makes_them_bear_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 6) @ torch.randn(6, 48)  # related inputs, among which errors of rounding can cancel out
    expected = x @ torch.randn(48, 32) / 7

    def loss(network: nn.Module) -> Tensor:
        return (network(x) - expected).square().mean()

    unrounded, then_rounded, steps = {}, {}, 400
    for every in (None, 2, 1):
        torch.manual_seed(1)
        network = nn.Linear(48, 32)
        layers = [network]
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for step in range(steps):
            with quantized_weights(layers, 4) if every and step % every == 0 else nullcontext():
                loss(network).backward()
            optimizer.step()
            optimizer.zero_grad()
            falling.step()
        with torch.no_grad():
            unrounded[every] = float(loss(network))
            with quantized_weights(layers, 4):
                then_rounded[every] = float(loss(network))
    assert then_rounded[2] < 0.7 * then_rounded[None], then_rounded
    assert unrounded[2] < 0.7 * unrounded[1], unrounded  # and every other step leaves the unrounded ones useful


def test_weights_that_are_not_finite_are_left_for_the_loss_to_tell() -> None:
    network = some_network()
    with torch.no_grad():
        network[0].weight[3, 5] = torch.nan
    before = own(network)
    with quantized_weights(linear(network), 4):
        assert not bool(network(torch.ones(1, 48)).isfinite().all())
    for ours, theirs in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_layers_that_are_never_rounded_are_refused() -> None:
    some = some_network()
    assert quantized_layers(some, lambda name: name == "2", 4) == [some[2]]
    odd = nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 12), nn.Linear(16, 12))
    with pytest.raises(ValueError, match="qat_bits is 4, and the drafter has layers of 6, 12 inputs, no multi"):
        quantized_layers(odd, lambda name: name == "2", 4)  # one odd layer, and drafters are loaded unrounded
    with pytest.raises(ValueError, match="qat_bits is 8, and drafters of this kind are never quantized; leave"):
        quantized_layers(some, lambda name: False, 8)


@pytest.fixture(scope="module")
def beside_four_bits() -> Target:
    return load_target("bundled", dtype="float32", device="cpu", quantize="int4", compile="on")


@pytest.mark.parametrize("kind", variant_names())
def test_what_is_rounded_in_training_is_what_is_rounded_where_a_drafter_is_loaded(
    kind: str, beside_four_bits: Target
) -> None:
    variant_class = find_variant(kind)
    variant = variant_class(variant_class.recipe_class())
    network = variant.network(variant.config(beside_four_bits))
    for parameter in network.parameters():
        if parameter.ndim == 2 and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)  # zeros are the same, rounded or not
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    runner = beside_four_bits.runner(network, owned=True)
    assert (runner.compile_reason is None) == (kind != "flow")
    quantized = getattr(runner, "quantized_layers", set())
    assert quantized == {name for name in names if variant.is_quantized(name)}


@pytest.mark.slow
def test_they_are_rounded_as_where_a_drafter_is_loaded(beside_four_bits: Target) -> None:
    library = beside_four_bits.compiled.library  # type: ignore[attr-defined]
    layers = linear(load_drafter(target=load_target("bundled", dtype="float32", device="cpu", compile="off")).network)  # type: ignore[attr-defined]
    packed = [pack_together([layer], library, torch.float32, 4) for layer in layers]
    with quantized_weights(layers, 4):
        for layer, compiled in zip(layers, packed, strict=True):
            torch.testing.assert_close(compiled.weight, layer.weight.data, rtol=0, atol=1e-6)
    assert len(layers) > 10
