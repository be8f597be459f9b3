"""Padding and compiling the decoder. Its numbers are tested in tests/targets/test_native.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.nn.attention import grouped_mask
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope

ROPE = Rope((1.0, 0.3, 0.1))
CONFIG = DecoderConfig(
    vocab_size=19,
    hidden_size=12,
    intermediate_size=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layers=(LayerKind(ROPE), LayerKind(Rope((0.5, 0.2, 0.1), 1.5), window=3), LayerKind(ROPE, window=3)),
    norm_eps=1e-5,
    activation="silu",
    query_scale=0.4,
    tied_head=False,
    qk_norm=True,
    post_norms=True,
    attention_softcap=5.0,
    final_softcap=4.0,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = CONFIG.tensor_shapes()
    return Decoder(CONFIG, lambda name: 0.5 * torch.randn(shapes[name], generator=generator))


def stores(slots: int) -> list[Tensor]:
    """Return keys and values of two committed tokens per sequence, with leftovers after them."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(3, 2, 4, 20, 6, generator=generator)[:, :, :, :slots].unbind())


def arguments(nodes: int, slots: int) -> dict[str, Any]:
    """Return arguments for a tree of three nodes after two committed tokens, padded to `nodes` and `slots`."""
    visible = torch.zeros(2, nodes, slots, dtype=torch.bool)
    visible[:, :, :3] = True
    visible[:, 1, 3] = visible[:, 2, 4] = True
    spare = nodes - 3
    return {
        "tokens": torch.tensor([[3, 4, 5, *[0] * spare], [6, 7, 8, *[0] * spare]]),
        "positions": torch.tensor([[2, 3, 3, *[0] * spare]]),
        "slots": torch.arange(2, 2 + nodes),
        "masks": [grouped_mask(visible, 2, torch.float32)] * 2,
        "stores": stores(slots),
        "target_layers": (1, 3),
    }


def test_projections_and_norms_make_up_the_tensors(decoder: Decoder) -> None:
    named = dict(decoder.named_weights())
    assert {name: tuple(weight.shape) for name, weight in named.items()} == CONFIG.tensor_shapes()
    assert len(CONFIG.tensor_shapes()) == 3 + 3 * (7 + 6)
    assert CONFIG.windows == (None, 3) and CONFIG.ropes == (ROPE, CONFIG.layers[1].rope)


def test_more_nodes_and_slots_than_needed_change_nothing(decoder: Decoder) -> None:
    exact, padded = arguments(3, 5), arguments(8, 16)
    logits, hidden_states = decoder(**exact)
    more_logits, more_hidden_states = decoder(**padded)
    assert hidden_states is not None and hidden_states.shape == (2, 3, 24)
    torch.testing.assert_close(more_logits[:, :3], logits)
    torch.testing.assert_close(more_hidden_states[:, :3], hidden_states)
    for store, padded_store in zip(exact["stores"], padded["stores"], strict=True):
        torch.testing.assert_close(padded_store[:, :, :5], store)
        assert not torch.equal(store, stores(5)[0])


def test_slots_per_sequence_and_shared_slots_are_the_same(decoder: Decoder) -> None:
    shared, apart = arguments(3, 5), arguments(3, 5)
    apart["slots"] = apart["slots"].repeat(2, 1)
    apart["positions"] = apart["positions"].repeat(2, 1)
    assert torch.equal(decoder(**shared)[0], decoder(**apart)[0])
    assert all(torch.equal(a, b) for a, b in zip(shared["stores"], apart["stores"], strict=True))


@pytest.mark.slow
def test_the_whole_forward_compiles_as_one_graph(decoder: Decoder) -> None:
    """Also the writes to the stores. `aot_eager` traces and functionalises like the real compiler, and generates no
    code, which would take a minute."""
    compiled = torch.compile(decoder.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        plain, traced = arguments(3, 5), arguments(3, 5)
        logits, hidden_states = decoder(**plain)
        again, same = compiled(**traced)
    torch.testing.assert_close(again, logits)
    torch.testing.assert_close(same, hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(plain["stores"], traced["stores"], strict=True))
