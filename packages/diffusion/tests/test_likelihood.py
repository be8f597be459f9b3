"""Likelihood of texts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from transformers import Qwen3ForCausalLM

from blockdraft.errors import NumbersError, UsageError
from blockdraft_diffusion.likelihood import likelihood, summarize, t_quantile
from blockdraft_diffusion.losses import block_causal
from blockdraft_diffusion.settings import LikelihoodSettings
from blockdraft_diffusion.text import TextTokens


def text(length: int, seed: int = 0) -> TextTokens:
    ids = torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(seed))
    return TextTokens(ids, torch.ones(length, dtype=torch.bool))


@torch.no_grad()
def test_blocks_of_one_token_are_the_causal_model(model_of: Any, tiny_target_dir: Path) -> None:
    """A converted model with a token shift has the likelihood of the causal model."""
    causal, texts = Qwen3ForCausalLM.from_pretrained(tiny_target_dir).eval(), [text(30), text(13, 1)]
    result = likelihood(model_of(1), texts, LikelihoodSettings(length=30, batch=2))
    all_logits = [causal(tokens.ids[None]).logits[0, :-1].clone() for tokens in texts]
    for logits in all_logits:
        logits[:, 3] = -torch.inf  # the mask token
    nats = sum(
        float(torch.nn.functional.cross_entropy(logits, tokens.ids[1:], reduction="sum"))
        for logits, tokens in zip(all_logits, texts, strict=True)
    )
    assert result.exact and result.draws == 1 and result.tokens == 29 + 12
    assert result.bits_per_token == pytest.approx(nats / math.log(2) / 41, rel=1e-5)
    assert result.low == result.high == result.perplexity == pytest.approx(math.exp(nats / 41), rel=1e-5)


@torch.no_grad()
def test_blocks_of_one_token_are_autoregressive_without_shift_too(model_of: Any) -> None:
    """The likelihood is the product of the probabilities of the tokens given the tokens before them."""
    model, tokens = model_of(1, False), text(8)
    nats = 0.0
    for position in range(1, 8):
        ids = torch.cat([tokens.ids[:position], torch.tensor([3])])
        visible = block_causal(position + 1, 1)[None]
        hidden = model.network.hidden(ids[None], torch.arange(position + 1)[None], visible)[0, -1]
        logits = model.network.logits(hidden)
        logits[3] = -torch.inf
        nats -= float(logits.log_softmax(dim=-1)[tokens.ids[position]])
    result = likelihood(model, [tokens])
    assert result.exact and result.bits_per_token == pytest.approx(nats / math.log(2) / 7, rel=1e-5)


@pytest.mark.slow
def test_interval_contains_the_bound(model_of: Any) -> None:
    """Most intervals of few draws contain the value of many draws, and more draws narrow the interval."""
    model, texts = model_of(4), [text(17), text(17, 1)]
    bound = likelihood(model, texts, LikelihoodSettings(draws=400, seed=99)).perplexity
    few = [likelihood(model, texts, LikelihoodSettings(draws=4, seed=seed)) for seed in range(12)]
    assert sum(result.low <= bound <= result.high for result in few) >= 9
    more = likelihood(model, texts, LikelihoodSettings(draws=60))
    assert more.high - more.low < sum(result.high - result.low for result in few) / 12 / 3
    assert more.draws == 60 and not more.exact
    assert more.bits_per_token == pytest.approx(math.log2(more.perplexity))
    assert likelihood(model, texts, LikelihoodSettings(draws=60)) == more


def test_interval_of_four_draws() -> None:
    """The interval is that of Student's t distribution, here for means of 1, 2, 3 and 4 nats per token."""
    sums = torch.tensor([[0, 5.0, 5], [0, 10, 10], [0, 15, 15], [0, 20, 20]], dtype=torch.float64)
    result = summarize(sums, torch.tensor([0, 5, 5]), 2)
    margin = 3.182 * (5 / 3) ** 0.5 / 2
    assert result.perplexity == pytest.approx(math.exp(2.5)) and result.bits_per_token == pytest.approx(
        2.5 / math.log(2)
    )
    assert math.log(result.low) == pytest.approx(2.5 - margin, abs=0.03)
    assert math.log(result.high) == pytest.approx(2.5 + margin, abs=0.03)


def test_each_token_counts_once(model_of: Any) -> None:
    """Every token but the first counts once, for any length and batch size."""
    model = model_of(1)
    for length in (2, 5, 40):
        assert likelihood(model, [text(21)], LikelihoodSettings(length=length)).tokens == 20
    single, batched = (likelihood(model, [text(21), text(9, 1)], LikelihoodSettings(length=6, batch=n)) for n in (1, 3))
    assert single.bits_per_token == pytest.approx(batched.bits_per_token, rel=1e-5)


def test_breakdown(model_of: Any) -> None:
    result = likelihood(model_of(4), [text(10)], LikelihoodSettings(draws=4))
    assert len(result.by_block) == 3 and len(result.by_position) == 4
    by_block, by_position = ([value or 0 for value in table] for table in (result.by_block, result.by_position))
    total = result.bits_per_token * 9
    assert by_block[0] * 3 + by_block[1] * 4 + by_block[2] * 2 == pytest.approx(total)
    assert by_position[0] * 2 + by_position[1] * 3 + by_position[2] * 2 + by_position[3] * 2 == pytest.approx(total)


def test_only_eligible_tokens_are_predicted(model_of: Any) -> None:
    tokens, model = text(12), model_of(1)
    result = likelihood(model, [TextTokens(tokens.ids, torch.arange(12) >= 8)])
    assert result.tokens == 4 and result.by_block[7] is None and result.by_block[8] is not None
    whole = likelihood(model, [tokens])
    assert result.by_block[8:] == pytest.approx(whole.by_block[8:])


def test_bad_input(model_of: Any) -> None:
    model = model_of(4)
    with pytest.raises(UsageError, match="no token to predict"):
        likelihood(model, [text(1)])
    with pytest.raises(UsageError, match="length must be at most 256, the model's context, got 300"):
        likelihood(model, [text(9)], LikelihoodSettings(length=300))
    with pytest.raises(UsageError, match="draws must be at least 4, got 3"):
        LikelihoodSettings(draws=3)
    model = replace(
        model, network=copy_with(model.network, logits=lambda states: states.new_full((len(states), 265), torch.nan))
    )
    with pytest.raises(NumbersError, match="not finite"):  # after the first batch
        likelihood(model, [text(9)], progress=lambda stage, done, total: done and pytest.fail("not stopped"))


@pytest.mark.parametrize(("freedom", "expected"), [(3, 3.182), (7, 2.365), (30, 2.042), (10**6, 1.960)])
def test_quantiles_of_students_t(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=0.01)
