"""Weights quantized by torchao, which gives the same numbers on a CPU as on a GPU."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from blockdraft.kernels.cuda.compiler import compiled_layers
from blockdraft.kernels.cuda.rounded import round_weights, why_not_rounded
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.packed import PackedLinear
from blockdraft.targets import load_target

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def decoder(tied: bool) -> Decoder:
    layers = (LayerKind(Rope((1.0, 0.1, 0.01, 0.001))),) * 2
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "head_dim": 8}
    config = DecoderConfig(
        **sizes,
        num_heads=4,
        num_kv_heads=2,
        layers=layers,
        norm_eps=1e-6,
        activation="silu",
        query_scale=8**-0.5,
        tied_head=tied,
        qkv_bias=True,
    )
    shapes, generator = config.tensor_shapes(), torch.Generator().manual_seed(0)
    return Decoder(config, lambda name: torch.randn(shapes[name], generator=generator).bfloat16())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
def test_products_are_those_of_the_rounded_weights(kind: str, tied: bool) -> None:
    pytest.importorskip("torchao")
    plain, network = decoder(tied), decoder(tied)
    round_weights(network, kind)
    kept, table = dict(plain.named_weights()), "model.embed_tokens.weight"
    for name, weight in network.named_weights():
        same = weight.ndim == 1 or name == table
        error = (weight.float() - kept[name].float()).abs().amax(dim=-1) / kept[name].float().abs().amax(dim=-1)
        assert torch.equal(weight, kept[name]) if same else 0 < error.max() < (0.01 if kind == "int8" else 0.07), name
    layers = [layer for layer in network.modules() if isinstance(layer, PackedLinear)]
    assert {layer.rounded for layer in layers} == {kind, None}
    assert [layer for layer in layers if layer.rounded is None] == [network.embedding]
    x = torch.randn(5, 32).bfloat16()
    out: Tensor = network.layers[0].qkv(x)  # type: ignore[union-attr,operator]
    weight, bias = network.layers[0].qkv.weight, network.layers[0].qkv.bias  # type: ignore[union-attr]
    torch.testing.assert_close(out, F.linear(x, weight, bias), atol=0.2, rtol=0.02)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_layers_of_rounded_weights_are_compiled_as_one_graph(kind: str, constants: Callable[..., None]) -> None:
    pytest.importorskip("torchao")
    constants("blockdraft.kernels.cuda.compiler", BACKEND="aot_eager")  # no C++ to compile
    torch.compiler.reset()
    counters.clear()
    network, run_layer = decoder(tied=True), compiled_layers()
    round_weights(network, kind)
    tokens, at, mask = torch.arange(5)[None], torch.arange(5)[None], torch.zeros(1, 1, 10, 20).bfloat16()
    outputs = []
    for run in (DecoderLayer.__call__, run_layer):
        stores = torch.zeros(2, 1, 4, 21, 8).bfloat16()[..., :20, :].unbind(0)
        outputs.append(network(tokens, at, at, [mask], stores, run_layer=run)[0])
    torch.testing.assert_close(outputs[1], outputs[0], atol=0.05, rtol=0.05)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_what_cannot_be_rounded_says_why(monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="fp8 weights need an NVIDIA GPU, and the device is cpu; use int8"):
        load_target(tiny_target_dir, device="cpu", quantize="fp8")
    capability = [8, 0]
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    assert "for bfloat16 arithmetic, and the dtype is float32" in str(why_not_rounded("int8", GPU, torch.float32))
    assert 'pip install "blockdraft[gpu]"' in str(why_not_rounded("int8", GPU, torch.bfloat16))
    monkeypatch.setitem(sys.modules, "torchao", module_from_spec(ModuleSpec("torchao", None)))
    assert why_not_rounded("int8", GPU, torch.bfloat16) is None
    assert "need compute capability 8.9, and cuda has 8.0" in str(why_not_rounded("fp8", GPU, torch.bfloat16))
    capability[1] = 9
    assert why_not_rounded("fp8", GPU, torch.bfloat16) is None
