import pytest
from rival_rows import answers, cycle, figures

from benchmarks.rivals.figures import BOTH, CHAINS, TREES, by_weights, measured, straight
from benchmarks.rivals.records import NATIVE, Forward


def test_tau_is_that_of_each_seed() -> None:
    found = figures()
    assert found.tau("dflash", 0.0, "chain:7") == pytest.approx({0: 3.0, 1: 3.2})
    more = figures(answers("dflash", 1, 2.2, "chat"))
    assert more.tau("dflash", 0.0, "chain:7")[1] == pytest.approx((3.2 + 3.2 + 2.2) / 3)  # sets weigh alike
    assert more.tau("dflash", 0.0, "chain:7", "chat") == pytest.approx({1: 2.2})
    assert found.shares("dflash", 0.0, "chain:7") == pytest.approx([0.8, 0.4])


def test_a_cycle_costs_what_its_weights_cost_in_the_regime() -> None:
    found = figures()
    curve_8, curve_3 = 1 + 0.25 * 7 / 15, 1 + 0.25 * 2 / 15
    rows = found.of("dflash", 0.0, "chain:7")
    costs = found.regime.costs(rows[0])
    assert costs is not None
    assert costs.draft == pytest.approx(0.2 * curve_8 + 0.1 * curve_3)
    assert costs.ratio == pytest.approx(costs.draft + curve_8)
    eagle = found.regime.costs(found.of("eagle3", 0.0, "chain:7")[0])
    assert eagle is not None and eagle.draft == pytest.approx(7 * 0.2 + 0.1 * (1 + 0.25 / 15))
    lookup = found.regime.costs(found.of("prompt_lookup", 0.0)[0])
    assert lookup is not None and lookup.ratio == pytest.approx(curve_8)


def test_measured_drafts_replace_those_by_weights() -> None:
    found = figures()
    costs = found.regime_measured.costs(found.of("eagle3", 0.0)[0])
    assert costs is not None and costs.draft == pytest.approx(0.004 / 0.008)


def test_on_this_processor_the_median_of_the_repeats_counts() -> None:
    found = figures()
    here = found.here(1)
    costs = [here.costs(found.of(kind, 0.0)[0]) for kind in ("dflash", "eagle3", "prompt_lookup")]
    assert costs[0] is not None and costs[0].ratio == pytest.approx(1.5)
    assert costs[1] is not None and costs[1].ratio == pytest.approx(2.5)
    assert costs[2] is None
    modelled = found.here_by_weights(1).costs(found.of("dflash", 0.0)[0])
    assert modelled is not None and modelled.plain == pytest.approx(0.01 / 0.008)  # the host takes the rest
    assert modelled.ratio == pytest.approx((0.2 * 2 + 0.1 * (1 + 2 / 7) + 2 + 0.25) / 1.25, rel=1e-3)


def test_the_headline_takes_each_at_its_best() -> None:
    better = [answers("eagle3", seed, 2.6, name, "tree:16") for seed in (0, 1) for name in ("maths", "code")]
    found = figures(*better)
    found.cycles = [*found.cycles, cycle("eagle3", 2.0, NATIVE, way="tree:16")]
    for shape, expected in ((CHAINS, 2.0 / 2.5), (BOTH, 2.6 / 2.0)):
        both = found.headline(0.0, found.here(1), shape)
        assert both is not None
        ours, theirs, ratios = both
        assert ours.way == "chain:7" and theirs.way == ("chain:7" if shape == CHAINS else "tree:16")
        assert ratios[0] == pytest.approx(3.0 / 1.5 / expected)
    assert len(ratios) == 2
    assert found.headline(0.0, found.here(1), TREES) is None  # DFlash has no tree here
    assert [kind for kind, _ in found.order(0.0, found.regime)][0] == "dflash"


def test_changed_answers_are_named() -> None:
    assert figures().changed() == []
    assert figures(answers("eagle3", 2, 2.0, same=0.9)).changed() == ["eagle3 chain:7"]


def test_curves() -> None:
    line = straight(1.25)
    assert [line(1), line(16), line(31)] == pytest.approx([1, 1.25, 1.5])
    found = measured([Forward(1, "native", nodes, seconds) for nodes, seconds in ((4, 0.3), (1, 0.2), (8, 0.5))])
    assert [found(1), found(2.5), found(8), found(10)] == pytest.approx([1, 1.25, 2.5, 3.0])


def test_a_drafter_without_weights_costs_the_wider_forward() -> None:
    costs = by_weights(answers("prompt_lookup", 0, 1.5), None, 1000, straight(1.25), host=0.5)
    assert costs.draft == 0 and costs.ratio == pytest.approx((1 + 0.25 * 7 / 15 + 0.5) / 1.5)
