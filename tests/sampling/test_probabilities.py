"""Tests of logits to probabilities."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockdraft.sampling import probabilities
from blockdraft.sampling.probabilities import HEAD
from blockdraft.types import LEAST, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).log_softmax(-1)


def law(**fields: float) -> torch.Tensor:
    return probabilities(LOGITS.expand(1, 1, -1), [SamplingParams(**fields)])[0, 0]  # type: ignore[arg-type]


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(law(temperature=1.0), LOGITS.exp())
    torch.testing.assert_close(law(temperature=0.5), (LOGITS / 0.5).softmax(-1))


def test_a_very_low_temperature_is_greedy_and_finite() -> None:
    for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_p": LEAST}):
        assert law(temperature=LEAST, **fields).tolist() == [1, 0, 0, 0, 0]
    assert law(temperature=1.0, top_p=LEAST).tolist() == [1, 0, 0, 0, 0]


def test_greedy_is_one_hot_and_breaks_ties_towards_the_lowest_id() -> None:
    tied = torch.tensor([0.0, 3.0, 3.0]).expand(1, 1, -1)
    assert probabilities(tied, [SamplingParams()])[0, 0].tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_k_best_renormalised() -> None:
    kept = LOGITS.exp()[:2]
    torch.testing.assert_close(law(temperature=1.0, top_k=2), torch.cat([kept / kept.sum(), torch.zeros(3)]))
    torch.testing.assert_close(law(temperature=1.0, top_k=99), LOGITS.exp())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    p = LOGITS.exp()
    just_two = float(p[0]) + 0.5 * float(p[1])
    kept = p[:2]
    torch.testing.assert_close(law(temperature=1.0, top_p=just_two), torch.cat([kept / kept.sum(), torch.zeros(3)]))
    assert law(temperature=1.0, top_p=1e-6).tolist() == [1, 0, 0, 0, 0]


def test_min_p_keeps_what_has_its_share_of_the_best() -> None:
    p = LOGITS.exp()
    share = float(p[2] / p[0])
    kept = torch.where(p >= p[2], p, 0.0)
    torch.testing.assert_close(law(temperature=1.0, min_p=share * 0.99), kept / kept.sum())
    assert law(temperature=1.0, min_p=1.0).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("vocabulary", [60, 3 * HEAD])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.8, "min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.3},
        {"min_p": 0.1},
        {"top_k": HEAD + 5},
        {"top_p": 0.97},  # of the large vocabulary this keeps more than the head
    ],
)
def test_filters_agree_with_transformers(vocabulary: int, fields: dict[str, float]) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1] *= 5  # here the head suffices
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    processors = [TemperatureLogitsWarper(0.7), *(warpers[name](value) for name, value in fields.items())]
    scores = LogitsProcessorList(processors)(torch.zeros(4, 1, dtype=torch.long), logits)
    params = SamplingParams(temperature=0.7, **fields)  # type: ignore[arg-type]
    torch.testing.assert_close(probabilities(logits.unsqueeze(1), [params] * 4).squeeze(1), scores.softmax(-1))


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 2.5 / (4 * HEAD)}, {"top_k": HEAD + 3}])
def test_of_equal_logits_the_lower_ids_are_kept(fields: dict[str, float]) -> None:
    params = SamplingParams(temperature=1.0, **fields)  # type: ignore[arg-type]
    kept = probabilities(torch.zeros(1, 1, 4 * HEAD), [params])[0, 0].nonzero().flatten()
    assert kept.tolist() == list(range(params.top_k or 3))


def test_rows_have_their_own_parameters() -> None:
    both = probabilities(LOGITS.expand(2, 1, -1), [SamplingParams(), SamplingParams(temperature=1.0)])
    assert both[0, 0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(both[1, 0], LOGITS.exp())


def test_no_bit_of_a_law_depends_on_the_neighbours() -> None:
    logits = torch.randn(5, 2, 2 * HEAD, generator=torch.Generator().manual_seed(0))
    logits[::2] *= 5  # these rows need the head only, the others the whole vocabulary
    cut = SamplingParams(temperature=1.0, top_p=0.9)
    params = [cut, cut, SamplingParams(temperature=1.0), SamplingParams(), cut]
    together = probabilities(logits, params)
    for row in range(5):
        assert torch.equal(together[row], probabilities(logits[row : row + 1], params[row : row + 1])[0])


@pytest.mark.parametrize("top_k", [50, 51, 2**31 - 1])
def test_to_keep_all_needs_no_search(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    expected = probabilities(logits, [SamplingParams(temperature=0.7)] * 2)
    monkeypatch.setitem(probabilities.__globals__, "_best_probabilities", None)
    assert torch.equal(probabilities(logits, [SamplingParams(temperature=0.7, top_k=top_k)] * 2), expected)
