"""Models of three words, whose answers can be compared with their exact distribution."""

import math
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

V, LENGTH, ROWS, PROMPT = 3, 3, 6000, [0, 1]
NOISE = 4.0  # standard deviations


def write_model(folder: Path, seed: int) -> Path:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
    return folder


def surprise(outputs: list[tuple[int, ...]], model: LlamaForCausalLM) -> float:
    """Chi-square of the outputs against the exact distribution, in standard deviations from what noise alone would
    give."""
    every = list(product(range(V), repeat=LENGTH))
    texts = torch.tensor([[*PROMPT, *output] for output in every])
    with torch.no_grad():
        dists = model(texts).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)
    shares = dists.gather(2, texts[:, len(PROMPT) :, None]).prod(dim=1)[:, 0].tolist()
    assert sum(shares) == pytest.approx(1)
    found, freedom = Counter(outputs), len(every) - 1
    expected = dict(zip(every, (share * len(outputs) for share in shares), strict=True))
    chi_square = sum((found[output] - count) ** 2 / count for output, count in expected.items())
    return (chi_square - freedom) / math.sqrt(2 * freedom)
