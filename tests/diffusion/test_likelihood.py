"""Likelihood of texts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from blockdraft.diffusion.likelihood import _summary, likelihood, t_quantile
from blockdraft.diffusion.losses import block_causal
from blockdraft.diffusion.settings import LikelihoodSettings
from blockdraft.diffusion.text import Tokens
from blockdraft.errors import NumbersError, UsageError


def text(length: int, seed: int = 0) -> Tokens:
    ids = torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(seed))
    return Tokens(ids, torch.ones(length, dtype=torch.bool))


@torch.no_grad()
def test_blocks_of_one_token_are_the_causal_model(model_of: Any, tiny_target_dir: Path) -> None:
    """A converted model with a token shift has the likelihood of the causal model."""
    theirs, texts = Qwen3ForCausalLM.from_pretrained(tiny_target_dir).eval(), [text(30), text(13, 1)]
    found = likelihood(model_of(1), texts, LikelihoodSettings(length=30, batch=2))
    dists = [theirs(one.ids[None]).logits[0, :-1].clone() for one in texts]
    for dist in dists:
        dist[:, 3] = -torch.inf  # the mask token, which no text holds
    nats = sum(
        float(torch.nn.functional.cross_entropy(dist, one.ids[1:], reduction="sum"))
        for dist, one in zip(dists, texts, strict=True)
    )
    assert found.exact and found.draws == 1 and found.tokens == 29 + 12
    assert found.bits_per_token == pytest.approx(nats / math.log(2) / 41, rel=1e-5)
    assert found.low == found.high == found.perplexity == pytest.approx(math.exp(nats / 41), rel=1e-5)


@torch.no_grad()
def test_blocks_of_one_token_are_autoregressive_without_shift_too(model_of: Any) -> None:
    """The likelihood is the product of each token's probability given those before it, which see no later one."""
    model, one = model_of(1, False), text(8)
    nats = 0.0
    for place in range(1, 8):
        ids = torch.cat([one.ids[:place], torch.tensor([3])])
        visible = block_causal(place + 1, 1)[None]
        hidden = model.network.hidden(ids[None], torch.arange(place + 1)[None], visible)[0, -1]
        dist = model.network.logits(hidden)
        dist[3] = -torch.inf
        nats -= float(dist.log_softmax(dim=-1)[one.ids[place]])
    found = likelihood(model, [one])
    assert found.exact and found.bits_per_token == pytest.approx(nats / math.log(2) / 7, rel=1e-5)


@pytest.mark.slow
def test_the_interval_holds_the_bound(model_of: Any) -> None:
    """The value of very many draws lies in most of the intervals of few; more draws narrow the interval."""
    model, texts = model_of(4), [text(17), text(17, 1)]
    bound = likelihood(model, texts, LikelihoodSettings(draws=400, seed=99)).perplexity
    few = [likelihood(model, texts, LikelihoodSettings(draws=4, seed=seed)) for seed in range(12)]
    assert sum(one.low <= bound <= one.high for one in few) >= 9
    more = likelihood(model, texts, LikelihoodSettings(draws=60))
    assert more.high - more.low < sum(one.high - one.low for one in few) / 12 / 3
    assert more.draws == 60 and not more.exact
    assert more.bits_per_token == pytest.approx(math.log2(more.perplexity))
    assert likelihood(model, texts, LikelihoodSettings(draws=60)) == more


def test_interval_of_four_draws() -> None:
    """The interval is that of Student's t distribution, here around means of 1, 2, 3 and 4 nats a token."""
    sums = torch.tensor([[0, 5.0, 5], [0, 10, 10], [0, 15, 15], [0, 20, 20]], dtype=torch.float64)
    found = _summary(sums, torch.tensor([0, 5, 5]), 10, 2, False)
    around = 3.182 * (5 / 3) ** 0.5 / 2
    assert found.perplexity == pytest.approx(math.exp(2.5)) and found.bits_per_token == pytest.approx(2.5 / math.log(2))
    assert math.log(found.low) == pytest.approx(2.5 - around, abs=0.03)
    assert math.log(found.high) == pytest.approx(2.5 + around, abs=0.03)


def test_each_token_counts_once(model_of: Any) -> None:
    """Every token but the first counts once, however the text is cut, and whatever the batch."""
    model = model_of(1)
    for length in (2, 5, 40):
        assert likelihood(model, [text(21)], LikelihoodSettings(length=length)).tokens == 20
    one, two = (likelihood(model, [text(21), text(9, 1)], LikelihoodSettings(length=6, batch=n)) for n in (1, 3))
    assert one.bits_per_token == pytest.approx(two.bits_per_token, rel=1e-5)


def test_breakdown(model_of: Any) -> None:
    model, one = model_of(4), text(10)
    found = likelihood(model, [one], LikelihoodSettings(draws=4))
    assert len(found.by_block) == 3 and len(found.by_position) == 4
    by_block, by_position = ([value or 0 for value in table] for table in (found.by_block, found.by_position))
    total = found.bits_per_token * 9
    assert by_block[0] * 3 + by_block[1] * 4 + by_block[2] * 2 == pytest.approx(total)
    assert by_position[0] * 2 + by_position[1] * 3 + by_position[2] * 2 + by_position[3] * 2 == pytest.approx(total)


def test_only_eligible_tokens_are_predicted(model_of: Any) -> None:
    one = text(12)
    eligible = torch.arange(12) >= 8
    model = model_of(1)
    found = likelihood(model, [Tokens(one.ids, eligible)])
    assert found.tokens == 4 and found.by_block[7] is None and found.by_block[8] is not None
    whole = likelihood(model, [one])
    assert found.by_block[8:] == pytest.approx(whole.by_block[8:])


def test_bad_input(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(4)
    with pytest.raises(UsageError, match="no token to predict"):
        likelihood(model, [text(1)])
    with pytest.raises(UsageError, match="length is 300, and the model has a context of 256 tokens; give at most 256"):
        likelihood(model, [text(9)], LikelihoodSettings(length=300))
    with pytest.raises(UsageError, match="draws must be at least 4, got 3"):
        LikelihoodSettings(draws=3)
    monkeypatch.setattr(model.network, "logits", lambda states: states.new_full((len(states), 265), torch.nan))
    with pytest.raises(NumbersError, match="not finite"):  # at once, and not when all has been computed
        likelihood(model, [text(9)], progress=lambda stage, done, total: done and pytest.fail("it goes on"))


@pytest.mark.parametrize(("freedom", "wanted"), [(3, 3.182), (7, 2.365), (30, 2.042), (10**6, 1.960)])
def test_quantiles_of_students_t(freedom: int, wanted: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(wanted, rel=0.01)
