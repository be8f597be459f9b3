"""Grouped attention against a twin that goes through heads and nodes one by one."""

import pytest
import torch
from torch import Tensor

from blockdraft.nn.attention import attend_grouped, grouped_mask

B, N, HEADS, KV_HEADS, T, D = 2, 3, 6, 2, 5, 4
SCALE = 0.3


def twin(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softcap: float | None) -> Tensor:
    out = torch.zeros_like(queries)
    for row in range(queries.size(0)):
        for node in range(queries.size(1)):
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                seen = visible[row, node]
                scores = keys[row, group, seen] @ queries[row, node, head] * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, node, head] = scores.softmax(0) @ values[row, group, seen]
    return out.flatten(2)


def numbers(count: int = N, slots: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(B, count, HEADS + 1, D, generator=generator)[:, :, :HEADS]  # a view, as in the decoder
    keys, values = (torch.randn(B, KV_HEADS, slots, D, generator=generator) for _ in range(2))
    return queries, keys, values


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_masked_nodes(softcap: float | None) -> None:
    arguments = numbers()
    visible = torch.rand(B, N, T, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[:, :, 0] = True
    mask = grouped_mask(visible, HEADS // KV_HEADS, torch.float32)
    assert mask.shape == (B, 1, 3 * N, T)
    actual = attend_grouped(*arguments, mask, SCALE, softcap)
    torch.testing.assert_close(actual, twin(*arguments, visible, softcap))


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_one_node_needs_no_mask(softcap: float | None) -> None:
    arguments = numbers(1)
    visible = torch.ones(B, 1, T, dtype=torch.bool)
    torch.testing.assert_close(attend_grouped(*arguments, None, SCALE, softcap), twin(*arguments, visible, softcap))


def test_a_line_on_nothing_needs_no_mask() -> None:
    arguments = numbers(T)
    visible = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    torch.testing.assert_close(attend_grouped(*arguments, None, SCALE), twin(*arguments, visible, None))


def test_several_nodes_on_a_cache_need_a_mask() -> None:
    with pytest.raises(AssertionError):
        attend_grouped(*numbers(), None, SCALE)
