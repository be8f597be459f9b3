"""The paper's network: its checkpoint layout, and its arithmetic against a readable twin."""

import math

import pytest
import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft_diffusion.dit import DiT, DiTConfig
from blockdraft_diffusion.losses import block_causal

SMALL = DiTConfig(vocab_size=50258, model_length=1024, hidden_dim=768, n_blocks=12, n_heads=12, cond_dim=128)
TINY = DiTConfig(vocab_size=50, model_length=32, hidden_dim=24, n_blocks=2, n_heads=3, cond_dim=8)


@pytest.fixture(scope="module")
def network() -> DiT:
    """Return a network all of whose weights have an effect."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = DiT(TINY)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return made.eval().requires_grad_(False)


def test_layout_of_the_published_model() -> None:
    with torch.device("meta"):
        tensors = DiT(SMALL).state_dict()
    assert len(tensors) == 133 and sum(tensor.numel() for tensor in tensors.values()) == 169_627_252
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["sampling_eps_min"] == () and shapes["backbone.rotary_emb.inv_freq"] == (32,)
    assert shapes["backbone.vocab_embed.embedding"] == (50258, 768)
    assert shapes["backbone.sigma_map.mlp.0.weight"] == (128, 256) and "backbone.sigma_map.mlp.2.bias" in shapes
    of_block = {name.removeprefix("backbone.blocks.11."): shape for name, shape in shapes.items() if ".11." in name}
    assert of_block == {
        "norm1.weight": (768,),
        "norm2.weight": (768,),
        "attn_qkv.weight": (2304, 768),
        "attn_out.weight": (768, 768),
        "mlp.0.weight": (3072, 768),
        "mlp.0.bias": (3072,),
        "mlp.2.weight": (768, 3072),
        "mlp.2.bias": (768,),
        "adaLN_modulation.weight": (4608, 128),
        "adaLN_modulation.bias": (4608,),
    }
    assert shapes["backbone.output_layer.adaLN_modulation.weight"] == (1536, 128)
    assert shapes["backbone.output_layer.linear.weight"] == (50258, 768)


def slow_logits(network: DiT, tokens: Tensor, visible: Tensor) -> Tensor:
    """Return the logits of one sequence, computed head by head."""
    weights = {name.removeprefix("backbone."): tensor for name, tensor in network.state_dict().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name: str, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        return normed * weights[f"{name}.weight"] * (1 + scale) + shift

    def turned(x: Tensor) -> Tensor:
        half, actual = x.size(-1) // 2, x.clone()
        for place in range(len(x)):
            for pair in range(half):
                angle = place / 10000 ** (2 * pair / x.size(-1))
                one, other = x[place, pair], x[place, pair + half]
                actual[place, pair] = one * math.cos(angle) - other * math.sin(angle)
                actual[place, pair + half] = other * math.cos(angle) + one * math.sin(angle)
        return actual

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    time = torch.tensor([math.cos(0)] * 128 + [math.sin(0)] * 128)
    heard = silu(linear("sigma_map.mlp.2", silu(linear("sigma_map.mlp.0", time))))
    x, head_dim = weights["vocab_embed.embedding"][tokens], TINY.hidden_dim // TINY.n_heads
    for number in range(TINY.n_blocks):
        block = f"blocks.{number}"
        changes = linear(f"{block}.adaLN_modulation", heard).view(6, -1)
        qkv = linear(f"{block}.attn_qkv", norm(f"{block}.norm1", x, changes[0], changes[1]))
        heads = []
        for head in range(TINY.n_heads):
            parts = [part[:, head * head_dim : (head + 1) * head_dim] for part in qkv.split(TINY.hidden_dim, dim=1)]
            scores = turned(parts[0]) @ turned(parts[1]).T / head_dim**0.5
            heads.append(scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ parts[2])
        x = x + changes[2] * linear(f"{block}.attn_out", torch.cat(heads, dim=1))
        inner = linear(f"{block}.mlp.0", norm(f"{block}.norm2", x, changes[3], changes[4]))
        curved = 0.5 * inner * (1 + torch.tanh((2 / math.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        x = x + changes[5] * linear(f"{block}.mlp.2", curved)
    changes = linear("output_layer.adaLN_modulation", heard).view(2, -1)
    return linear("output_layer.linear", norm("output_layer.norm_final", x, changes[0], changes[1]))


def test_arithmetic(network: DiT) -> None:
    tokens = torch.randint(50, (9,), generator=torch.Generator().manual_seed(0))
    positions, visible = torch.arange(9)[None], block_causal(9, 4)
    actual = network.logits(network.hidden(tokens[None], positions, visible[None]))[0]
    expected = slow_logits(network, tokens, visible)
    assert torch.allclose(actual, expected, atol=1e-3 * float(expected.abs().max()))
    cache = KVCache(1, 9)
    network.hidden(tokens[None, :4], positions[:, :4], visible[None, :4, :4], cache)
    cache.commit([range(4)])
    again = network.logits(network.hidden(tokens[None, 4:], positions[:, 4:], visible[None, 4:], cache))[0]
    assert torch.allclose(again, actual[4:], atol=1e-3 * float(expected.abs().max()))


def test_few_bits(network: DiT) -> None:
    few = DiT(TINY).bfloat16()
    assert few.hidden(torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None]).dtype == torch.bfloat16
    assert few.backbone.rotary_emb.frequencies.dtype == torch.float32
