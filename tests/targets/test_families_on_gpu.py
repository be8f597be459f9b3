"""Forwards of every family on a pretended GPU: no operation mixes devices, and logits are those of the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import pretended_gpu
from thinned import LONG, SLOW
from tiny_families import FAMILIES, write_model
from torch import Tensor

from blockdraft.decode.proposal import chain_parents
from blockdraft.targets import load_target

# Families with which transformers' models and exact targets run in `make test`: plain attention, windows and soft-caps,
# sinks, recurrent states.
HF = ("llama", "gemma2", "gpt_oss", "qwen3_5_text", "bamba")
# And those with which ours do: experts and other recurrent states besides. The others have the layers of these.
NATIVE = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "gemma4_text")
EXACT = ("llama",)  # whose check when loading takes long
TREES = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, -1, -1]]


def scores(folder: Path, device: str, how: dict[str, Any]) -> list[Tensor]:
    """Return logits and hidden states of prompts, of trees after them, and of tokens after committed paths."""
    target = load_target(folder, dtype="float32", device=device, compile="off", **how)
    generator, cache, actual = torch.Generator().manual_seed(1), target.new_cache(3, 40), list[Tensor]()

    def score(parents: Tensor, rows: Any, logits_at: Tensor | None = None) -> None:
        tokens = torch.randint(3, 250, parents.shape, generator=generator).to(target.device)
        output = target.forward(tokens, parents, rows, (0, 2), logits_at)
        actual.extend([output.logits.cpu(), output.hidden_states.cpu()] if output.hidden_states is not None else [])

    rows: Any = cache.of([0, 40])
    score(chain_parents(2, 9), rows, torch.tensor([8, 4], device=target.device))
    rows.commit([range(9), range(5)])
    score(torch.tensor(TREES), rows)
    rows.commit([[0, 2, 5], [0]])
    whole: Any = cache
    if target.can_truncate:  # recurrent states are not copied
        whole.copy(0, 80, 8)
    rows = whole.of([80, 0])
    score(chain_parents(2, 1), rows)
    assert len(actual) == 6
    return actual


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *(pytest.param(family, "native", marks=SLOW if family in NATIVE else LONG) for family in FAMILIES),
        *(pytest.param(family, "hf", marks=SLOW if family in HF else LONG) for family in FAMILIES),
        *(pytest.param(family, "exact", marks=SLOW if family in EXACT else LONG) for family in FAMILIES),
    ],
)
def test_scores_are_those_of_the_cpu(tmp_path: Path, family: str, backend: str) -> None:
    how: dict[str, Any] = {"backend": "hf"} if backend == "hf" else {"backend": "native", "exact": backend == "exact"}
    write_model(family, tmp_path)
    try:
        expected = scores(tmp_path, "cpu", how)
    except ValueError as error:
        pytest.skip(str(error))
    with pretended_gpu():
        try:
            actual = scores(tmp_path, "cuda:0", how)
        except NotImplementedError as error:  # transformers computes experts otherwise there
            pytest.skip(f"torch has no such kernel for CPUs: {error}")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
