import pytest
from rival_rows import answers

from benchmarks.rivals.model import by_weights, measured, straight
from benchmarks.rivals.rows import Forward


def test_curves() -> None:
    line = straight(1.25)
    assert [line(1), line(16), line(31)] == pytest.approx([1, 1.25, 1.5])
    found = measured([Forward(1, "native", nodes, seconds) for nodes, seconds in ((4, 0.3), (1, 0.2), (8, 0.5))])
    assert [found(1), found(2.5), found(8), found(10)] == pytest.approx([1, 1.25, 2.5, 3.0])


def test_a_drafter_without_weights_costs_the_wider_forward() -> None:
    costs = by_weights(answers("prompt_lookup", 0, 1.5), None, 1000, straight(1.25), host=0.5)
    assert costs.draft == 0 and costs.ratio == pytest.approx((1 + 0.25 * 7 / 15 + 0.5) / 1.5)
