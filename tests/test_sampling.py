import pytest
import torch

from blockdraft.sampling import RandomNumbers, draw, probabilities
from blockdraft.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).log_softmax(-1)


def law(**fields: float) -> torch.Tensor:
    return probabilities(LOGITS.expand(1, 1, -1), [SamplingParams(**fields)])[0, 0]  # type: ignore[arg-type]


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(law(temperature=1.0), LOGITS.exp())
    torch.testing.assert_close(law(temperature=0.5), (LOGITS / 0.5).softmax(-1))


def test_a_very_low_temperature_is_greedy_and_finite() -> None:
    assert law(temperature=1e-40).tolist() == [1, 0, 0, 0, 0]


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


def test_filters_agree_with_transformers() -> None:
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(4, 1, dtype=torch.long)
    scores = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)):
        scores = warper(ids, scores)
    ours = probabilities(logits.unsqueeze(1), [SamplingParams(temperature=0.7, top_k=20, top_p=0.8)] * 4)
    torch.testing.assert_close(ours.squeeze(1), scores.softmax(-1))


def test_rows_have_their_own_parameters() -> None:
    both = probabilities(LOGITS.expand(2, 1, -1), [SamplingParams(), SamplingParams(temperature=1.0)])
    assert both[0, 0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(both[1, 0], LOGITS.exp())


def test_draw_follows_the_law_and_never_draws_what_has_no_mass() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(probs.expand(1, count, -1), uniforms[None])
    torch.testing.assert_close(torch.bincount(drawn[0], minlength=6) / count, probs, atol=1e-3, rtol=0)
    edges = torch.tensor([[0.0, 1 - 2**-53]], dtype=torch.float64)
    assert draw(probs.expand(1, 2, -1), edges).tolist() == [[1, 4]]


def test_random_numbers_belong_to_positions() -> None:
    numbers, same = RandomNumbers(7), RandomNumbers(7)
    assert numbers.at(torch.tensor([3, 4])).tolist() == same.at(torch.tensor([4, 3])).flip(0).tolist()
    assert numbers.at(torch.arange(10)).tolist() != RandomNumbers(8).at(torch.arange(10)).tolist()
    late = same.at(torch.tensor(700))  # asked for early or late, in one go or many
    assert float(RandomNumbers(7).at(torch.arange(701))[700]) == float(late)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
