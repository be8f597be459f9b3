"""The compiled forward where no size is a multiple of a vector's length: what is left over at the ends counts too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from blockdraft.targets import Target, load_target

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 42,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
LENGTHS = 60, 37  # past the window, unlike each other, and no multiples of a vector either
TREE = [[-1, 0, 0, 1, 2, 4, 5, 6, 7, 3], [-1, 0, 1, 2, 0, 4, 4, 5, 6, 8]]


def logits_and_features(target: Target) -> list[torch.Tensor]:
    """Of two prompts that are read together and of trees behind them."""
    generator = torch.Generator().manual_seed(0)
    cache, last = target.new_cache(2, 80), torch.tensor(LENGTHS) - 1
    prompts = torch.randint(53, (2, max(LENGTHS)), generator=generator)
    line = torch.arange(-1, max(LENGTHS) - 1).expand(2, -1)
    outputs = [target.forward(prompts, line, cache, (0, 2), last)]
    cache.commit([range(length) for length in LENGTHS])
    nodes = torch.randint(53, (2, len(TREE[0])), generator=generator)
    outputs.append(target.forward(nodes, torch.tensor(TREE), cache, (0, 2)))
    assert all(output.features is not None for output in outputs)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    features = [outputs[0].features[real], outputs[1].features]  # type: ignore[index]
    return [*(output.logits.float() for output in outputs), *(f.float() for f in features if f is not None)]


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("window", [3, 17, 21])
def test_it_computes_what_transformers_computes(tmp_path: Path, head_dim: int, window: int) -> None:
    config = Gemma2Config(**SIZES, head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=window)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.2 * (parameter.ndim == 1), std=0.3)
    model.save_pretrained(tmp_path)
    exact = logits_and_features(load_target(tmp_path, "float32", "cpu", "hf"))
    for quantize, dtype, allowed in ((None, "float32", 1e-4), ("int8", "float32", 1e-4), (None, "bfloat16", 0.0)):
        compiled = load_target(tmp_path, dtype, "cpu", "native", "on", quantize)  # type: ignore[arg-type]
        plain = load_target(tmp_path, dtype, "cpu", "native", "off", quantize)  # type: ignore[arg-type]
        for ours, theirs, right in zip(*map(logits_and_features, (compiled, plain)), exact, strict=True):
            if quantize is None and dtype == "float32":
                torch.testing.assert_close(ours, right, atol=allowed, rtol=allowed)
            if allowed:
                torch.testing.assert_close(ours, theirs, atol=allowed, rtol=allowed)
            else:  # arithmetic is exact there, only what is stored is rounded
                assert float((ours - right).abs().mean()) < float((theirs - right).abs().mean())
