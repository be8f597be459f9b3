import torch

from blockdraft.nn.layers import ReducedHead


def test_logits_lie_where_the_target_has_these_tokens() -> None:
    weight = torch.arange(6.0).view(3, 2)
    head = ReducedHead(weight, torch.tensor([1, 2, 5]), 7).to(torch.device("cpu"), torch.float64)
    logits = head(torch.tensor([[[1.0, 1.0]]], dtype=torch.float64))
    inf = float("inf")
    assert logits.dtype == torch.float64
    assert logits.tolist() == [[[-inf, 1.0, 5.0, -inf, -inf, 9.0, -inf]]]
